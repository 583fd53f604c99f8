"""Completions at rest: token ids and log-probs in long arrays, the rest in columns."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.records import Completion
from rllib_exgrpo.replay.table import Table

Tokens: TypeAlias = NDArray[np.int32]
Logps: TypeAlias = NDArray[np.float32]
Spill: TypeAlias = Callable[[Tokens, Logps], tuple[Tokens, Logps]]
"""Moves a full segment elsewhere and returns arrays that read from there."""

NONE = -1
"""No row, no version, no file."""

COMPLETION = np.dtype(
    [
        ("id", np.int64),  # rises with the order of arrival, never used twice
        ("prompt", np.int32),  # row in the table of prompts
        ("older", np.int32),  # row of the prompt's next older completion
        ("segment", np.int32),  # where its tokens are:
        ("start", np.int32),
        ("length", np.int32),
        ("crc", np.uint32),  # of the token ids, for finding duplicates
        ("reward", np.float64),
        ("weights_version", np.int32),
        ("iteration", np.int32),
        ("truncated", np.bool_),
        ("times_replayed", np.int32),
        ("entropy", np.float32),  # latest score, in nats a token; NaN = never scored
        ("nll", np.float32),
        ("scored_version", np.int32),  # weights that gave the latest score
        ("saved_in", np.int32),  # number of the file that holds it
        ("changed", np.bool_),  # times_replayed or a score, since it was saved
    ]
)

_DERIVED = {"older", "saved_in", "changed"}
STATE_COLUMNS = [name for name in COMPLETION.names or () if name not in _DERIVED]

SEGMENT_TOKENS = 1 << 20
_MAX_DEAD_SHARE = 0.1
_COMPACTIONS_PER_CALL = 4  # bounds the pause after many completions died at once


class Segment:
    """A long run of tokens that is only ever appended to.

    What has been written never moves or changes, so views of it stay valid for as
    long as they are held.

    Attributes:
        token_ids: (capacity,) int32.
        behavior_logp: (capacity,) float32.
        used: tokens written.
        dead: tokens written that belong to no completion any more.
        rows: completions written here; rows that moved on are still listed.
        oldest_version: no completion in here is of older weights.
    """

    def __init__(self, token_ids: Tokens, behavior_logp: Logps, used: int = 0) -> None:
        self.token_ids = token_ids
        self.behavior_logp = behavior_logp
        self.used = used
        self.dead = 0
        self.rows = array("i")
        self.oldest_version = np.iinfo(np.int32).max

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
        self.token_ids[start : self.used] = token_ids
        self.behavior_logp[start : self.used] = behavior_logp
        return start

    def written(self) -> tuple[Tokens, Logps]:
        """Returns read-only views of what has been written."""
        views = self.token_ids[: self.used], self.behavior_logp[: self.used]
        for view in views:
            view.flags.writeable = False
        return views


class CompletionStore:
    """Completions in columns, their tokens in segments.

    Tokens of discarded completions are reclaimed a few segments at a time, so that
    they stay near a tenth of the tokens stored and no call takes long.

    Args:
        segment_tokens: capacity of a segment; a longer completion gets its own.
        spill: called with each full segment, to keep it on disk instead.

    Attributes:
        table: the columns of `COMPLETION`.
        segments: number -> segment.
        num_completions: completions stored.
        num_tokens: their tokens.
        dead_in: number of a saved file -> ids in it that have been discarded.
    """

    def __init__(
        self, segment_tokens: int = SEGMENT_TOKENS, spill: Spill | None = None
    ) -> None:
        self.table = Table(COMPLETION)
        self.segments: dict[int, Segment] = {}
        self.num_completions = 0
        self.num_tokens = 0
        self.dead_in: dict[int, array[int]] = {}
        self._num_dead = 0
        self._segment_tokens = segment_tokens
        self._spill = spill
        self._head = NONE
        self._next_segment = 0

    def __len__(self) -> int:
        return self.num_completions

    def add(self, number: int, prompt: int, older: int, item: Completion) -> int:
        """Stores one completion.

        Args:
            number: its id.
            prompt: row of its prompt.
            older: row of the prompt's newest completion so far, or NONE.
            item: the completion.

        Returns:
            Its row, valid until it is discarded.
        """
        length = len(item)
        segment = self._segment_with_room(length)
        start = segment.append(item.token_ids, item.behavior_logp)
        row = self.table.take(
            (
                *(number, prompt, older, self._head, start, length),
                *(_crc(item.token_ids), item.reward, item.weights_version),
                *(item.iteration, item.truncated),
                *(0, np.nan, np.nan, NONE, NONE, False),
            )
        )
        segment.rows.append(row)
        segment.oldest_version = min(segment.oldest_version, item.weights_version)
        self.num_completions += 1
        self.num_tokens += length
        return row

    def completion(self, row: int) -> Completion:
        """Returns a stored completion as a record with arrays of its own."""
        columns = self.table.columns
        token_ids, behavior_logp = self._tokens(row)
        return Completion(
            token_ids=token_ids.copy(),
            behavior_logp=behavior_logp.copy(),
            reward=float(columns["reward"][row]),
            weights_version=int(columns["weights_version"][row]),
            truncated=bool(columns["truncated"][row]),
            iteration=int(columns["iteration"][row]),
        )

    def chain(self, newest: int) -> list[int]:
        """Returns the rows of one prompt's completions, oldest first."""
        older = self.table["older"]
        rows = []
        while newest != NONE:
            rows.append(newest)
            newest = int(older[newest])
        return rows[::-1]

    def holds(self, rows: list[int], token_ids: Tokens) -> bool:
        """Whether one of `rows` has exactly these token ids."""
        crc, columns = _crc(token_ids), self.table["crc"]
        return any(
            columns[row] == crc and np.array_equal(self._tokens(row)[0], token_ids)
            for row in rows
        )

    def discard(self, row: int) -> None:
        """Forgets a completion; its row may be used again at once."""
        columns = self.table.columns
        number, length = int(columns["segment"][row]), int(columns["length"][row])
        segment = self.segments[number]
        segment.dead += length
        self._num_dead += length
        self.num_completions -= 1
        self.num_tokens -= length
        saved_in = int(columns["saved_in"][row])
        if saved_in != NONE:
            self.dead_in.setdefault(saved_in, array("q")).append(columns["id"][row])
        self.table.release(row)
        if segment.dead == segment.used and number != self._head:
            self._drop(number)

    def compact(self) -> None:
        """Reclaims the tokens of discarded completions where they are too many."""
        for _ in range(_COMPACTIONS_PER_CALL):
            limit = max(_MAX_DEAD_SHARE * self.num_tokens, self._segment_tokens)
            if self._num_dead <= limit:
                return
            worst = max(self.segments, key=lambda n: self.segments[n].dead)
            self._move_out(worst)

    def older_than(self, version: int) -> Iterator[int]:
        """Yields the rows sampled by weights before `version`; may be discarded."""
        versions = self.table["weights_version"]
        for number, segment in list(self.segments.items()):
            if segment.oldest_version < version:
                rows = self.rows_in(number)
                old = versions[rows] < version
                kept = versions[rows[~old]]
                segment.oldest_version = int(kept.min(initial=np.iinfo(np.int32).max))
                yield from rows[old].tolist()

    def get_state(self) -> dict[str, Any]:
        """Returns the live rows, with the segments' tokens as read-only views."""
        numbers = list(self.segments)
        rows = self.table.live_rows()
        columns = {name: self.table[name][rows] for name in STATE_COLUMNS}
        place = np.zeros(self._next_segment, np.int32)
        place[numbers] = np.arange(len(numbers))
        columns["segment"] = place[columns["segment"]]
        written = [self.segments[number].written() for number in numbers]
        return {
            "columns": columns,
            "token_ids": [token_ids for token_ids, _ in written],
            "behavior_logp": [behavior_logp for _, behavior_logp in written],
        }

    def set_state(self, state: Mapping[str, Any], num_prompts: int) -> NDArray:
        """Fills an empty store.

        Args:
            state: from `get_state`, with prompts numbered from 0.
            num_prompts: how many prompts there are.

        Returns:
            (num_prompts, 2) int32, the row of each prompt's newest completion and how
            many it has.
        """
        columns = state["columns"]
        num_rows = len(columns["id"])
        self.table = Table(COMPLETION, num_rows)
        for name in STATE_COLUMNS:
            self.table[name][:] = columns[name]
        self.table["saved_in"][:] = NONE
        pairs = zip(state["token_ids"], state["behavior_logp"], strict=True)
        for token_ids, behavior_logp in pairs:
            if self._spill is not None:
                token_ids, behavior_logp = self._spill(token_ids, behavior_logp)
            self._adopt(Segment(token_ids, behavior_logp, used=len(token_ids)))
        self.num_completions = num_rows
        self.num_tokens = int(columns["length"].sum(dtype=np.int64))
        return self._link(num_prompts)

    def _adopt(self, segment: Segment) -> None:
        """Takes in a full segment, with the rows that point at it."""
        number, self._next_segment = self._next_segment, self._next_segment + 1
        rows = np.flatnonzero(self.table["segment"] == number)
        segment.rows = array("i", rows.tolist())
        segment.dead = segment.used - int(self.table["length"][rows].sum())
        versions = self.table["weights_version"][rows]
        segment.oldest_version = int(versions.min(initial=segment.oldest_version))
        self.segments[number] = segment
        self._num_dead += segment.dead

    def _link(self, num_prompts: int) -> NDArray[np.int32]:
        """Chains the completions of each prompt by age; see `set_state`."""
        prompts = self.table["prompt"]
        order = np.lexsort((self.table["id"], prompts)).astype(np.int32)
        follows = np.diff(prompts[order], prepend=NONE) == 0
        self.table["older"][order] = np.where(follows, np.roll(order, 1), NONE)
        links = np.full((num_prompts, 2), (NONE, 0), np.int32)
        links[prompts[order], 0] = order
        links[:, 1] = np.bincount(prompts, minlength=num_prompts)
        return links

    def _tokens(self, row: int) -> tuple[Tokens, Logps]:
        columns = self.table.columns
        segment = self.segments[int(columns["segment"][row])]
        start = int(columns["start"][row])
        part = slice(start, start + int(columns["length"][row]))
        return segment.token_ids[part], segment.behavior_logp[part]

    def _segment_with_room(self, length: int) -> Segment:
        if self._head == NONE or self.segments[self._head].room < length:
            self._open_segment(max(length, self._segment_tokens))
        return self.segments[self._head]

    def _open_segment(self, capacity: int) -> None:
        full, self._head = self._head, self._next_segment
        self.segments[self._head] = Segment.empty(capacity)
        self._next_segment += 1
        if full != NONE:
            self._seal(full)

    def _seal(self, number: int) -> None:
        """Drops a full segment if nothing in it is alive, or spills it."""
        segment = self.segments[number]
        if segment.dead == segment.used:
            self._drop(number)
        elif self._spill is not None:
            segment.token_ids, segment.behavior_logp = self._spill(*segment.written())

    def _drop(self, number: int) -> None:
        self._num_dead -= self.segments.pop(number).dead

    def rows_in(self, number: int) -> NDArray[np.int64]:
        """Returns the live rows of a segment in the order of their tokens."""
        rows = np.unique(np.array(self.segments[number].rows, dtype=np.int64))
        columns = self.table.columns
        rows = rows[(columns["id"][rows] >= 0) & (columns["segment"][rows] == number)]
        return rows[np.argsort(columns["start"][rows])]

    def gather(self, number: int, rows: NDArray[np.int64]) -> tuple[Tokens, Logps]:
        """Returns the tokens of some rows of one segment, one row after the other.

        Args:
            number: of the segment.
            rows: rows in it, in the order of their tokens.
        """
        token_ids, behavior_logp = self.segments[number].written()
        starts, lengths = self.table["start"][rows], self.table["length"][rows]
        if int(lengths.sum()) == len(token_ids):
            return token_ids, behavior_logp
        edges = np.zeros(len(token_ids) + 1, np.int8)
        edges[starts] += 1
        edges[starts + lengths] -= 1
        wanted = np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)
        return token_ids[wanted], behavior_logp[wanted]

    def _move_out(self, number: int) -> None:
        """Copies what is alive in a segment to the head and drops the segment."""
        if number == self._head:
            self._open_segment(self._segment_tokens)
            if number not in self.segments:
                return
        rows = self.rows_in(number)
        token_ids, behavior_logp = self.gather(number, rows)
        ends = np.cumsum(self.table["length"][rows], dtype=np.int64)
        done, offset = 0, 0
        while done < len(rows):
            head = self._segment_with_room(int(ends[done]) - offset)
            upto = int(np.searchsorted(ends, offset + head.room, side="right"))
            part = slice(offset, int(ends[upto - 1]))
            start = head.append(token_ids[part], behavior_logp[part])
            self._relocate(rows[done:upto], start)
            done, offset = upto, part.stop
        self._drop(number)

    def _relocate(self, rows: NDArray[np.int64], start: int) -> None:
        """Points rows at the head, where their tokens lie in order from `start`."""
        head, columns = self.segments[self._head], self.table.columns
        lengths = columns["length"][rows]
        columns["segment"][rows] = self._head
        columns["start"][rows] = start + np.cumsum(lengths) - lengths
        head.rows.extend(rows.tolist())
        versions = columns["weights_version"][rows]
        head.oldest_version = min(head.oldest_version, int(versions.min()))


def _crc(token_ids: Tokens) -> int:
    return crc32(np.ascontiguousarray(token_ids, dtype=np.int32).data)
