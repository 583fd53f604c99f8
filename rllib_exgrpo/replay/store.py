"""Completions at rest: token ids and log-probs in long arrays, the rest in columns."""

from array import array
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.records import Completion
from rllib_exgrpo.replay.segment import NEWEST, Logps, Segment, Spill, Tokens
from rllib_exgrpo.replay.table import Table

NONE = -1
"""No row, no version, no file."""

COMPLETION = np.dtype(
    [
        ("id", np.int32),  # rises with the order of arrival, never used twice
        ("prompt", np.int32),  # row in the table of prompts
        ("older", np.int32),  # row of the prompt's next older completion
        ("segment", np.int32),  # where its tokens are:
        ("start", np.int32),
        ("length", np.int32),
        ("crc", np.uint32),  # of the token ids, for finding duplicates
        ("reward", np.float64),
        ("weights_version", np.int32),
        ("truncated", np.bool_),
        ("iteration", np.int32),
        ("times_replayed", np.int32),
        ("entropy", np.float32),  # latest score, in nats a token; NaN = never scored
        ("nll", np.float32),
        ("scored_version", np.int32),  # weights that gave the latest score
        ("saved_in", np.int32),  # number of the file that holds it
        ("changed", np.bool_),  # times_replayed or a score, since it was saved
    ]
)

_DERIVED = {"older", "saved_in", "changed"}
_RECORD_FIELDS = (
    *("segment", "start", "length"),
    *("reward", "weights_version", "truncated", "iteration"),  # as in `Completion`
)
STATE_COLUMNS = [name for name in COMPLETION.names or () if name not in _DERIVED]

SEGMENT_TOKENS = 1 << 18
_MAX_DEAD_SHARE = 1 / 16  # of a segment; it then is half that on average
_COMPACTIONS_PER_CALL = 16  # bounds the pause after many completions died at once


