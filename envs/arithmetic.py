"""Sums of two numbers: a generated task that needs no download."""

import re
from typing import ClassVar

import numpy as np

from .answers import boxed_answer
from .base import Problem
from .generated import GeneratedEnv
from .verdict import Reason, Verdict

_INTEGER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)")


class ArithmeticEnv(GeneratedEnv):
    r"""Asks for the sum of two numbers, to be given in `\boxed{...}`.

    The number of digits is drawn for each number by itself, so that easy and hard sums
    mix. `a + b` and `b + a` are the same problem.

    Rewards: 1 if the last box holds exactly the sum (spaces, a plus sign, leading zeros
    and thousands commas allowed), else 0.

    Settings:
        digits: fewest and most digits of a number.
    """

    settings: ClassVar = {"digits": (1, 4)}

    def load(self) -> list[Problem]:
        """Draws the problems of the split.

        Raises:
            ValueError: for settings out of range, or too few distinct sums.
        """
        digits = self.config["digits"]
        if len(digits) != 2 or not 1 <= digits[0] <= digits[1] <= 18:
            raise ValueError(
                f"`digits` is {digits}; give the fewest and the most digits of a "
                "number, between 1 and 18."
            )
        return super().load()

    def draw(self, random: np.random.Generator) -> tuple[str, Problem]:
        """Draws two numbers."""
        a, b = self._number(random), self._number(random)
        question = f"What is {a} + {b}?"
        problem = Problem(f"{a}+{b}", question, str(a + b), "arithmetic")
        return f"{min(a, b)}+{max(a, b)}", problem

    def verify(self, completion: str, problem: Problem) -> Verdict:
        """Compares the integer in the last box with the sum."""
        if boxed_answer(completion) is None:
            return Verdict.of(Reason.NO_ANSWER)
        answer = self.answer_key(completion)
        if answer is None:
            return Verdict.of(Reason.ANSWER_UNPARSED)
        return Verdict.of(Reason.OK if answer == problem.answer else Reason.WRONG)

    def answer_key(self, completion: str) -> str | None:
        """Returns the integer in the last box, None if there is none."""
        digits = "".join((boxed_answer(completion) or "").split())
        if not _INTEGER.fullmatch(digits):
            return None
        # As text: int() refuses, by design, integers of thousands of digits.
        size = digits.replace(",", "").lstrip("+-").lstrip("0") or "0"
        sign = "-" if digits.startswith("-") and size != "0" else ""
        return sign + size

    def _number(self, random: np.random.Generator) -> int:
        low, high = self.config["digits"]
        num_digits = int(random.integers(low, high + 1))
        smallest = 0 if num_digits == 1 else 10 ** (num_digits - 1)
        return int(random.integers(smallest, 10**num_digits))
