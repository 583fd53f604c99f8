"""Saving a replay buffer, each time only what changed, and loading it; see `folder`."""

import json
from array import array
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.folder import (
    FORMAT,
    MANIFEST,
    SCHEMAS,
    VERSION,
    Entry,
    Folder,
    Manifest,
    ReplayFileError,
    entries_of,
)
from rllib_exgrpo.replay.ids import decode_id, encode_id
from rllib_exgrpo.replay.store import (
    COMPLETION,
    NONE,
    SEGMENT_TOKENS,
    STATE_COLUMNS,
    CompletionStore,
    Logps,
    Tokens,
)

FILE_TOKENS = 1 << 25
"""A file of completions is closed at about this many tokens (256 MiB)."""

_MAX_LOG_FILES = 32
_WRITERS = 2  # parquet packs lists more slowly than memory takes them


class ReplayFiles:
    """Saves a buffer and loads it.

    A second save writes new completions, changed usage and prompts, and from time to
    time merges small files or rewrites files that are mostly dead. The other files
    stay, or are shared by hard links where the folder is another one on the same file
    system. Each completion is rewritten O(log n) times.

    Args:
        metadata: kept with the buffer, such as "model", "tokenizer" (a hash) and
            "environment". A saved buffer of another tokenizer is refused.
    """

    def __init__(self, metadata: dict[str, str] | None = None) -> None:
        self._metadata = dict(metadata or {})
        self._folder: Folder | None = None
        self._manifest: Manifest | None = None
        self._store: CompletionStore | None = None  # that the manifest describes
        self._dead_written: dict[int, int] = {}

    def save(self, buffer: ReplayBuffer, folder: Folder) -> int:
        """Saves a buffer; what an earlier save left in the folder is replaced.

        Returns:
            Bytes written, without the files that were shared.
        """
        folder.filesystem.create_dir(folder.path, recursive=True)
        if not self._can_build_on_last(buffer, folder):
            self._start_over(buffer)
        save = _Save(buffer, folder, self._manifest, self._dead_written)
        manifest = {**_header(buffer), "metadata": self._metadata, **save.run()}
        text = json.dumps(manifest, indent=1).encode()
        folder.write(MANIFEST, lambda sink: sink.write(text))
        folder.keep_only(entries_of(manifest))
        save.mark_saved()
        self._remember(buffer, folder, manifest)
        return save.bytes_written + len(text)

    def load(self, buffer: ReplayBuffer, folder: Folder) -> None:
        """Replaces the contents of a buffer by a saved one.

        Raises:
            ReplayFileError: if a file is missing, damaged or of another format.
            ValueError: if the group size or the tokenizer is another.
        """
        manifest = folder.read_manifest()
        self._check_tokenizer(manifest, folder)
        loaded = _Load(folder, manifest)
        buffer.set_state(loaded.state)
        buffer.store.table["saved_in"][:] = loaded.saved_in
        buffer.store.dead_in = loaded.dead_in
        buffer.prompts.table["saved"][:] = True
        buffer.prompts.table["changed"][:] = False
        self._remember(buffer, folder, manifest)

    def _remember(
        self, buffer: ReplayBuffer, folder: Folder, manifest: Manifest
    ) -> None:
        self._folder, self._manifest, self._store = folder, manifest, buffer.store
        self._dead_written = {n: len(ids) for n, ids in buffer.store.dead_in.items()}

    def _can_build_on_last(self, buffer: ReplayBuffer, folder: Folder) -> bool:
        """Whether the files of the last save are still right and within reach."""
        if self._manifest is None or self._folder is None:
            return False
        if buffer.store is not self._store:  # the contents were replaced since
            return False
        entries = entries_of(self._manifest)
        if folder != self._folder and not folder.link(self._folder, entries):
            return False
        return all(map(folder.holds, entries))

    def _start_over(self, buffer: ReplayBuffer) -> None:
        self._manifest = None
        self._dead_written = {}
        buffer.store.table["saved_in"][:] = NONE
        buffer.store.dead_in.clear()
        buffer.prompts.table["saved"][:] = False
        buffer.prompts.removed.clear()

    def _check_tokenizer(self, manifest: Manifest, folder: Folder) -> None:
        ours = self._metadata.get("tokenizer")
        theirs = manifest["metadata"].get("tokenizer")
        if ours and theirs and ours != theirs:
            raise ValueError(
                f"The replay buffer in {folder.path} was filled with the tokenizer "
                f"{theirs}, but this run's is {ours}: its token ids mean other text "
                "here. Use the same model family, or start with an empty buffer."
            )


