"""Countdown: reach a target number with given numbers and the four operations."""

import re
from collections import Counter
from collections.abc import Hashable
from fractions import Fraction
from typing import ClassVar

import numpy as np

from .answers import boxed_answer
from .base import Problem
from .exact import TooLargeError, evaluate
from .generated import GeneratedEnv
from .latex import normalise
from .verdict import Reason, Verdict

_ALLOWED = re.compile(r"(?:\d+|[-+/(){}\s]|\\cdot|\\times|\\frac)+")


class CountdownEnv(GeneratedEnv):
    r"""Asks for an expression of given numbers that equals a target, in `\boxed{...}`.

    Rewards: 1 if the boxed expression uses each given number exactly once, with
    `+ - * /` and brackets (or `\times`, `\frac`), and equals the target in exact
    arithmetic; else 0. A trailing `= target` is allowed.

    Settings:
        num_numbers: fewest and most numbers given.
        max_number: largest of them.
        max_target: largest target.
    """

    settings: ClassVar = {"num_numbers": (3, 4), "max_number": 50, "max_target": 100}

    def load(self) -> list[Problem]:
        """Draws the problems of the split.

        Raises:
            ValueError: for settings out of range, or too few distinct problems.
        """
        low, high = self.config["num_numbers"]
        if not 2 <= low <= high <= 8:
            raise ValueError(
                f"`num_numbers` is {(low, high)}; give the fewest and the most "
                "numbers, between 2 and 8."
            )
        for name in ("max_number", "max_target"):
            if self.config[name] < 1:
                raise ValueError(f"`{name}` is {self.config[name]}; it must be >= 1.")
        return super().load()

    def draw(self, random: np.random.Generator) -> tuple[Hashable, Problem]:
        """Draws numbers and a solution until its value is a fair target."""
        low, high = self.config["num_numbers"]
        target: Fraction | None = None
        while target not in range(1, self.config["max_target"] + 1):
            count = int(random.integers(low, high + 1))
            numbers = random.integers(1, self.config["max_number"] + 1, size=count)
            solution = _random_expression(random, [str(n) for n in numbers])
            try:
                target = evaluate(normalise(solution))
            except ZeroDivisionError:
                target = None
        given = [int(n) for n in numbers]
        question = (
            f"Using the numbers {given}, each exactly once, and the operations "
            rf"+ - * /, write an expression that equals {target}. Put it in \boxed{{}}."
        )
        key = f"{sorted(given)} -> {target}"
        prompt_id = f"{' '.join(map(str, given))} -> {target}"
        answer = {"numbers": given, "target": target, "solution": solution}
        return key, Problem(prompt_id, question, answer, "countdown")

    def verify(self, completion: str, problem: Problem) -> Verdict:
        """Evaluates the boxed expression exactly."""
        answer = boxed_answer(completion)
        if answer is None:
            return Verdict.of(Reason.NO_ANSWER)
        expression, *results = normalise(answer).split("=")
        if not _ALLOWED.fullmatch(expression) or len(results) > 1:
            return Verdict.of(Reason.ANSWER_UNPARSED)
        try:
            values = [evaluate(text) for text in (expression, *results)]
        except (TooLargeError, ZeroDivisionError) as error:
            return Verdict.of(Reason.ANSWER_UNPARSED, str(error))
        if None in values:
            return Verdict.of(Reason.ANSWER_UNPARSED)
        used = Counter(map(int, re.findall(r"\d+", expression)))
        uses_all = used == Counter(problem.answer["numbers"])
        right = uses_all and set(values) == {problem.answer["target"]}
        return Verdict.of(Reason.OK if right else Reason.WRONG)

    def gold_completion(self, problem: Problem) -> str:
        """Boxes the expression that the target was made from."""
        return rf"\boxed{{{problem.answer['solution']}}}"


def _random_expression(random: np.random.Generator, parts: list[str]) -> str:
    """Joins the parts by random operations, two at a time."""
    while len(parts) > 1:
        i, j = random.choice(len(parts), size=2, replace=False)
        joined = f"({parts[i]} {random.choice(list('+-*/'))} {parts[j]})"
        parts = [p for k, p in enumerate(parts) if k not in (i, j)] + [joined]
    return parts[0]
