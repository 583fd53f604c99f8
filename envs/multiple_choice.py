"""Multiple-choice questions in the forms of ARC, GPQA and MMLU-Pro."""

import random
import re
import string
from typing import Any, ClassVar

from .answers import boxed_answer
from .base import Problem
from .latex import normalise
from .parts import words
from .tables import TableEnv
from .verdict import Reason, Verdict

_CHOSEN = re.compile(r"(?:(?:option|choice|answer) )?([a-z])(?: .*)?", re.DOTALL)


class MultipleChoiceEnv(TableEnv):
    r"""Shows a question with lettered choices; the letter goes into `\boxed{...}`.

    Rewards: 1 if the last box holds the right letter (`B`, `(B)`, `\text{B}`,
    `B. Paris`) or the right choice's own text, else 0.

    Settings:
        choices_column: a list of texts, or ARC's struct of `text` and `label` lists.
        answer_column: a letter, ARC's label, the choice's index from 0, or its text.
        shuffle_seed: shuffles each question's choices, the same way in every run; None
            keeps the order of the file.
        instruction: what follows the choices.
    """

    settings: ClassVar = {
        "prompt_column": "question",
        "choices_column": "choices",
        "shuffle_seed": None,
        "instruction": "\nPut the letter of the right choice in \\boxed{}.",
    }
    column_settings: ClassVar = {
        **TableEnv.column_settings,
        "choices_column": (r"(large_)?list<|struct<", "lists of texts"),
    }

    def to_problem(self, values: dict[str, Any]) -> Problem:
        """Letters the choices and finds the right one."""
        choices, right = _choices_and_index(
            values["choices_column"], values["answer_column"]
        )
        question = values["prompt_column"] or ""
        if self.config["shuffle_seed"] is not None:
            order = list(range(len(choices)))
            random.Random(f"{self.config['shuffle_seed']} {question}").shuffle(order)
            right = None if right is None else order.index(right)
            choices = [choices[i] for i in order]
        lettered = [
            f"({letter}) {choice}"
            for letter, choice in zip(string.ascii_uppercase, choices, strict=False)
        ]
        text = "\n".join([question, *lettered]) + self.config["instruction"]
        problem = super().to_problem({**values, "prompt_column": question and text})
        letter = None if right is None else string.ascii_uppercase[right]
        answer = {"letter": letter, "choices": choices}
        return Problem(problem.prompt_id, problem.prompt, answer, problem.source)

    def fault(self, problem: Problem) -> str:
        """Finds questions without choices or without a right one too."""
        if not 2 <= len(problem.answer["choices"]) <= len(string.ascii_uppercase):
            return "not 2 to 26 choices"
        unusable = problem.answer["letter"] is None
        return super().fault(problem) or unusable * "the answer is none of the choices"

    def verify(self, completion: str, problem: Problem) -> Verdict:
        """Compares the boxed letter, or the boxed text, with the right choice."""
        given = self.answer_key(completion)
        if given is None:
            return Verdict.of(Reason.NO_ANSWER)
        texts = [words(normalise(choice)) for choice in problem.answer["choices"]]
        if texts.count(given) == 1:
            index = texts.index(given)
        else:
            chosen = _CHOSEN.fullmatch(given)
            if not chosen:
                return Verdict.of(Reason.ANSWER_UNPARSED)
            index = string.ascii_lowercase.index(chosen[1])
        right = string.ascii_uppercase[index] == problem.answer["letter"]
        return Verdict.of(Reason.OK if right else Reason.WRONG)

    def answer_key(self, completion: str) -> str | None:
        """Returns the words in the last box, None if there are none."""
        answer = boxed_answer(completion)
        return (words(normalise(answer)) or None) if answer else None

    def gold_completion(self, problem: Problem) -> str:
        """Boxes the right letter."""
        return rf"\boxed{{{problem.answer['letter']}}}"


def _choices_and_index(choices: Any, answer: Any) -> tuple[list[str], int | None]:
    """Returns the choices' texts and where the right one stands."""
    if isinstance(choices, dict):
        labels, choices = choices["label"] or [], choices["text"] or []
    else:
        choices = choices or []
        labels = list(string.ascii_uppercase[: len(choices)])
    for known in (labels, choices, range(len(choices))):
        if answer in known:
            return list(choices), list(known).index(answer)
    return list(choices), None
