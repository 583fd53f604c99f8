"""A long run of tokens with their log-probs."""

from array import array
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.int32]
Logps: TypeAlias = NDArray[np.float32]
Spill: TypeAlias = Callable[[Tokens, Logps], tuple[Tokens, Logps]]
"""Moves a full segment elsewhere and returns arrays that read from there."""

NEWEST = int(np.iinfo(np.int32).max)
"""A version that no weights have."""


class Segment:
    """A long run of tokens that is only ever appended to.

    What has been written never moves or changes, so views of it stay valid for as
    long as they are held.

    Args:
        token_ids: (capacity,) int32.
        behavior_logp: (capacity,) float32.
        used: tokens written so far.

    Attributes:
        token_ids: (capacity,) int32, read-only.
        behavior_logp: (capacity,) float32, read-only.
        used: tokens written.
        dead: tokens written that belong to no completion any more.
        rows: completions written here; rows that moved on are still listed.
        oldest_version: no completion in here is of older weights.
    """

    def __init__(self, token_ids: Tokens, behavior_logp: Logps, used: int = 0) -> None:
        self._writable = token_ids, behavior_logp
        self.token_ids, self.behavior_logp = token_ids.view(), behavior_logp.view()
        self.token_ids.flags.writeable = self.behavior_logp.flags.writeable = False
        self.used = used
        self.dead = 0
        self.rows = array("i")
        self.oldest_version = NEWEST

    @classmethod
    def empty(cls, capacity: int) -> "Segment":
        """Returns a segment with room for `capacity` tokens."""
        return cls(np.empty(capacity, np.int32), np.empty(capacity, np.float32))

    @property
    def room(self) -> int:
        """Tokens that can still be appended."""
        return len(self.token_ids) - self.used

    def append(self, token_ids: Tokens, behavior_logp: Logps) -> int:
        """Writes one run of tokens and returns where it starts."""
        start, self.used = self.used, self.used + len(token_ids)
        self._writable[0][start : self.used] = token_ids
        self._writable[1][start : self.used] = behavior_logp
        return start

    def written(self) -> tuple[Tokens, Logps]:
        """Returns read-only views of what has been written."""
        return self.token_ids[: self.used], self.behavior_logp[: self.used]

    def spill(self, spill: Spill) -> None:
        """Moves what has been written elsewhere; nothing can be appended then."""
        self.token_ids, self.behavior_logp = self._writable = spill(*self.written())
