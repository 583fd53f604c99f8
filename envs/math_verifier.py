r"""Judges a maths completion against a gold answer; the policy is in docs/verifier.md.

Three steps, each pure: take the last box (`answers`), bring both answers into one
dialect (`latex`), compare them part by part (`comparison`). Parts that are plain
numbers are compared exactly (`exact`), other formulas with math-verify (`symbolic`).
"""

import math
import re
from decimal import Decimal
from typing import Any

from .answers import boxed_answer, last_boxed
from .comparison import Comparison, NeedsSymbolicError, UnusableError
from .latex import normalise, squeeze
from .verdict import Reason, Verdict

MAX_ANSWER_CHARS = 10_000
_MAX_WORDS = 2  # of a word answer; more is prose, which nobody can compare

# One of each frequent kind: what parser and SymPy keep of them, forked workers inherit.
_WARM_UP = (
    ("x+1", r"\frac{2x+2}{2}"),
    ("(x+3)^2", "x^2+6x+9"),
    ("y = 3x-7", "3x-y-7=0"),
    (r"12\sqrt{3}", r"\sqrt{432}"),
    (r"\frac{3\pi}{4}", r"\pi-\frac{\pi}{4}"),
    (r"\log_2 8+\ln e", "4"),
    (r"\sin^2\theta", r"1-\cos^{2}\theta"),
    (r"\sqrt{2}+\sqrt[3]{5}", r"2^{1/2}+\log_2 8"),
    (r"e^{-2t}\cos(3t-\frac{\pi}{4})", r"\frac{1}{a_1}\left(b^{n}-1\right)"),
    (r"\binom{n}{2}-\lfloor n/2 \rfloor", r"\frac{n(n-1)}{2}"),
    (r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}\setminus\{0\}"),
)


def warm_up() -> None:
    """Imports SymPy and fills its grammar's tables, which forked workers inherit."""
    for gold, answer in _WARM_UP:
        verify_math(gold, rf"\boxed{{{answer}}}")


def verify_math(gold: Any, completion: Any) -> Verdict:
    """Judges a completion. Unbounded in time: run it where it can be killed."""
    return _verdict(gold, completion, symbolic=True)


def quick_verdict(gold: Any, completion: Any) -> Verdict | None:
    """Returns the verdict of `verify_math` if it needs no SymPy, else None.

    Takes microseconds to milliseconds, whatever the completion.
    """
    try:
        return _verdict(gold, completion, symbolic=False)
    except NeedsSymbolicError:
        return None


def prepare_gold(gold: Any) -> str | None:
    """Returns the gold answer as bare LaTeX, or None if it cannot be used.

    Numbers become text, GSM8K's worked answers are cut to what follows `####`, and
    dollars, a box and final punctuation are taken off. Empty answers and prose of more
    than two words are unusable.
    """
    if isinstance(gold, bool) or not isinstance(gold, str | int | float | Decimal):
        return None
    if not isinstance(gold, str) and not math.isfinite(gold):
        return None
    text = str(gold).rpartition("####")[2]
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).strip().rstrip(".,;: ")
    latex = normalise(text)
    return None if not squeeze(latex) or _is_prose(latex) else text


def answer_text(completion: str) -> str | None:
    """Returns the answer of a completion in one spelling, None if there is none."""
    answer = boxed_answer(completion)
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return None
    return squeeze(normalise(answer)) or None


def _is_prose(latex: str) -> bool:
    match = re.fullmatch(r"\\text\{([^{}]*)\}", latex)
    return (
        match is not None and "," not in match[1] and len(match[1].split()) > _MAX_WORDS
    )


def _verdict(gold: Any, completion: Any, symbolic: bool) -> Verdict:
    wanted = prepare_gold(gold)
    if wanted is None:
        return Verdict.of(Reason.GOLD_UNPARSED, f"gold answer {str(gold)[:60]!r}")
    answer = boxed_answer(completion) if isinstance(completion, str) else None
    if answer is None or not answer.strip():
        return Verdict.of(Reason.NO_ANSWER)
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict.of(Reason.ANSWER_UNPARSED, f"{len(answer)} characters")
    try:
        equal = Comparison(symbolic).same(normalise(wanted), normalise(answer))
    except UnusableError as error:
        return Verdict.of(error.reason, str(error))
    except RecursionError:
        return Verdict.of(Reason.ANSWER_UNPARSED, "nested too deeply")
    return Verdict.of(Reason.OK if equal else Reason.WRONG)
