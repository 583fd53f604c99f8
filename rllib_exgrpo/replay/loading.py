"""Reading a saved buffer back."""

from array import array
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rllib_exgrpo.replay.folder import (
    MANIFEST,
    SCHEMAS,
    Folder,
    Manifest,
    ReplayFileError,
)
from rllib_exgrpo.replay.ids import decode_id
from rllib_exgrpo.replay.segment import Logps, Tokens
from rllib_exgrpo.replay.store import COMPLETION, NONE, SEGMENT_TOKENS, STATE_COLUMNS

_UNUSED = {"times_replayed": 0, "entropy": np.nan, "nll": np.nan, "scored_version": -1}


class Load:
    """The contents of a folder.

    Args:
        folder: where it lies.
        manifest: what it says of itself.

    Attributes:
        state: for `ReplayBuffer.set_state`.
        saved_in: number of the file that holds each completion of the state.
        dead_in: number of a file -> ids in it that are in the buffer no more.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self.saved_in: NDArray[np.int32] = np.empty(0, np.int32)
        self.dead_in: dict[int, Any] = {}
        sources = manifest["counters"]["sources"]
        self._sources = {name: number for number, name in enumerate(sources)}
        prompts, self._prompt_number = self._read_prompts()
        self._usage = self._read_usage()
        completions = self._read_completions()
        self._check_count("completions", len(completions["columns"]["id"]))
        self.state = {
            "group_size": manifest["group_size"],
            "counters": manifest["counters"],
            "prompts": prompts,
            "completions": completions,
        }

    def _read_log(self, kind: str) -> pa.Table:
        tables = [
            table
            for entry in self._manifest["files"][kind]
            for table in self._folder.read_parquet(kind, entry)
        ]
        return pa.concat_tables([SCHEMAS[kind].empty_table(), *tables])

    def _read_prompts(self) -> tuple[dict[str, Any], dict[str, int]]:
        table = self._read_log("prompts")
        last = {t: i for i, t in enumerate(table["prompt_id"].to_pylist())}
        bucket = table["bucket"].to_numpy()
        last = {text: row for text, row in last.items() if bucket[row] != NONE}
        table = table.take(pa.array(list(last.values()), pa.int64()))
        names = ("bucket", "position", "iteration", "times_replayed")
        columns = {name: _numpy(table[name]) for name in names}
        columns["source"] = self._source_numbers(table["source"])
        stored = int((columns["bucket"] < self._manifest["group_size"]).sum())
        self._check_count("prompts", stored)
        self._check_count("retired", len(last) - stored)
        ids = [decode_id(text) for text in last]
        numbers = {text: number for number, text in enumerate(last)}
        return {"ids": ids, "columns": columns}, numbers

    def _read_usage(self) -> dict[str, NDArray]:
        """Returns the latest row of each completion id, in the order of the ids."""
        table = self._read_log("usage")
        columns = {name: _numpy(table[name])[::-1] for name in table.column_names}
        _, first = np.unique(columns["completion_id"], return_index=True)
        return {name: column[first] for name, column in columns.items()}

    def _read_completions(self) -> dict[str, Any]:
        packed = _Packed()
        saved_in = []
        for entry in self._manifest["files"]["completions"]:
            for table in self._folder.read_parquet("completions", entry):
                table = self._without_dead(table, entry["number"])
                saved_in.append(np.full(table.num_rows, entry["number"], np.int32))
                tokens = _values(table["token_ids"], np.int32)
                logps = _values(table["behavior_logp"], np.float32)
                packed.add(self._columns_of(table), tokens, logps)
        self.saved_in = np.concatenate([self.saved_in, *saved_in])
        return packed.state()

    def _without_dead(self, table: pa.Table, number: int) -> pa.Table:
        ids = table["completion_id"].to_numpy()
        place, found = self._find_usage(ids)
        dead = found & ~self._usage["live"][place] if len(place) else found
        if not dead.any():
            return table
        self.dead_in.setdefault(number, array("q")).extend(ids[dead].tolist())
        return table.filter(pa.array(~dead))

    def _find_usage(self, ids: NDArray) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns for each id its place in the usage, and whether it has one."""
        known = self._usage["completion_id"]
        if not len(known):
            return np.empty(0, np.int64), np.zeros(len(ids), bool)
        place = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return place, known[place] == ids

    def _columns_of(self, table: pa.Table) -> dict[str, NDArray]:
        same = ("reward", "weights_version", "iteration", "truncated", "crc32")
        columns = {name: _numpy(table[name]) for name in same}
        columns["crc"] = columns.pop("crc32")
        columns["id"] = _numpy(table["completion_id"])
        columns["prompt"] = self._prompt_numbers(table["prompt_id"])
        columns["length"] = np.diff(_offsets(table["token_ids"])) // 4
        place, found = self._find_usage(columns["id"])
        for name, unused in _UNUSED.items():
            columns[name] = np.full(len(found), unused, COMPLETION[name])
            columns[name][found] = self._usage[name][place[found]] if found.any() else 0
        return columns

    def _prompt_numbers(self, texts: pa.ChunkedArray) -> NDArray[np.int32]:
        coded = texts.combine_chunks().dictionary_encode()
        try:
            numbers = [self._prompt_number[t] for t in coded.dictionary.to_pylist()]
        except KeyError as error:
            raise ReplayFileError(
                f"{self._folder.path} is damaged: it has completions of the prompt "
                f"{error}, which is in none of its files of prompts."
            ) from error
        return np.array(numbers, np.int32)[coded.indices.to_numpy()]

    def _source_numbers(self, names: pa.ChunkedArray) -> NDArray[np.int32]:
        numbers = [self._sources[name] for name in names.to_pylist()]
        return np.array(numbers, np.int32)

    def _check_count(self, what: str, found: int) -> None:
        if found != self._manifest[what]:
            raise ReplayFileError(
                f"{self._folder.file(MANIFEST)} says {self._manifest[what]} {what}, "
                f"but the files beside it hold {found}: the folder is damaged."
            )