def _header(buffer: ReplayBuffer) -> Manifest:
    return {
        "format": FORMAT,
        "version": VERSION,
        "group_size": buffer.group_size,
        "knobs": buffer.knobs,
        "prompts": len(buffer),
        "retired": buffer.num_retired,
        "completions": buffer.num_completions,
        "tokens": buffer.store.num_tokens,
        "counters": buffer.get_counters(),
    }


class _Save:
    """One save: what it writes, and the marks that it leaves once it is complete."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        folder: Folder,
        last: Manifest | None,
        dead_written: dict[int, int],
    ) -> None:
        self.bytes_written = 0
        self._prompts, self._store = buffer.prompts, buffer.store
        self._sources = pa.array(list(buffer.sources), pa.string())
        self._folder = folder
        self._files = {
            kind: list(last["files"][kind]) if last else [] for kind in SCHEMAS
        }
        self._next_file = last["next_file"] if last else 0
        self._dead_written = dead_written
        self._live = self._store.table.live_rows()
        self._live_prompts = self._prompts.table.live_rows()
        self._written: list[tuple[int, NDArray[np.int64]]] = []

    def run(self) -> Manifest:
        """Writes the files and returns what the manifest says of them."""
        self._write_completions()
        self._write_usage()
        self._write_prompts()
        return {"files": self._files, "next_file": self._next_file}

    def mark_saved(self) -> None:
        """Notes in the buffer what has been saved and where."""
        for number, rows in self._written:
            self._store.table["saved_in"][rows] = number
        kept = {entry["number"] for entry in self._files["completions"]}
        for number in set(self._store.dead_in) - kept:
            del self._store.dead_in[number]
        self._store.table["changed"][self._live] = False
        self._prompts.table["changed"][self._live_prompts] = False
        self._prompts.table["saved"][self._live_prompts] = True
        self._prompts.removed.clear()

    # Completions.

    def _write_completions(self) -> None:
        columns = self._store.table.columns
        saved_in = columns["saved_in"][self._live]
        lengths = columns["length"][self._live]
        tokens_in = np.bincount(saved_in + 1, lengths, minlength=self._next_file + 1)
        stale = self._stale_files(tokens_in)
        wanted = np.zeros(int(self._live.max(initial=-1)) + 1, bool)
        wanted[self._live[np.isin(saved_in, [NONE, *stale])]] = True
        kept = [e for e in self._files["completions"] if e["number"] not in stale]
        with ThreadPoolExecutor(_WRITERS) as pool:
            new = pool.map(
                lambda part: self._write_part(part, wanted), self._parts(wanted)
            )
            self._files["completions"] = kept + list(new)

    def _stale_files(self, tokens_in: NDArray[np.float64]) -> list[int]:
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
        columns = self._store.table.columns
        tokens = np.bincount(columns["segment"][rows], columns["length"][rows])
        segments = np.flatnonzero(tokens)
        file_of = np.cumsum(tokens[segments]) // FILE_TOKENS
        parts = [segments[file_of == f].tolist() for f in np.unique(file_of)]
        first, self._next_file = self._next_file, self._next_file + len(parts)
        return list(enumerate(parts, first))

    def _write_part(
        self, part: tuple[int, list[int]], wanted: NDArray[np.bool_]
    ) -> Entry:
        number, segments = part
        rows_S = [self._store.rows_in(segment) for segment in segments]
        rows_S = [rows[wanted[rows]] for rows in rows_S]
        tables = map(self._completions_table, segments, rows_S)
        entry = self._folder.write_parquet("completions", tables)
        rows = np.concatenate(rows_S)
        self._written.append((number, rows))
        self.bytes_written += entry["bytes"]
        tokens = int(self._store.table["length"][rows].sum(dtype=np.int64))
        return {**entry, "number": number, "tokens": tokens}

    def _completions_table(self, segment: int, rows: NDArray[np.int64]) -> pa.Table:
        columns = {n: c[rows] for n, c in self._store.table.columns.items()}
        token_ids, behavior_logp = self._store.gather(segment, rows)
        ends = np.cumsum(columns["length"], dtype=np.int32)
        offsets = np.concatenate([np.zeros(1, np.int32), ends])
        prompts, of_row = np.unique(columns["prompt"], return_inverse=True)
        columns |= {
            "completion_id": columns["id"],
            "crc32": columns["crc"],
            "prompt_id": self._id_texts(prompts).take(pa.array(of_row)),
            "source": self._source_names(columns["prompt"]),
            "token_ids": _lists("token_ids", offsets, token_ids),
            "behavior_logp": _lists("behavior_logp", offsets, behavior_logp),
        }
        return _table("completions", columns)

    # Usage and prompts: logs, where later rows count.

    def _write_usage(self) -> None:
        columns = self._store.table.columns
        changed = self._live[columns["changed"][self._live]]
        used = columns["times_replayed"] > 0
        used |= columns["scored_version"] != NONE
        kept = {entry["number"] for entry in self._files["completions"]}
        dead = {n: ids for n, ids in self._store.dead_in.items() if n in kept}
        new = [ids[self._dead_written.get(n, 0) :] for n, ids in dead.items()]
        num_new = len(changed) + sum(map(len, new))
        if self._starts_log("usage", num_new):
            changed, new = self._live[used[self._live]], list(dead.values())
        self._append_log("usage", self._usage_table(changed, _ids(new)))

    def _usage_table(
        self, rows: NDArray[np.int64], dead: NDArray[np.int64]
    ) -> pa.Table:
        columns = {n: c[rows] for n, c in self._store.table.columns.items()}
        columns |= {"completion_id": columns["id"], "live": np.ones(len(rows), bool)}
        gone = {name: np.zeros(len(dead), columns[name].dtype) for name in columns}
        gone["completion_id"] = dead
        return pa.concat_tables([_table("usage", gone), _table("usage", columns)])

    def _write_prompts(self) -> None:
        rows = self._live_prompts[self._prompts.table["changed"][self._live_prompts]]
        removed = self._prompts.removed
        if self._starts_log("prompts", len(rows) + len(removed)):
            rows, removed = self._live_prompts, []
        columns = {n: c[rows] for n, c in self._prompts.table.columns.items()}
        columns |= {
            "prompt_id": self._id_texts(rows),
            "source": self._source_names(rows),
        }
        gone = {
            "prompt_id": pa.array([encode_id(p) for p in removed], pa.string()),
            "bucket": np.full(len(removed), NONE, np.int16),
            "position": np.zeros(len(removed), np.int32),
            "iteration": np.zeros(len(removed), np.int32),
            "source": pa.array([""] * len(removed), pa.string()),
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
            self.bytes_written += entry["bytes"]

    def _id_texts(self, prompts: NDArray[np.int64]) -> pa.Array:
        texts = [encode_id(self._prompts.id(row)) for row in prompts.tolist()]
        return pa.array(texts, pa.string())

    def _source_names(self, prompts: NDArray[np.int64]) -> pa.Array:
        return self._sources.take(pa.array(self._prompts.table["source"][prompts]))


def _table(kind: str, columns: dict[str, Any]) -> pa.Table:
    schema = SCHEMAS[kind]
    arrays = [pa.array(columns[f.name], f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _lists(name: str, offsets: NDArray[np.int32], values: NDArray) -> pa.Array:
    """Returns a list array over the memory of `values`."""
    kind = SCHEMAS["completions"].field(name).type
    buffers = [None, pa.py_buffer(offsets)]
    children = [pa.array(values)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers, children=children)


def _ids(parts: Iterable[Any]) -> NDArray[np.int64]:
    arrays = [np.array(part, np.int64) for part in parts]
    return np.concatenate([np.empty(0, np.int64), *arrays])


class _Load:
    """One load.

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
        columns = {n: _numpy(table[n]) for n in ("bucket", "position", "iteration")}
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
                lists = [_values(table[n]) for n in ("token_ids", "behavior_logp")]
                packed.add(self._columns_of(table), *lists)
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
        columns["length"] = np.diff(table["token_ids"].combine_chunks().offsets)
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


_UNUSED = {"times_replayed": 0, "entropy": np.nan, "nll": np.nan, "scored_version": -1}


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


def _values(lists: pa.ChunkedArray) -> NDArray:
    return lists.combine_chunks().flatten().to_numpy()
