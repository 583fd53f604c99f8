"""Sums of two numbers: a generated task that needs no download."""

import re
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from .answers import boxed_answer
from .base import Problem, VerifiableTextEnv
from .verdict import Reason, Verdict

_DEFAULT_NUM_PROBLEMS = {"train": 2048, "heldout": 256}
_HELDOUT_SHARE = 8  # one in eight pairs is held out
_MAX_FRUITLESS_DRAWS = 20_000
_INTEGER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)")


class ArithmeticEnv(VerifiableTextEnv):
    r"""Asks for the sum of two numbers, to be given in `\boxed{...}`.

    A pair of numbers belongs to the train or the held-out split by a hash of the pair,
    whatever its order and the other settings: no two environments with different splits
    ever share a sum. The number of digits is drawn for each number by itself, so that
    easy and hard sums mix.

    Rewards: 1 if the last box holds exactly the sum (spaces, a plus sign, leading zeros
    and thousands commas allowed), else 0.

    Settings:
        split: "train" or "heldout".
        digits: fewest and most digits of a number.
        num_problems: how many; None means 2048 for train and 256 for heldout.
        seed: of the generator that draws the problems.
    """

    settings: ClassVar = {
        "split": "train",
        "digits": (1, 4),
        "num_problems": None,
        "seed": 0,
    }

    def load(self) -> list[Problem]:
        """Draws the problems of the split.

        Raises:
            ValueError: for settings out of range, or too few distinct sums.
        """
        split, (low, high), count = self._checked_settings()
        pairs = list(islice(self._distinct_pairs(split, low, high), count))
        if len(pairs) < count:
            raise ValueError(
                f"`num_problems` = {count}, but the split {split!r} has only about "
                f"{len(pairs)} distinct sums of numbers with {low} to {high} digits; "
                "ask for fewer or raise `digits`."
            )
        return [
            Problem(f"{a}+{b}", f"What is {a} + {b}?", str(a + b), "arithmetic")
            for a, b in pairs
        ]

    def verify(self, completion: str, problem: Problem) -> Verdict:
        """Compares the integer in the last box with the sum."""
        answer = boxed_answer(completion)
        if answer is None:
            return Verdict.of(Reason.NO_ANSWER)
        digits = "".join(answer.split())
        if not _INTEGER.fullmatch(digits):
            return Verdict.of(Reason.ANSWER_UNPARSED)
        # As text: int() refuses, by design, integers of thousands of digits.
        size = digits.replace(",", "").lstrip("+-").lstrip("0") or "0"
        sign = "-" if digits.startswith("-") and size != "0" else ""
        right = sign + size == problem.answer
        return Verdict.of(Reason.OK if right else Reason.WRONG)

    def _checked_settings(self) -> tuple[str, tuple[int, int], int]:
        split, digits = self.config["split"], tuple(self.config["digits"])
        if split not in _DEFAULT_NUM_PROBLEMS:
            raise ValueError(f"`split` is {split!r}; take 'train' or 'heldout'.")
        if len(digits) != 2 or not 1 <= digits[0] <= digits[1] <= 18:
            raise ValueError(
                f"`digits` is {digits}; give the fewest and the most digits of a "
                "number, between 1 and 18."
            )
        count = self.config["num_problems"]
        count = _DEFAULT_NUM_PROBLEMS[split] if count is None else count
        if count < 1:
            raise ValueError(f"`num_problems` is {count}; it must be at least 1.")
        return split, digits, count

    def _distinct_pairs(
        self, split: str, low: int, high: int
    ) -> Iterator[tuple[int, int]]:
        """Draws pairs of the split until new ones no longer turn up."""
        random = np.random.default_rng(self.config["seed"])
        seen: set[tuple[int, int]] = set()
        fruitless = 0
        while fruitless < _MAX_FRUITLESS_DRAWS:
            a, b = (_number(random, int(random.integers(low, high + 1))) for _ in "ab")
            pair = (min(a, b), max(a, b))
            if pair in seen or _split_of(pair) != split:
                fruitless += 1
                continue
            fruitless = 0
            seen.add(pair)
            yield a, b


def _number(random: Any, num_digits: int) -> int:
    low = 0 if num_digits == 1 else 10 ** (num_digits - 1)
    return int(random.integers(low, 10**num_digits))


def _split_of(pair: tuple[int, int]) -> str:
    heldout = zlib.crc32(f"{pair[0]}+{pair[1]}".encode()) % _HELDOUT_SHARE == 0
    return "heldout" if heldout else "train"
