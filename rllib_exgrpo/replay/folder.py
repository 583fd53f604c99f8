"""The format of a saved replay buffer, and the folder that holds it.

Schema, version 2. `replay.json`, the manifest, names the files that count, with their
sizes, and holds the group size, the knobs, the random generator's state and free-form
metadata such as the model and the tokenizer's hash. It is written last and renamed
into place, so a folder always shows a whole save: the former or the new one.

`completions-*.parquet`: one row a completion, written once.
    completion_id int64, prompt_id string (JSON, see `ids`), source string,
    environment string ("" where the metadata names none),
    token_ids binary (int32, little-endian), behavior_logp binary (float32, nats,
    little-endian; `numpy.frombuffer` reads both), reward double,
    weights_version int32, iteration int32, truncated bool,
    crc32 uint32 (of the bytes of token_ids).
`usage-*.parquet`: what happened to completions since; the last row of an id counts.
    completion_id int64, live bool (False: not in the buffer any more),
    times_replayed int32, entropy and nll float (latest score, nats a token; NaN =
    never scored), scored_version int32 (-1 = never).
`prompts-*.parquet`: one row a prompt; the last row of an id counts.
    prompt_id string, bucket int16 (k; G = retired; -1 = not in the buffer any more),
    position int32 (in its bucket's list), iteration int32 (of its latest group),
    source string, times_replayed int32.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

MANIFEST = "replay.json"
FORMAT = "rllib_exgrpo.replay"
VERSION = 2

Manifest: TypeAlias = dict[str, Any]
Entry: TypeAlias = dict[str, Any]
"""What the manifest says of a file: name, bytes, rows, and more for completions."""


def _required(**fields: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(n, kind, nullable=False) for n, kind in fields.items()])


SCHEMAS = {
    "completions": _required(
        completion_id=pa.int64(),
        prompt_id=pa.string(),
        source=pa.string(),
        environment=pa.string(),
        # Lists would be plainer, but parquet takes three times as long to pack them.
        token_ids=pa.binary(),
        behavior_logp=pa.binary(),
        reward=pa.float64(),
        weights_version=pa.int32(),
        iteration=pa.int32(),
        truncated=pa.bool_(),
        crc32=pa.uint32(),
    ),
    "usage": _required(
        completion_id=pa.int64(),
        live=pa.bool_(),
        times_replayed=pa.int32(),
        entropy=pa.float32(),
        nll=pa.float32(),
        scored_version=pa.int32(),
    ),
    "prompts": _required(
        prompt_id=pa.string(),
        bucket=pa.int16(),
        position=pa.int32(),
        iteration=pa.int32(),
        source=pa.string(),
        times_replayed=pa.int32(),
    ),
}
_OUR_FILES = re.compile(rf"({'|'.join(SCHEMAS)})-[0-9a-f]{{32}}\.parquet(\.tmp)?")
# Token ids and log-probs hardly compress; the rest is small.
_WRITER_OPTIONS = {
    "use_dictionary": ["prompt_id", "source", "environment"],
    "write_statistics": False,
    "write_page_checksum": True,
    "write_batch_size": 1 << 16,
}


class ReplayFileError(ValueError):
    """A file is missing, cut short, damaged, or not of this format."""


@dataclass(frozen=True)
class Folder:
    """A place for a saved buffer.

    Attributes:
        path: of the folder, in the terms of `filesystem`.
        filesystem: what it lies on.
    """

    path: str
    filesystem: pa.fs.FileSystem

    @classmethod
    def at(
        cls, path: str | Path, filesystem: pa.fs.FileSystem | None = None
    ) -> "Folder":
        """Returns the folder at a path, or at a URI where no file system is given."""
        if filesystem is not None:
            return cls(Path(path).as_posix(), filesystem)
        uri = str(path) if "://" in str(path) else os.path.abspath(path)
        filesystem, where = pa.fs.FileSystem.from_uri(uri)
        return cls(where, filesystem)

    @property
    def is_local(self) -> bool:
        """Whether ordinary file calls work on it."""
        return isinstance(self.filesystem, pa.fs.LocalFileSystem)

    def file(self, name: str) -> str:
        """Returns the path of a file in it."""
        return f"{self.path}/{name}"

    def holds(self, entry: Entry) -> bool:
        """Whether a file is there, with the size that the manifest says."""
        info = self.filesystem.get_file_info(self.file(entry["name"]))
        return info.size == entry["bytes"]

    def write(self, name: str, fill: Callable[[pa.NativeFile], Any]) -> int:
        """Writes a file under a temporary name, renames it, returns its bytes."""
        temporary = self.file(name + ".tmp")
        with self.filesystem.open_output_stream(temporary) as sink:
            fill(sink)
            size = sink.tell()
        if self.is_local:
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
        self.filesystem.move(temporary, self.file(name))
        return size

    def write_parquet(self, kind: str, tables: Iterable[pa.Table]) -> Entry:
        """Writes tables as the row groups of one new file of a kind."""
        name, rows = f"{kind}-{uuid4().hex}.parquet", 0
        compression = "none" if kind == "completions" else "zstd"
        options = {**_WRITER_OPTIONS, "compression": compression}

        def fill(sink: pa.NativeFile) -> None:
            nonlocal rows
            with pq.ParquetWriter(sink, SCHEMAS[kind], **options) as writer:
                for table in tables:
                    writer.write_table(table, row_group_size=max(table.num_rows, 1))
                    rows += table.num_rows

        size = self.write(name, fill)
        return {"name": name, "bytes": size, "rows": rows}

    def read_parquet(self, kind: str, entry: Entry) -> Iterator[pa.Table]:
        """Yields the row groups of a file.

        Raises:
            ReplayFileError: if it is missing, cut short, damaged or of another schema.
        """
        path = self.file(entry["name"])
        if not self.holds(entry):
            info = self.filesystem.get_file_info(path)
            raise ReplayFileError(
                f"{path} has {info.size} bytes, but {entry['bytes']} were saved: it is "
                "missing or cut short. Restore from another checkpoint."
            )
        try:
            with self.filesystem.open_input_file(path) as source:
                file = pq.ParquetFile(source, page_checksum_verification=True)
                if not file.schema_arrow.equals(SCHEMAS[kind]):
                    raise ReplayFileError(
                        f"{path} has the columns {file.schema_arrow.names}, but a file "
                        f"of {kind} has {SCHEMAS[kind].names}: it is not ours."
                    )
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group)
        except (pa.ArrowException, OSError) as error:
            raise ReplayFileError(f"{path} is damaged: {error}") from error

    def read_manifest(self) -> Manifest:
        """Reads the manifest.

        Raises:
            ReplayFileError: if it is missing or not of this format.
        """
        path = self.file(MANIFEST)
        if not self.filesystem.get_file_info(path).is_file:
            raise ReplayFileError(
                f"{path} does not exist: this folder is not a saved replay buffer, or "
                "its first save did not finish."
            )
        with self.filesystem.open_input_stream(path) as source:
            text = source.read()
        try:
            manifest = json.loads(text)
            found = manifest["format"], manifest["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ReplayFileError(
                f"{path} is not the manifest of a replay buffer: {error!r}"
            ) from error
        if found != (FORMAT, VERSION):
            raise ReplayFileError(
                f"{path} is of format {found[0]!r}, version {found[1]!r}, but this "
                f"version of the package reads {FORMAT!r}, version {VERSION}."
            )
        return manifest

    def keep_only(self, entries: Iterable[Entry]) -> None:
        """Deletes the files of other, earlier saves."""
        names = {entry["name"] for entry in entries}
        for info in self.filesystem.get_file_info(pa.fs.FileSelector(self.path)):
            if _OUR_FILES.fullmatch(info.base_name) and info.base_name not in names:
                self.filesystem.delete_file(info.path)

    def link(self, other: "Folder", entries: Iterable[Entry]) -> bool:
        """Shares files of another folder; False where one cannot be shared."""
        if not (self.is_local and other.is_local):
            return False
        try:
            for entry in entries:
                if not self.holds(entry):
                    os.link(other.file(entry["name"]), self.file(entry["name"]))
        except OSError:  # another device, no hard links there, or the file is gone
            return False
        return True


def entries_of(manifest: Manifest) -> list[Entry]:
    """Returns all files that a manifest names."""
    return [entry for kind in SCHEMAS for entry in manifest["files"][kind]]
