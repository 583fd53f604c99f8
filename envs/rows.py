"""Rows of files of tables: read in order, or one at a time in flat memory.

JSON-lines and CSV files are read whole. Arrow files are memory-mapped. Of parquet files
only the footers are read; a row group that a single row is asked of is decoded once, in
a stream, into an Arrow file of the cache folder, and memory-mapped from then on.
"""

import hashlib
import os
import tempfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".arrow", ".feather", ".jsonl", ".json", ".csv")

_BATCH_ROWS = 4096
_MAX_MAPPED_FILES = 64


@dataclass(frozen=True)
class Block(ABC):
    """Rows that lie together: a file, or a row group of a parquet file.

    Attributes:
        path: of the file.
        schema: of the file.
        num_rows: how many.
        first_row: number of the first one in the file.
    """

    path: Path
    schema: "pa.Schema"
    num_rows: int
    first_row: int = 0

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> "Iterator[pa.RecordBatch]":
        """Reads columns in order, a few thousand rows at a time."""

    @abstractmethod
    def row(self, index: int, columns: Sequence[str]) -> dict[str, Any]:
        """Reads one row, counted from the first of the block."""


class Rows:
    """The rows of several files, one after the other.

    Args:
        paths: of the files.
        cache_dir: folder for decoded row groups.
    """

    def __init__(self, paths: Sequence[Path], cache_dir: Path) -> None:
        self.blocks = list(chain.from_iterable(open_file(p, cache_dir) for p in paths))
        self._ends = list(accumulate(block.num_rows for block in self.blocks))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, row: int) -> tuple[Block, int]:
        """Returns the block of a row and where it stands there."""
        number = bisect_right(self._ends, row)
        block = self.blocks[number]
        return block, row - self._ends[number] + block.num_rows

    def row(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Reads one row."""
        block, index = self.place(row)
        return block.row(index, columns)


def open_file(path: Path, cache_dir: Path) -> "Sequence[Block]":
    """Opens a file.

    Raises:
        ValueError: if it is of another type, or cannot be read.
    """
    import pyarrow as pa

    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}.")
    try:
        if path.suffix == ".parquet":
            return _row_groups(path, cache_dir)
        if path.suffix in (".arrow", ".feather"):
            table = _mapped(path)
            return [ArrowFile(path, table.schema, table.num_rows)]
        return [_read_text_file(path)]
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class WholeTable(Block):
    """A file as one Arrow table."""

    table: "pa.Table"

    def batches(self, columns: Sequence[str]) -> "Iterator[pa.RecordBatch]":
        """Cuts the table into batches."""
        yield from self.table.select(columns).to_batches(max_chunksize=_BATCH_ROWS)

    def row(self, index: int, columns: Sequence[str]) -> dict[str, Any]:
        """Slices the row out."""
        return self.table.select(columns).slice(index, 1).to_pylist()[0]


@dataclass(frozen=True)
class InMemory(WholeTable):
    """A file that was read whole.

    Attributes:
        table: its rows.
    """

    table: "pa.Table" = None


@dataclass(frozen=True)
class ArrowFile(WholeTable):
    """A memory-mapped Arrow file, in the file or in the stream format."""

    @property
    def table(self) -> "pa.Table":
        """The mapped rows."""
        return _mapped(self.path)


@dataclass(frozen=True)
class RowGroup(Block):
    """A row group of a parquet file.

    Attributes:
        number: of the row group in the file.
        cache_dir: folder for its decoded form.
    """

    number: int = 0
    cache_dir: Path = Path()

    def batches(self, columns: Sequence[str]) -> "Iterator[pa.RecordBatch]":
        """Decodes in a stream: a large group does not need large memory."""
        from pyarrow.parquet import ParquetFile

        with ParquetFile(self.path, memory_map=True) as file:
            yield from file.iter_batches(
                _BATCH_ROWS, row_groups=[self.number], columns=[*columns]
            )

    def row(self, index: int, columns: Sequence[str]) -> dict[str, Any]:
        """Slices the row out of the decoded form."""
        return _mapped(self._decoded(columns)).slice(index, 1).to_pylist()[0]

    def _decoded(self, columns: Sequence[str]) -> Path:
        stat = self.path.stat()
        key = (
            self.path.resolve(),
            stat.st_mtime_ns,
            stat.st_size,
            self.number,
            columns,
        )
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        path = self.cache_dir / f"{name}.arrow"
        if not path.exists():
            self._decode(path, columns)
        return path

    def _decode(self, path: Path, columns: Sequence[str]) -> None:
        import pyarrow as pa

        path.parent.mkdir(parents=True, exist_ok=True)
        batches = self.batches(columns)
        first = next(batches)
        # Renamed when complete: several processes may decode the same group.
        with (
            tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file,
            pa.ipc.new_stream(file, first.schema) as writer,
        ):
            for batch in chain([first], batches):
                writer.write_batch(batch)
        os.replace(file.name, path)


def _row_groups(path: Path, cache_dir: Path) -> list[RowGroup]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
    counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    starts = accumulate(counts, initial=0)
    return [
        RowGroup(path, schema, count, start, number, cache_dir)
        for number, (count, start) in enumerate(zip(counts, starts, strict=False))
    ]


def _read_text_file(path: Path) -> InMemory:
    if path.suffix == ".csv":
        from pyarrow.csv import read_csv as read
    else:
        from pyarrow.json import read_json as read
    table = read(path)
    return InMemory(path, table.schema, table.num_rows, table=table)


def _mapped(path: Path) -> "pa.Table":
    return _map(path, path.stat().st_mtime_ns)


@lru_cache(_MAX_MAPPED_FILES)
def _map(path: Path, modified: int) -> "pa.Table":
    """Maps a file; `modified` keeps a rewritten file from being taken for the old."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    is_file_format = source.read(6) == b"ARROW1"
    source.seek(0)
    open_reader = pa.ipc.open_file if is_file_format else pa.ipc.open_stream
    return open_reader(source).read_all()
