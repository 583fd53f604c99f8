"""Maths problems from verl-form parquet files, judged by math-verify."""

from concurrent.futures import Future
from typing import Any, ClassVar

from .base import Problem
from .math_pool import MathVerifierPool
from .math_verifier import answer_text, prepare_gold
from .pooled import PooledEnv
from .tables import TableEnv
from .verdict import Verdict


class MathEnv(PooledEnv, TableEnv):
    r"""Asks maths problems whose answer goes into `\boxed{...}`.

    The columns are those of verl's files by default. `TableEnv` explains the settings
    of the data, `PooledEnv` those of the processes that judge answers.

    Rewards: 1 if the last box equals the gold answer by the policy in docs/verifier.md.
    """

    settings: ClassVar = {
        "answer_column": "reward_model.ground_truth",
        "source_column": "data_source",
        "split_column": "extra_info.split",
    }

    def fault(self, problem: Problem) -> str:
        """Finds unusable gold answers too."""
        unusable = prepare_gold(problem.answer) is None
        return super().fault(problem) or unusable * "empty or unusable gold answer"

    def build_pool(self, **limits: Any) -> MathVerifierPool:
        """Builds processes that run math-verify."""
        return MathVerifierPool(**limits)

    def submit(self, completion: str, problem: Problem) -> Future[Verdict]:
        """Starts judging the last box against the gold answer."""
        return self.pool.submit(problem.answer, completion)

    def answer_key(self, completion: str) -> str | None:
        """Returns the LaTeX in the last box, normalised and without spaces."""
        return answer_text(completion)

    def gold_completion(self, problem: Problem) -> str:
        """Puts the prepared gold answer into a box."""
        return rf"\boxed{{{prepare_gold(problem.answer)}}}"
