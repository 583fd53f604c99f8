"""MyEnv asks how often a letter occurs in a word."""

import re
from collections.abc import Iterator
from typing import ClassVar

from rllib_exgrpo.envs import Problem, Reason, Verdict, VerifiableTextEnv

_ANSWER = re.compile(r"answer: *(\d{1,9})\s*$", re.IGNORECASE)


class MyEnv(VerifiableTextEnv):
    """Asks how often a letter occurs in a word.

    Rewards: 1 if the completion ends in "Answer: NUMBER" with the right number, else 0.

    Settings:
        split: "train" or "heldout".
        words: of each split.
    """

    settings: ClassVar = {
        "split": "train",
        "words": {
            "train": ("banana", "letter", "mississippi", "level"),
            "heldout": ("pepper", "committee"),
        },
    }

    def load(self) -> Iterator[Problem]:
        """Makes a problem of each letter of each word."""
        for word in self.config["words"][self.config["split"]]:
            for letter in sorted(set(word)):
                yield Problem(
                    prompt_id=f"{word}/{letter}",  # the same in every run
                    prompt=f"How often does {letter!r} occur in {word!r}? End with "
                    "'Answer: ' and the number.",
                    answer=word.count(letter),
                    source="letters",  # a name for metrics
                )

    def verify(self, completion: str, problem: Problem) -> Verdict:
        """Compares the number at the end; a completion without one is no error."""
        found = _ANSWER.search(completion[-100:])  # bounded, however long it is
        if found is None:
            return Verdict.of(Reason.NO_ANSWER)
        right = int(found[1]) == problem.answer
        return Verdict.of(Reason.OK if right else Reason.WRONG)

    def gold_completion(self, problem: Problem) -> str:
        """Writes the right answer as a model should, to check `verify` with."""
        return f"Answer: {problem.answer}"
