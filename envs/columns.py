"""Rows by the settings that name their columns."""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .rows import Block, Rows

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = (r"(large_)?string", "texts")
PROMPTS = (
    r"(large_)?(string|list<.*(content.*role|role.*content))",
    "texts, or lists of chat messages with `role` and `content`",
)
SCALARS = (r"(large_)?string|u?int|float|double|decimal", "texts or numbers")


class Place(NamedTuple):
    """Where a row stands: a file, and its number there, counted from 0."""

    path: str
    row: int


class Table:
    """The rows of a split, each as a dict keyed by the names of the settings.

    Args:
        rows: of all splits.
        named: the setting and the column it names. A dot enters a struct.
        split: keep only rows whose column `named["split_column"]` has this value.
    """

    def __init__(self, rows: Rows, named: Mapping[str, str], split: Any = None) -> None:
        self._rows = rows
        self._named = named
        self._split = split
        names = [] if not rows.blocks else rows.blocks[0].schema.names
        self._roots = tuple(sorted({_root(c, names) for c in named.values()}))

    def __len__(self) -> int:
        """Returns the number of rows, those of other splits included."""
        return len(self._rows)

    def read(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Reads all rows of the split in order."""
        for block in self._rows.blocks:
            yield from self._read(block)

    def sample(
        self, num_rows: int | None, max_blocks: int = 8
    ) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Reads the first rows of some blocks, the first and the last one included.

        Args:
            num_rows: how many in all; None reads every row.
            max_blocks: how many blocks they come from.
        """
        if num_rows is None:
            yield from self.read()
            return
        blocks = self._rows.blocks
        count = min(max_blocks, len(blocks), num_rows)
        for number in np.linspace(0, len(blocks) - 1, count).astype(int):
            yield from islice(self._read(blocks[number]), num_rows // count)

    def values(self, row: int) -> tuple[Place, dict[str, Any]]:
        """Reads one row, counted over all files."""
        block, index = self._rows.place(row)
        values = self._by_setting(block.row(index, self._roots))
        return Place(str(block.path), block.first_row + index), values

    def place(self, row: int) -> Place:
        """Returns where a row stands that is counted over all files."""
        block, index = self._rows.place(row)
        return Place(str(block.path), block.first_row + index)

    def column(self, setting: str) -> "Iterator[pa.Array]":
        """Reads one column of the split in order, as Arrow arrays."""
        columns = [setting] if self._split is None else [setting, "split_column"]
        for block in self._rows.blocks:
            names = [self._named[name] for name in columns]
            roots = [_root(name, block.schema.names) for name in names]
            for batch in block.batches([*dict.fromkeys(roots)]):
                values, *splits = [_field(batch, name) for name in names]
                yield values.filter(self._in_split(splits[0])) if splits else values

    def split_rows(self) -> Sequence[int]:
        """Returns the numbers of the split's rows, counted over all files."""
        if self._split is None:
            return range(len(self))
        name = self._named["split_column"]
        numbers = array("q")
        start = 0
        for block in self._rows.blocks:
            for batch in block.batches([_root(name, block.schema.names)]):
                wanted = self._in_split(_field(batch, name)).to_numpy(False)
                numbers.frombytes((np.flatnonzero(wanted) + start).tobytes())
                start += len(batch)
        return numbers

    def _in_split(self, values: Any) -> Any:
        import pyarrow.compute as pc

        return pc.fill_null(pc.equal(values, self._split), False)

    def _read(self, block: Block) -> Iterator[tuple[Place, dict[str, Any]]]:
        number = block.first_row
        for batch in block.batches(self._roots):
            for row in batch.to_pylist():
                values = self._by_setting(row)
                if values.get("split_column") == self._split:
                    yield Place(str(block.path), number), values
                number += 1

    def _by_setting(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _dig(row, column) for name, column in self._named.items()}


def last_user_contents(prompts: "pa.Array") -> "pa.Array":
    """Returns texts as they are; of chat messages the last user's content, or null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(prompts, pa.ListArray | pa.LargeListArray):
        return prompts
    messages = prompts.flatten()
    is_user = pc.equal(messages.field("role"), "user").to_numpy(False)
    of_users = np.flatnonzero(is_user)
    # Later assignments win, so the last message of a user stays.
    last = np.full(len(prompts), -1)
    last[pc.list_parent_indices(prompts).to_numpy()[of_users]] = of_users
    return messages.field("content").take(pa.array(last, mask=last < 0))


def check_columns(
    blocks: Iterable[Block],
    named: Mapping[str, str],
    wanted: Mapping[str, tuple[str, str]],
) -> None:
    """Refuses files that lack a column, or have one of a type that cannot be used.

    Args:
        blocks: of the files.
        named: the setting and the column it names.
        wanted: the setting, a pattern of the Arrow type and its name.

    Raises:
        ValueError: naming the file, the columns, and the settings to change.
    """
    for path, schema in {block.path: block.schema for block in blocks}.items():
        types = dict(column_types(schema))
        missing = {
            name: column for name, column in named.items() if column not in types
        }
        if missing:
            lacks = ", ".join(f"{c!r} (setting `{n}`)" for n, c in missing.items())
            raise ValueError(
                f"{path} lacks {lacks}. It has the columns {list(types)}; name the "
                "right ones in the settings given in brackets."
            )
        for name, column in named.items():
            pattern, words = wanted.get(name, (".*", ""))
            if not re.match(pattern, types[column]):
                raise ValueError(
                    f"{path}: the column {column!r} (setting `{name}`) holds "
                    f"{types[column]}; it must hold {words}."
                )


def column_types(fields: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the type of each column, those in structs included."""
    from pyarrow import types

    for field in fields:
        name = prefix + field.name
        yield name, str(field.type)
        if types.is_struct(field.type):
            yield from column_types(field.type, name + ".")


def _root(column: str, names: Sequence[str]) -> str:
    return column if column in names else column.split(".")[0]


def _field(batch: Any, dotted: str) -> Any:
    import pyarrow.compute as pc

    root = _root(dotted, batch.schema.names)
    values = batch.column(root)
    inside = dotted[len(root) + 1 :]
    return pc.struct_field(values, inside.split(".")) if inside else values


def _dig(row: Mapping[str, Any], dotted: str) -> Any:
    if dotted in row:
        return row[dotted]
    value: Any = row
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
