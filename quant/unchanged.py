"""Which rows of a table are the same in its successor: what a cache that outlives the table may keep."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Table

_AT_ONCE_BYTES = 8 << 20  # of rows that are compared

Rows = NDArray[np.int64]


class Successors(NamedTuple):
    """rows: where the successor has the same ids, int64 [n]; -1: it lacks them. is_same: the bytes of those rows are equal, bool
    [n]."""

    rows: Rows
    is_same: NDArray[np.bool_]


def successors(old: Table, new: Table, rows: Rows) -> Successors:
    """Follows rows of a table, each named once, to the rows of the same ids in another table; no two lead to one.

    An id's own bytes in a row's padding are not compared. The default row, and a row that no id has, have no successor. Rows of
    another row format or dim are never the same.
    """
    there = np.full(rows.shape, -1, np.int64)
    is_same = np.zeros(rows.shape, np.bool_)
    alike = (old.row_format, old.dim) == (new.row_format, new.dim)
    used = old.row_format.used_bytes(old.dim)
    step = max(1, _AT_ONCE_BYTES // old.row_bytes)
    for start in range(0, rows.size, step):
        part = rows[start : start + step]
        ids, has_id = _ids_of(old, part)
        found = np.where(has_id, _rows_of(new, ids), -1)
        there[start : start + step] = found
        if alike:
            at = np.flatnonzero(found >= 0)
            equal = (old.packed[part[at], :used] == new.packed[found[at], :used]).all(1)
            is_same[start : start + step][at] = equal
    return Successors(there, is_same)


def _ids_of(table: Table, rows: Rows) -> tuple[Rows, NDArray[np.bool_]]:
    """The ids of rows, and whether each has one."""
    row_map = table.row_map
    if row_map is None:
        return rows, (rows >= 0) & (rows < table.rows)
    if row_map.index is None:
        return rows + np.int64(row_map.first), (rows >= 0) & (rows < row_map.count)
    if not row_map.index.slots:
        return rows, np.zeros(rows.shape, np.bool_)
    ids = row_map.index.ids[np.clip(rows, 0, row_map.index.slots - 1)]
    return ids, row_map.index.places(ids) == rows  # a row that no id has keeps an id of another one


def _rows_of(table: Table, ids: Rows) -> Rows:
    """The row of each id; -1: the table lacks it."""
    if table.row_map is not None:
        return table.row_map.find(ids)
    return np.where((ids >= 0) & (ids < table.rows), ids, -1)
