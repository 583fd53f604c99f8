"""What a verifier says about one completion."""

import math
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a completion got its reward."""

    OK = "ok"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    GOLD_UNPARSED = "gold_unparsed"
    ANSWER_UNPARSED = "answer_unparsed"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward and the reason for it.

    Attributes:
        reward: in [0, 1]; NaN where no verdict was reached (a time-out or a broken
            verifier), which must never count as correct.
        reason: one of `Reason`, so that metrics tell wrong answers from broken scoring.
        message: one line on what happened, for reasons that need it.
        seconds: wall time that the verifier took.
    """

    reward: float
    reason: str
    message: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, reason: Reason, message: str = "", seconds: float = 0.0) -> "Verdict":
        """Builds the binary verdict of a reason: 1 for ok, NaN for unknown, else 0."""
        unknown = reason in (Reason.TIMEOUT, Reason.ERROR)
        reward = math.nan if unknown else float(reason == Reason.OK)
        return cls(reward, reason, message, seconds)

    @property
    def is_known(self) -> bool:
        """Whether the verifier reached a verdict at all."""
        return not math.isnan(self.reward)
