"""Prompts by id: which bucket each is in, and which are in each bucket."""

from array import array
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.records import PromptId
from rllib_exgrpo.replay.table import Table

PROMPT = np.dtype(
    [
        ("bucket", np.int16),  # k of the latest group; G = retired
        ("position", np.int32),  # in its bucket's list of members
        ("newest", np.int32),  # row of its newest completion
        ("iteration", np.int32),  # of the latest group
        ("source", np.int32),  # number of its data set's name
        ("times_replayed", np.int32),
        ("saved", np.bool_),  # whether a saved file knows it
        ("changed", np.bool_),  # since it was saved
    ]
)

_STATE_COLUMNS = ["bucket", "position", "iteration", "source", "times_replayed"]


class PromptTable:
    """Prompts and the buckets that hold them.

    A bucket is a list of rows in no meaningful order, so that taking a prompt out and
    drawing one at random both take constant time.

    Args:
        num_buckets: buckets are numbered from 0.

    Attributes:
        table: the columns of `PROMPT`.
        members: the rows in each bucket.
        removed: ids that a saved file knows and that have been removed since.
    """

    def __init__(self, num_buckets: int) -> None:
        self.table = Table(PROMPT)
        self.members = [array("i") for _ in range(num_buckets)]
        self.removed: list[PromptId] = []
        self._row: dict[PromptId, int] = {}
        # Row -> id. Unlike a list, an object array costs the garbage collector nothing.
        self._ids = np.empty(0, object)

    def row(self, prompt_id: PromptId) -> int | None:
        """Returns the row of a prompt, or None where it is not known."""
        return self._row.get(prompt_id)

    def id(self, row: int) -> PromptId:
        """Returns the id of the prompt in `row`."""
        return self._ids[row]

    def ids(self, rows: NDArray[np.integer]) -> list[PromptId]:
        """Returns the ids of the prompts in some rows."""
        return self._ids[rows].tolist()

    def add(self, prompt_id: PromptId, bucket: int, values: tuple) -> int:
        """Enters a new prompt.

        Args:
            prompt_id: its id.
            bucket: the bucket that it goes into.
            values: the fields of `PROMPT` after `bucket` and `position`.

        Returns:
            Its row, valid until it is removed.
        """
        members = self.members[bucket]
        row = self.table.take((bucket, len(members), *values))
        members.append(row)
        if row == len(self._ids):
            grown = np.empty(max(64, 2 * row), object)
            grown[:row] = self._ids
            self._ids = grown
        self._ids[row] = prompt_id
        self._row[prompt_id] = row
        return row

    def move(self, row: int, bucket: int) -> None:
        """Puts a prompt in another bucket."""
        if self.table["bucket"][row] == bucket:
            return
        self._leave_bucket(row)
        members = self.members[bucket]
        self.table["bucket"][row] = bucket
        self.table["position"][row] = len(members)
        self.table["changed"][row] = True
        members.append(row)

    def count_replay(self, row: int) -> int:
        """Counts a replay of a prompt and returns how often it has been replayed."""
        self.table["times_replayed"][row] += 1
        self.table["changed"][row] = True
        return int(self.table["times_replayed"][row])

    def remove(self, row: int) -> None:
        """Forgets a prompt."""
        self._leave_bucket(row)
        if self.table["saved"][row]:
            self.removed.append(self._ids[row])
        self.table.release([row])
        del self._row[self._ids[row]]
        self._ids[row] = None

    def get_state(self) -> dict[str, Any]:
        """Returns the ids, and the columns in the same order."""
        rows = self.table.live_rows()
        columns = {name: self.table[name][rows] for name in _STATE_COLUMNS}
        return {"ids": [self._ids[row] for row in rows], "columns": columns}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Fills an empty table: rows follow the order of the state."""
        ids = state["ids"]
        self._row = {prompt_id: row for row, prompt_id in enumerate(ids)}
        self._ids = np.empty(len(ids), object)
        for row, prompt_id in enumerate(ids):  # a slice would unpack tuples
            self._ids[row] = prompt_id
        columns = {name: state["columns"][name] for name in _STATE_COLUMNS}
        self.table = Table(PROMPT, columns, len(ids))
        self.table.fill("changed", True)
        bucket, position = columns["bucket"], columns["position"]
        order = np.lexsort((position, bucket))
        ends = np.cumsum(np.bincount(bucket, minlength=len(self.members)))
        parts = np.split(order, ends[:-1])
        self.members = [array("i", part.tolist()) for part in parts]

    def _leave_bucket(self, row: int) -> None:
        """Fills the place of a prompt with the last member of its bucket."""
        members = self.members[self.table["bucket"][row]]
        place = int(self.table["position"][row])
        last = members.pop()
        if last != row:
            members[place] = last
            self.table["position"][last] = place
            self.table["changed"][last] = True


class Members(Set[PromptId]):
    """A read-only view of the ids in one bucket."""

    def __init__(self, prompts: PromptTable, bucket: int) -> None:
        self._prompts = prompts
        self._bucket = bucket

    def __contains__(self, prompt_id: object) -> bool:
        row = self._prompts.row(prompt_id)
        return row is not None and self._prompts.table["bucket"][row] == self._bucket

    def __iter__(self) -> Iterator[PromptId]:
        return map(self._prompts.id, self._prompts.members[self._bucket])

    def __len__(self) -> int:
        return len(self._prompts.members[self._bucket])

    @classmethod
    def _from_iterable(cls, it: Iterator[PromptId]) -> frozenset:  # type: ignore[override]
        return frozenset(it)
