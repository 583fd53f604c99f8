"""What environments share whose answers are judged in worker processes."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, ClassVar

from .base import Problem, VerifiableTextEnv
from .verdict import Verdict
from .verifier_pool import VerifierPool


class PooledEnv(VerifiableTextEnv):
    """Judges answers in worker processes, while others are still being sampled.

    A subclass writes `build_pool`, `submit`, and what other environments write.

    Settings:
        verifier_workers: processes that judge answers; None means one a CPU.
        verifier_time_limit_s: wall time for one answer, after which it counts as
            unknown.
        verifier_memory_limit_bytes: address space of one of the processes.
    """

    settings: ClassVar = {
        "verifier_workers": None,
        "verifier_time_limit_s": 5.0,
        "verifier_memory_limit_bytes": 2 << 30,
    }

    @abstractmethod
    def build_pool(self, **limits: Any) -> VerifierPool:
        """Builds the worker processes.

        Args:
            limits: `num_workers`, `time_limit_s` and `memory_limit_bytes` of the pool.
        """

    @abstractmethod
    def submit(self, completion: str, problem: Problem) -> Future[Verdict]:
        """Starts judging a completion in `pool`."""

    def verify(self, completion: str, problem: Problem) -> Verdict:
        """Judges one completion."""
        return self.submit(completion, problem).result()

    def verify_many(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> list[Verdict]:
        """Judges completions side by side; verdicts come in order."""
        return self.start_verifying(completions, problems)()

    def start_verifying(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> Callable[[], list[Verdict]]:
        """Starts judging completions; what it returns waits for the verdicts."""
        pairs = zip(completions, problems, strict=True)
        pending = [self.submit(completion, problem) for completion, problem in pairs]
        return lambda: [verdict.result() for verdict in pending]

    @cached_property
    def pool(self) -> VerifierPool:
        """The worker processes, started when first used."""
        return self.build_pool(
            num_workers=self.config["verifier_workers"],
            time_limit_s=self.config["verifier_time_limit_s"],
            memory_limit_bytes=self.config["verifier_memory_limit_bytes"],
        )

    def close(self) -> None:
        """Ends the worker processes; they start again when needed."""
        pool = self.__dict__.pop("pool", None)
        if pool is not None:
            pool.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "pool"}
