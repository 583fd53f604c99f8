"""Problems that are read when they are asked for."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from .base import Problem

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_KEPT_PROBLEMS = 4096


class LazyProblems(Mapping[Hashable, Problem]):
    """Problems by id, each read when asked for; memory does not grow with their number.

    Args:
        ids: of all problems.
        read: reads the problem of an id; raises KeyError if there is none.
    """

    def __init__(
        self, ids: Sequence[Hashable], read: Callable[[Hashable], Problem]
    ) -> None:
        self.ids = ids
        self._read = read

    def __getitem__(self, prompt_id: Hashable) -> Problem:
        return self._kept(prompt_id)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _kept(self) -> Callable[[Hashable], Problem]:
        # All completions of a group ask for the same problem.
        return lru_cache(_MAX_KEPT_PROBLEMS)(self._read)

    def __getstate__(self) -> dict[str, Any]:
        return {"ids": self.ids, "_read": self._read}


class RowIds(Sequence[int]):
    """Ids that are row numbers.

    Args:
        rows: the numbers, ascending.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def row(self, prompt_id: Hashable) -> int:
        """Returns the row of an id.

        Raises:
            KeyError: if there is none.
        """
        if isinstance(prompt_id, int):
            position = bisect_left(self._rows, prompt_id)
            if position < len(self) and self._rows[position] == prompt_id:
                return prompt_id
        raise KeyError(prompt_id)


class ColumnIds(Sequence[Hashable]):
    """Ids that are the values of a column, kept as one Arrow array.

    Args:
        values: without nulls, each once.
        rows: the row number of each.
    """

    def __init__(self, values: "pa.Array", rows: Sequence[int]) -> None:
        self._values = values
        self._rows = rows

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        found = self._values[index]
        return found.to_pylist() if isinstance(index, slice) else found.as_py()

    def row(self, prompt_id: Hashable) -> int:
        """Returns the row of an id.

        Raises:
            KeyError: if there is none.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        try:
            wanted = pa.scalar(prompt_id, self._values.type)
        except pa.ArrowException:  # of another type than the column
            raise KeyError(prompt_id) from None
        position = pc.index(self._values, wanted).as_py()
        if position < 0:
            raise KeyError(prompt_id)
        return int(self._rows[position])
