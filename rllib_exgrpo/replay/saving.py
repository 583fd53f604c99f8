"""What a save writes: new completions, and what changed since the last save."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.folder import SCHEMAS, Entry, Folder, Manifest
from rllib_exgrpo.replay.ids import encode_ids
from rllib_exgrpo.replay.store import NONE

FILE_TOKENS = 1 << 23
"""A file of completions is closed at about this many tokens (64 MiB)."""

_MAX_LOG_FILES = 32
_WRITERS = 2  # parquet packs more slowly than memory takes it


class Save:
    """One save: what it writes, and the marks that it leaves once it is complete.

    Args:
        buffer: what to save.
        folder: where to.
        last: the manifest of the save to build on; None saves everything.
        dead_written: file number -> how many of its dead are in the usage log.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        folder: Folder,
        last: Manifest | None,
        dead_written: dict[int, int],
    ) -> None:
        self._prompts, self._store = buffer.prompts, buffer.store
        self._sources = pa.array(list(buffer.sources), pa.string())
        self._environment = buffer.metadata.get("environment", "")
        self._folder = folder
        self._files = {
            kind: list(last["files"][kind]) if last else [] for kind in SCHEMAS
        }
        self._next_file = last["next_file"] if last else 0
        self._dead_written = dead_written
        self._live = self._store.table.live_rows()
        self._live_prompts = self._prompts.table.live_rows()
        self._written: list[tuple[int, NDArray[np.int64]]] = []
        self._new: list[Entry] = []

    @property
    def bytes_written(self) -> int:
        """Size of the files that this save has written."""
        return sum(entry["bytes"] for entry in self._new)

    def run(self) -> Manifest:
        """Writes the files and returns what the manifest says of them."""
        with ThreadPoolExecutor(_WRITERS) as pool:
            prompts = pool.submit(self._write_prompts)
            self._write_completions(pool)
            prompts.result()
        self._write_usage()
        return {"files": self._files, "next_file": self._next_file}

    def mark_saved(self) -> None:
        """Notes in the buffer what has been saved and where."""
        for number, rows in self._written:
            self._store.table["saved_in"][rows] = number
        kept = {entry["number"] for entry in self._files["completions"]}
        for number in set(self._store.dead_in) - kept:
            del self._store.dead_in[number]
        self._store.table.fill("changed", False)
        self._prompts.table.fill("changed", False)
        self._prompts.table["saved"][self._live_prompts] = True
        self._prompts.removed.clear()

    # Completions.

    def _write_completions(self, pool: ThreadPoolExecutor) -> None:
        saved_in = self._store.table["saved_in"][self._live]
        lengths = self._store.table["length"][self._live]
        tokens_in = np.bincount(saved_in + 1, lengths, minlength=self._next_file + 1)
        stale = self._stale_files(tokens_in)
        wanted = np.zeros(int(self._live.max(initial=-1)) + 1, bool)
        wanted[self._live[np.isin(saved_in, [NONE, *stale])]] = True
        kept = [e for e in self._files["completions"] if e["number"] not in stale]
        parts = self._parts(wanted)
        new = list(pool.map(lambda p: self._write_part(p[0], p[1], wanted), parts))
        self._new += new
        self._files["completions"] = kept + new

    def _stale_files(self, tokens_in: NDArray) -> list[int]:
        """Returns the files to write anew: mostly dead, or small beside what is new.

        Args:
            tokens_in: live tokens, at 0 of no file, at n + 1 of file n.
        """
        stale, pending = [], tokens_in[0]
        for entry in reversed(self._files["completions"]):
            live = tokens_in[entry["number"] + 1]
            if live < entry["tokens"] / 2 or live <= min(pending, FILE_TOKENS / 2):
                stale.append(entry["number"])
                pending += live
        return stale

    def _parts(self, wanted: NDArray[np.bool_]) -> list[tuple[int, list[int]]]:
        """Splits the segments with wanted rows into files: (number, segments)."""
        rows = np.flatnonzero(wanted)
        table = self._store.table
        tokens = np.bincount(table["segment"][rows], table["length"][rows])
        segments = np.flatnonzero(tokens)
        file_of = np.cumsum(tokens[segments]) // FILE_TOKENS
        parts = [segments[file_of == f].tolist() for f in np.unique(file_of)]
        first, self._next_file = self._next_file, self._next_file + len(parts)
        return list(enumerate(parts, first))

    def _write_part(
        self, number: int, segments: list[int], wanted: NDArray[np.bool_]
    ) -> Entry:
        rows_S = [self._store.rows_in(segment) for segment in segments]
        rows_S = [rows[wanted[rows]] for rows in rows_S]
        tables = map(self._completions_table, segments, rows_S)
        entry = self._folder.write_parquet("completions", tables)
        rows = np.concatenate(rows_S)
        self._written.append((number, rows))
        tokens = int(self._store.table["length"][rows].sum(dtype=np.int64))
        return {**entry, "number": number, "tokens": tokens}

    def _completions_table(self, segment: int, rows: NDArray[np.int64]) -> pa.Table:
        columns = self._store.table.columns(rows)
        token_ids, behavior_logp = self._store.gather(segment, rows)
        ends = np.cumsum(columns["length"], dtype=np.int32)
        # Both are four bytes a token.
        offsets = 4 * np.concatenate([np.zeros(1, np.int32), ends])
        prompts, of_row = np.unique(columns["prompt"], return_inverse=True)
        columns |= {
            "completion_id": columns["id"],
            "crc32": columns["crc"],
            "prompt_id": self._id_texts(prompts).take(pa.array(of_row)),
            "source": self._source_names(columns["prompt"]),
            "environment": pa.repeat(self._environment, len(rows)),
            "token_ids": _cells(offsets, token_ids),
            "behavior_logp": _cells(offsets, behavior_logp),
        }
        return _table("completions", columns)

    # Usage and prompts: logs, where later rows count.

    def _write_usage(self) -> None:
        rows = self._live[self._store.table["changed"][self._live]]
        kept = {entry["number"] for entry in self._files["completions"]}
        dead = {n: ids for n, ids in self._store.dead_in.items() if n in kept}
        first = self._dead_written
        new = [ids[first.get(number, 0) :] for number, ids in dead.items()]
        if self._starts_log("usage", len(rows) + sum(map(len, new))):
            rows, new = self._used_rows(), list(dead.values())
        self._append_log("usage", self._usage_table(rows, _ids(new)))

    def _used_rows(self) -> NDArray[np.int64]:
        used = self._store.table["times_replayed"][self._live] > 0
        used |= self._store.table["scored_version"][self._live] != NONE
        return self._live[used]

    def _usage_table(
        self, rows: NDArray[np.int64], dead: NDArray[np.int64]
    ) -> pa.Table:
        columns = self._store.table.columns(rows)
        columns |= {"completion_id": columns["id"], "live": np.ones(len(rows), bool)}
        gone = {name: np.zeros(len(dead), columns[name].dtype) for name in columns}
        gone["completion_id"] = dead
        return pa.concat_tables([_table("usage", gone), _table("usage", columns)])

    def _write_prompts(self) -> None:
        rows = self._live_prompts[self._prompts.table["changed"][self._live_prompts]]
        removed = self._prompts.removed
        if self._starts_log("prompts", len(rows) + len(removed)):
            rows, removed = self._live_prompts, []
        columns = self._prompts.table.columns(rows)
        columns |= {
            "prompt_id": self._id_texts(rows),
            "source": self._source_names(rows),
        }
        gone = {
            "prompt_id": encode_ids(removed),
            "bucket": np.full(len(removed), NONE, np.int16),
            "position": np.zeros(len(removed), np.int32),
            "iteration": np.zeros(len(removed), np.int32),
            "source": pa.array([""] * len(removed), pa.string()),
            "times_replayed": np.zeros(len(removed), np.int32),
        }
        # A prompt may have been removed and then added again: live rows come last.
        tables = [_table("prompts", gone), _table("prompts", columns)]
        self._append_log("prompts", pa.concat_tables(tables))

    def _starts_log(self, kind: str, num_new: int) -> bool:
        """Whether a log is written anew: it has none, or grew to twice its start."""
        entries = self._files[kind]
        appended = sum(entry["rows"] for entry in entries[1:]) + num_new
        too_long = len(entries) >= _MAX_LOG_FILES
        if entries and not too_long and appended <= entries[0]["rows"]:
            return False
        self._files[kind] = []
        return True

    def _append_log(self, kind: str, table: pa.Table) -> None:
        if table.num_rows:
            entry = self._folder.write_parquet(kind, [table])
            self._files[kind].append(entry)
            self._new.append(entry)

    def _id_texts(self, prompts: NDArray[np.int64]) -> pa.Array:
        return encode_ids(self._prompts.ids(prompts))

    def _source_names(self, prompts: NDArray[np.int64]) -> pa.Array:
        return self._sources.take(pa.array(self._prompts.table["source"][prompts]))


def _table(kind: str, columns: dict[str, Any]) -> pa.Table:
    schema = SCHEMAS[kind]
    arrays = [pa.array(columns[f.name], f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _cells(offsets: NDArray[np.int32], values: NDArray) -> pa.Array:
    """Returns an array of bytes over the memory of `values`."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _ids(parts: Iterable[Any]) -> NDArray[np.int64]:
    arrays = [np.array(part, np.int64) for part in parts]
    return np.concatenate([np.empty(0, np.int64), *arrays])
