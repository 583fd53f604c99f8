"""What the generated environments share: problems drawn by a seed, in two splits."""

import zlib
from abc import abstractmethod
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from .base import Problem, VerifiableTextEnv

_DEFAULT_NUM_PROBLEMS = {"train": 2048, "heldout": 256}
_HELDOUT_SHARE = 8  # one in eight problems is held out
_MAX_FRUITLESS_DRAWS = 20_000


class GeneratedEnv(VerifiableTextEnv):
    """Draws its problems with a seeded generator; a subclass writes `draw`.

    A problem belongs to the train or the held-out split by a hash of its key, whatever
    the other settings: environments with different splits never share a problem.

    Settings:
        split: "train" or "heldout".
        num_problems: how many; None means 2048 for train and 256 for heldout.
        seed: of the generator.
    """

    settings: ClassVar = {"split": "train", "num_problems": None, "seed": 0}

    @abstractmethod
    def draw(self, random: np.random.Generator) -> tuple[Hashable, Problem]:
        """Draws a problem and its key: equal keys mean the same problem."""

    def load(self) -> list[Problem]:
        """Draws the problems of the split.

        Raises:
            ValueError: for settings out of range, or too few distinct problems.
        """
        split, count = self.config["split"], self.config["num_problems"]
        if split not in _DEFAULT_NUM_PROBLEMS:
            raise ValueError(f"`split` is {split!r}; take 'train' or 'heldout'.")
        count = _DEFAULT_NUM_PROBLEMS[split] if count is None else count
        if count < 1:
            raise ValueError(f"`num_problems` is {count}; it must be at least 1.")
        problems = list(islice(self._distinct_problems(split), count))
        if len(problems) < count:
            raise ValueError(
                f"`num_problems` = {count}, but the split {split!r} has only about "
                f"{len(problems)} distinct problems with these settings; ask for fewer "
                "or widen the settings that the numbers are drawn by."
            )
        return problems

    def _distinct_problems(self, split: str) -> Iterator[Problem]:
        """Draws problems of the split until new ones no longer turn up."""
        random = np.random.default_rng(self.config["seed"])
        seen: set[Any] = set()
        fruitless = 0
        while fruitless < _MAX_FRUITLESS_DRAWS:
            key, problem = self.draw(random)
            if key in seen or split_of(key) != split:
                fruitless += 1
                continue
            fruitless = 0
            seen.add(key)
            yield problem


def split_of(key: Hashable) -> str:
    """Returns the split that a problem belongs to, for ever."""
    heldout = zlib.crc32(str(key).encode()) % _HELDOUT_SHARE == 0
    return "heldout" if heldout else "train"
