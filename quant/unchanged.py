"""Finds rows that are equal in a table's successor: a cache that outlives the table may keep them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Table
from tableside.quant.rows.ids import RowMap

_AT_ONCE_BYTES = 8 << 20  # of rows that are compared

Rows = NDArray[np.int64]


class Successors(NamedTuple):
    """rows: row of the same id in the successor, int64 [n]; -1: none. is_same: the bytes are equal, bool
    [n]."""

    rows: Rows
    is_same: NDArray[np.bool_]


def successors(old: Table, new: Table, rows: Rows) -> Successors:
    """Maps distinct rows of a table to the rows of the same ids in another; injective.
    Ignores an id's bytes in the padding. The default row and rows without an id have no successor. Rows of
    other formats or dims are never the same."""
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
    """Returns the table's row map; an identity map if ids are row numbers."""
    return RowMap(table.rows) if table.row_map is None else table.row_map
