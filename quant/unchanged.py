"""Which rows of a table are the same in its successor: what a cache that outlives the table may keep."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Table
from tableside.quant.rows.ids import RowMap

_AT_ONCE_BYTES = 8 << 20  # of rows that are compared

Rows = NDArray[np.int64]


class Successors(NamedTuple):
    """rows: where the successor has the same ids, int64 [n]; -1: it lacks them. is_same: whether the bytes
    of those rows are equal, bool [n]."""

    rows: Rows
    is_same: NDArray[np.bool_]


def successors(old: Table, new: Table, rows: Rows) -> Successors:
    """Follows rows of a table, each named once, to the rows of the same ids in another table; no two lead to
    one.

    An id's own bytes in a row's padding are not compared. The default row, and a row that no id has, have no
    successor. Rows of another row format or dim are never the same.
    """
    there = np.full(rows.shape, -1, np.int64)
    is_same = np.zeros(rows.shape, np.bool_)
    alike = (old.row_format, old.dim) == (new.row_format, new.dim)
    used = old.row_format.used_bytes(old.dim)
    step = max(1, _AT_ONCE_BYTES // old.row_bytes)
    for start in range(0, rows.size, step):
        part = rows[start : start + step]
        ids, has_id = _map(old).ids_of(part)
        found = np.where(has_id, _map(new).find(ids), -1)
        there[start : start + step] = found
        if alike:
            at = np.flatnonzero(found >= 0)
            equal = (old.packed[part[at], :used] == new.packed[found[at], :used]).all(1)
            is_same[start : start + step][at] = equal
    return Successors(there, is_same)


def _map(table: Table) -> RowMap:
    """How the table's ids become rows, also where they are its row numbers."""
    return RowMap(table.rows) if table.row_map is None else table.row_map
