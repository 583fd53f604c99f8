"""Columns of equal length that grow, and whose rows are used again."""

from array import array

import numpy as np
from numpy.typing import DTypeLike, NDArray

_FIRST_CAPACITY = 64
_GROWTH = 1.5


class Table:
    """A structured array that hands out row numbers and takes them back.

    Attributes:
        columns: field name -> its column, a view that is valid until the table grows.
    """

    def __init__(self, dtype: DTypeLike, num_rows: int = 0) -> None:
        self._rows = np.zeros(num_rows, dtype)
        self._end = num_rows  # rows from here on have never been used
        self._free = array("i")
        self._name_columns()

    def __getitem__(self, name: str) -> NDArray:
        return self.columns[name]

    def take(self, values: tuple) -> int:
        """Writes `values`, in the order of the fields, into a free row."""
        if self._free:
            row = self._free.pop()
        else:
            if self._end == len(self._rows):
                self._grow()
            row = self._end
            self._end += 1
        self._rows[row] = values
        return row

    def release(self, row: int) -> None:
        """Gives a row back; the first field of a free row reads -1."""
        self._first[row] = -1
        self._free.append(row)

    def live_rows(self) -> NDArray[np.int64]:
        """Returns the numbers of the rows in use, ascending."""
        return np.flatnonzero(self._first[: self._end] >= 0)

    def _grow(self) -> None:
        capacity = max(_FIRST_CAPACITY, int(len(self._rows) * _GROWTH))
        grown = np.empty(capacity, self._rows.dtype)
        grown[: self._end] = self._rows
        self._rows = grown
        self._name_columns()

    def _name_columns(self) -> None:
        names = self._rows.dtype.names or ()
        self.columns = {name: self._rows[name] for name in names}
        self._first = self.columns[names[0]]