class CompletionStore:
    """Completions in columns, their tokens in segments.

    A full segment of which more than a sixteenth is dead is copied to the end without
    its dead. Only a few are copied in one call, so that no call takes long.

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
        self._sparse: dict[int, None] = {}  # segments to copy, in order
        self._segment_tokens = segment_tokens
        self._spill = spill
        self._head = NONE
        self._next_segment = 0

    def __len__(self) -> int:
        return self.num_completions

    def extend(
        self, rows: list[int], prompt: int, items: Iterable[Completion], number: int
    ) -> int:
        """Stores completions of one prompt, but for those it has already.

        Args:
            rows: the prompt's completions, oldest first; the new ones are appended.
            prompt: the prompt's row.
            items: completions to store, oldest first.
            number: id for the first one.

        Returns:
            The next free id.
        """
        crcs = self.table["crc"][rows].tolist()
        for item in items:
            crc = _crc(item.token_ids)
            if crc in crcs and self._holds(rows, item.token_ids):
                continue
            older = rows[-1] if rows else NONE
            rows.append(self._add(number, prompt, older, crc, item))
            crcs.append(crc)
            number += 1
        return number

    def completions(self, rows: list[int]) -> list[Completion]:
        """Returns stored completions; their arrays are read-only views."""
        records = self.table.rows[rows]
        fields = (records[name].tolist() for name in _RECORD_FIELDS)
        segments, items = self.segments, []
        for number, start, length, *rest in zip(*fields, strict=True):
            segment, part = segments[number], slice(start, start + length)
            pair = segment.token_ids[part], segment.behavior_logp[part]
            items.append(Completion(*pair, *rest))
        return items

    def chain(self, newest: int) -> list[int]:
        """Returns the rows of one prompt's completions, oldest first."""
        older = self.table["older"]
        rows = []
        while newest != NONE:
            rows.append(newest)
            newest = int(older[newest])
        return rows[::-1]

    def relink(self, rows: list[int]) -> None:
        """Makes `rows`, oldest first, the chain of a prompt."""
        self.table["older"][rows] = [NONE, *rows[:-1]]

    def discard(self, rows: list[int]) -> None:
        """Forgets completions; their rows may be used again at once."""
        records = self.table.rows[rows]
        self.table.release(rows)
        self.num_completions -= len(rows)
        self.num_tokens -= int(records["length"].sum())
        for number, length in zip(
            records["segment"].tolist(), records["length"].tolist(), strict=True
        ):
            self.segments[number].dead += length
            self._review(number)
        saved = records[records["saved_in"] != NONE]
        for file, number in saved[["saved_in", "id"]].tolist():
            self.dead_in.setdefault(file, array("i")).append(number)

    def compact(self) -> None:
        """Reclaims the tokens of discarded completions where they are too many."""
        for _ in range(min(len(self._sparse), _COMPACTIONS_PER_CALL)):
            self._move_out(next(iter(self._sparse)))

    def older_than(self, version: int) -> list[int]:
        """Returns the rows sampled by weights before `version`."""
        versions = self.table["weights_version"]
        found: list[int] = []
        for number, segment in self.segments.items():
            if segment.oldest_version < version:
                rows = self.rows_in(number)
                old = versions[rows] < version
                found += rows[old].tolist()
                left = versions[rows[~old]]
                segment.oldest_version = int(left.min(initial=NEWEST))
        return found

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
            (num_prompts,) int32, the row of each prompt's newest completion.
        """
        columns = state["columns"]
        num_rows = len(columns["id"])
        columns = {name: columns[name] for name in STATE_COLUMNS}
        self.table = Table(COMPLETION, columns, num_rows)
        self.table.fill("saved_in", NONE)
        pairs = zip(state["token_ids"], state["behavior_logp"], strict=True)
        for token_ids, behavior_logp in pairs:
            segment = Segment(token_ids, behavior_logp, used=len(token_ids))
            if self._spill is not None:
                segment.spill(self._spill)
            rows = np.flatnonzero(columns["segment"] == self._next_segment)
            self._adopt(segment, rows)
        self.num_completions = num_rows
        self.num_tokens = int(columns["length"].sum(dtype=np.int64))
        return self._link(columns, num_prompts)

    def _adopt(self, segment: Segment, rows: NDArray[np.int64]) -> None:
        """Takes in a full segment and the rows in it."""
        number, self._next_segment = self._next_segment, self._next_segment + 1
        segment.rows = array("i", rows.tolist())
        segment.dead = segment.used - int(self.table["length"][rows].sum())
        versions = self.table["weights_version"][rows]
        segment.oldest_version = int(versions.min(initial=segment.oldest_version))
        self.segments[number] = segment
        self._review(number)

    def _link(
        self, columns: Mapping[str, NDArray], num_prompts: int
    ) -> NDArray[np.int32]:
        """Chains the completions of each prompt by age; see `set_state`."""
        prompts = columns["prompt"]
        order = np.lexsort((columns["id"], prompts)).astype(np.int32)
        follows = np.diff(prompts[order], prepend=NONE) == 0
        self.table["older"][order] = np.where(follows, np.roll(order, 1), NONE)
        newest = np.full(num_prompts, NONE, np.int32)
        newest[prompts[order]] = order
        return newest

    def _add(
        self, number: int, prompt: int, older: int, crc: int, item: Completion
    ) -> int:
        length = len(item.token_ids)
        segment = self._segment_with_room(length)
        start = segment.append(item.token_ids, item.behavior_logp)
        version = item.weights_version
        row = self.table.take(
            (
                *(number, prompt, older, self._head, start, length, crc),
                *(item.reward, version, item.truncated, item.iteration),
                *(0, np.nan, np.nan, NONE, NONE, False),
            )
        )
        segment.rows.append(row)
        if version < segment.oldest_version:
            segment.oldest_version = version
        self.num_completions += 1
        self.num_tokens += length
        return row

    def _holds(self, rows: list[int], token_ids: Tokens) -> bool:
        """Whether one of `rows` has exactly these token ids."""
        return any(
            np.array_equal(item.token_ids, token_ids) for item in self.completions(rows)
        )

    def _segment_with_room(self, length: int) -> Segment:
        if self._head == NONE or self.segments[self._head].room < length:
            self._open_segment(max(length, self._segment_tokens))
        return self.segments[self._head]

    def _open_segment(self, capacity: int) -> None:
        full, self._head = self._head, self._next_segment
        self.segments[self._head] = Segment.empty(capacity)
        self._next_segment += 1
        if full != NONE:
            self._review(full)
        if full in self.segments and self._spill is not None:
            self.segments[full].spill(self._spill)

    def _review(self, number: int) -> None:
        """Drops a full segment if it is dead, marks it if it is sparse."""
        segment = self.segments[number]
        if number == self._head:
            return
        if segment.dead == segment.used:
            self._drop(number)
        elif segment.dead > _MAX_DEAD_SHARE * segment.used:
            self._sparse[number] = None

    def _drop(self, number: int) -> None:
        del self.segments[number]
        self._sparse.pop(number, None)

    def rows_in(self, number: int) -> NDArray[np.int64]:
        """Returns the live rows of a segment in the order of their tokens."""
        rows = np.array(self.segments[number].rows, dtype=np.int64)
        table = self.table
        rows = rows[(table["id"][rows] >= 0) & (table["segment"][rows] == number)]
        starts = table["start"][rows]
        order = np.argsort(starts)
        # A row that was used twice in the segment is listed twice.
        return rows[order[np.diff(starts[order], prepend=-1) > 0]]

    def gather(self, number: int, rows: NDArray[np.int64]) -> tuple[Tokens, Logps]:
        """Returns the tokens of some rows of one segment, one row after the other.

        Args:
            number: of the segment.
            rows: rows in it, in the order of their tokens.
        """
        token_ids, behavior_logp = self.segments[number].written()
        starts = self.table["start"][rows]
        ends = starts + self.table["length"][rows]
        # Neighbours are copied in one go: few are missing from a segment.
        first = np.append(True, starts[1:] != ends[:-1])
        last = np.append(first[1:], True)
        runs = list(map(slice, starts[first].tolist(), ends[last].tolist()))
        if len(runs) == 1:
            return token_ids[runs[0]], behavior_logp[runs[0]]
        return (
            np.concatenate([token_ids[run] for run in runs]),
            np.concatenate([behavior_logp[run] for run in runs]),
        )

    def _move_out(self, number: int) -> None:
        """Copies what is alive in a segment to the head and drops the segment."""
        rows = self.rows_in(number)
        token_ids, behavior_logp = self.gather(number, rows)
        ends = np.cumsum(self.table["length"][rows])
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
        head, table = self.segments[self._head], self.table
        lengths = table["length"][rows]
        table["segment"][rows] = self._head
        table["start"][rows] = start + np.cumsum(lengths) - lengths
        head.rows.extend(rows.tolist())
        versions = table["weights_version"][rows]
        head.oldest_version = min(head.oldest_version, int(versions.min()))


def _crc(token_ids: Tokens) -> int:
    return crc32(np.ascontiguousarray(token_ids, dtype=np.int32).data)
