"""A verifier pool that judges easy maths answers at once."""

import re
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from .math_verifier import quick_verdict
from .verdict import Verdict
from .verifier_pool import VerifierPool, judged

_NUMBER = re.compile(r"[-+\d.,/ ]{1,40}")


class MathVerifierPool(VerifierPool):
    """Judges maths answers in worker processes, most answers to plain numbers without.

    Those take microseconds. To try other answers here first would keep the calling
    process from feeding the workers, which need no longer for the same.
    """

    def submit(self, *task: Any) -> Future[Verdict]:
        """Starts judging one answer, or has judged it.

        Args:
            *task: gold answer and completion.
        """
        gold, completion = task
        answer = str(gold).rpartition("####")[2].strip()  # of GSM8K's worked answers
        is_number = _NUMBER.fullmatch(answer) is not None
        started = time.perf_counter()
        verdict = quick_verdict(gold, completion) if is_number else None
        if verdict is None:
            return super().submit(gold, completion)
        return judged(replace(verdict, seconds=time.perf_counter() - started))
