"""Columns of equal length that grow without copying, and whose rows are used again."""

from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows: TypeAlias = "int | list[int] | NDArray[np.integer]"

_PAGE_BITS = 20
_PAGE_ROWS = 1 << _PAGE_BITS
_IN_PAGE = _PAGE_ROWS - 1
_FEW = 16  # rows that are faster to reach one by one than page by page


class Column:
    """One field of a table, over all pages; indexed by one row or by many.

    Args:
        dtype: of the values.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.pages: list[NDArray] = []
        self._dtype = dtype

    def __getitem__(self, rows: Rows) -> Any:
        if isinstance(rows, int):
            return self.pages[rows >> _PAGE_BITS][rows & _IN_PAGE]
        if len(self.pages) == 1:
            return self.pages[0][rows]
        if len(rows) <= _FEW:
            return np.array([self[row] for row in map(int, rows)], self._dtype)
        rows = np.asarray(rows, int)
        values = np.empty(len(rows), self._dtype)
        for page, mask in self._by_page(rows):
            values[mask] = page[rows[mask] & _IN_PAGE]
        return values

    def __setitem__(self, rows: Rows, values: ArrayLike) -> None:
        if isinstance(rows, int):
            self.pages[rows >> _PAGE_BITS][rows & _IN_PAGE] = values
            return
        if len(self.pages) == 1:
            self.pages[0][rows] = values
            return
        values = np.broadcast_to(np.asarray(values, self._dtype), len(rows))
        if len(rows) <= _FEW:
            for row, value in zip(map(int, rows), values, strict=True):
                self[row] = value
            return
        rows = np.asarray(rows, int)
        for page, mask in self._by_page(rows):
            page[rows[mask] & _IN_PAGE] = values[mask]

    def _by_page(self, rows: NDArray) -> list[tuple[NDArray, NDArray]]:
        numbers = rows >> _PAGE_BITS
        return [(self.pages[n], numbers == n) for n in np.unique(numbers).tolist()]


class Table:
    """Rows of a structured type; hands out row numbers and takes them back.

    It grows by pages, which cost memory only as they are filled and are never moved.

    Args:
        dtype: structured; its first field must not be negative in a row in use.
        columns: field name -> values, for rows 0, 1, ... in use from the start.
            Fields that are not named start as zero.
        num_rows: how many rows those are.

    Attributes:
        rows: whole rows, as structured values.
    """

    def __init__(
        self,
        dtype: np.dtype,
        columns: Mapping[str, NDArray] | None = None,
        num_rows: int = 0,
    ) -> None:
        self._dtype = dtype
        self.rows = Column(dtype)
        self._free = array("i")
        self._end = num_rows  # rows from here on have never been used
        names = dtype.names or ()
        self._columns = {name: Column(dtype[name]) for name in names}
        self._first = self._columns[names[0]]
        for start in range(0, num_rows, _PAGE_ROWS):
            self._add_page()
            size = min(num_rows - start, _PAGE_ROWS)
            for name, values in (columns or {}).items():
                self._columns[name].pages[-1][:size] = values[start : start + size]

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __len__(self) -> int:
        """Returns how many rows have ever been used."""
        return self._end

    def take(self, values: tuple) -> int:
        """Writes `values`, in the order of the fields, into a free row."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._end
            self._end += 1
            if row == len(self.rows.pages) << _PAGE_BITS:
                self._add_page()
        self.rows[row] = values
        return row

    def release(self, rows: list[int]) -> None:
        """Gives rows back; the first field of a free row reads -1."""
        self._first[rows] = -1
        self._free.extend(rows)

    def live_rows(self) -> NDArray[np.int64]:
        """Returns the numbers of the rows in use, ascending."""
        return np.flatnonzero(self._first[np.arange(self._end)] >= 0)

    def fill(self, name: str, value: ArrayLike) -> None:
        """Sets a field in all rows."""
        self._columns[name][np.arange(self._end)] = value

    def columns(self, rows: Rows) -> dict[str, NDArray]:
        """Returns the values of all fields in some rows."""
        return {name: column[rows] for name, column in self._columns.items()}

    def _add_page(self) -> None:
        # Zeros come from the system as they are touched, like empty memory.
        page = np.zeros(_PAGE_ROWS, self._dtype)
        self.rows.pages.append(page)
        for name, column in self._columns.items():
            column.pages.append(page[name])
