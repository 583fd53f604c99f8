"""Word problems in the form of GSM8K: worked answers that end in `#### number`."""

from typing import Any, ClassVar

from .base import Problem
from .math import MathEnv


class GSM8KEnv(MathEnv):
    r"""Asks word problems whose answer is a number, to be given in `\boxed{...}`.

    Settings:
        instruction: what follows each question.
    """

    settings: ClassVar = {
        "prompt_column": "question",
        "answer_column": "answer",
        "source_column": None,
        "split_column": "split",
        "instruction": "\nReason step by step, and put the number in \\boxed{}.",
    }

    def to_problem(self, values: dict[str, Any]) -> Problem:
        """Adds the instruction to the question."""
        question = values["prompt_column"]
        prompt = question + self.config["instruction"] if question else ""
        return super().to_problem({**values, "prompt_column": prompt})