class _Packed:
    """Row groups, packed into segments as they come."""

    def __init__(self) -> None:
        self._columns: list[dict[str, NDArray]] = []
        self._full: list[tuple[Tokens, Logps]] = []
        self._open: list[tuple[Tokens, Logps]] = []
        self._open_tokens = 0

    def add(self, columns: dict[str, NDArray], tokens: Tokens, logps: Logps) -> None:
        """Takes in the completions of one row group."""
        if self._open_tokens + len(tokens) > SEGMENT_TOKENS:
            self._close()
        ends = np.cumsum(columns["length"], dtype=np.int32)
        columns["start"] = self._open_tokens + ends - columns["length"]
        columns["segment"] = np.full(len(ends), len(self._full), np.int32)
        self._columns.append(columns)
        self._open.append((tokens, logps))
        self._open_tokens += len(tokens)

    def state(self) -> dict[str, Any]:
        """Returns the state of a `CompletionStore`."""
        self._close()
        return {
            "columns": {
                name: np.concatenate(
                    [np.empty(0, COMPLETION[name]), *(c[name] for c in self._columns)]
                )
                for name in STATE_COLUMNS
            },
            "token_ids": [tokens for tokens, _ in self._full],
            "behavior_logp": [logps for _, logps in self._full],
        }

    def _close(self) -> None:
        # Concatenating copies: the memory is then ours, and freed segment by segment.
        if self._open:
            tokens, logps = zip(*self._open, strict=True)
            self._full.append((np.concatenate(tokens), np.concatenate(logps)))
        self._open, self._open_tokens = [], 0


def _numpy(column: pa.ChunkedArray) -> NDArray:
    return column.to_numpy()


def _offsets(cells: pa.ChunkedArray) -> NDArray[np.int32]:
    array = cells.combine_chunks()
    offsets = np.frombuffer(array.buffers()[1], np.int32)
    return offsets[array.offset : array.offset + len(array) + 1]


def _values(cells: pa.ChunkedArray, kind: type) -> NDArray:
    ends = _offsets(cells)[[0, -1]]
    return np.frombuffer(cells.combine_chunks().buffers()[2], np.uint8)[
        slice(*ends)
    ].view(kind)
