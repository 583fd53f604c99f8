"""Maths problems from verl-form parquet files, judged by math-verify."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from .base import Problem
from .math_pool import MathVerifierPool
from .math_verifier import answer_text, prepare_gold
from .tables import TableEnv
from .verdict import Verdict


class MathEnv(TableEnv):
    r"""Asks maths problems whose answer goes into `\boxed{...}`.

    The columns are those of verl's files by default; see `TableEnv` for their settings.

    Rewards: 1 if the last box equals the gold answer by the policy in docs/verifier.md.

    Settings:
        verifier_workers: processes that judge answers; None means one a CPU.
        verifier_time_limit_s: wall time for one answer, after which it counts as
            unknown.
        verifier_memory_limit_bytes: address space of one of the processes.
    """

    settings: ClassVar = {
        "answer_column": "reward_model.ground_truth",
        "source_column": "data_source",
        "split_column": "extra_info.split",
        "verifier_workers": None,
        "verifier_time_limit_s": 5.0,
        "verifier_memory_limit_bytes": 2 << 30,
    }

    def fault(self, problem: Problem) -> str:
        """Finds unusable gold answers too."""
        unusable = prepare_gold(problem.answer) is None
        return super().fault(problem) or unusable * "empty or unusable gold answer"

    def verify(self, completion: str, problem: Problem) -> Verdict:
        """Judges the last box against the gold answer."""
        return self.verify_many([completion], [problem])[0]

    def verify_many(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> list[Verdict]:
        """Judges easy answers at once and the others in worker processes, in order."""
        return self._pool.verify_many([p.answer for p in problems], completions)

    def answer_key(self, completion: str) -> str | None:
        """Returns the LaTeX in the last box, normalised and without spaces."""
        return answer_text(completion)

    def verifier_stats(self) -> dict[str, float]:
        """Returns the pool's counts by reason and its latencies in seconds."""
        return self._pool.stats()

    def close(self) -> None:
        """Ends the verifier's processes; they start again when needed."""
        pool = self.__dict__.pop("_pool", None)
        if pool is not None:
            pool.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_pool"}

    @cached_property
    def _pool(self) -> MathVerifierPool:
        return MathVerifierPool(
            self.config["verifier_workers"],
            self.config["verifier_time_limit_s"],
            self.config["verifier_memory_limit_bytes"],
        )

    def gold_completion(self, problem: Problem) -> str:
        """Puts the prepared gold answer into a box."""
        return rf"\boxed{{{prepare_gold(problem.answer)}}}"
