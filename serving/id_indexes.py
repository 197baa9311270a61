"""The id indexes of a worker's tables: what they take of a GPU's memory, and the rows that two versions have of the same ids."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tableside.loader.stored import INDEX_UNIT_BYTES, StoredTable
from tableside.quant import Table
from tableside.quant.ids import ID_BYTES

_AT_ONCE = 1 << 20  # ids that are found at once


def index_bytes(table: StoredTable, rows_in_hbm: bool, copies_ids: bool = True) -> int:
    """HBM that the index of a table takes, 0 where it has none.

    Directory, pilots and bits are always copied. The id that is kept for each row is read in the row, where all rows are in HBM
    (`rows_in_hbm`) and have room for it; else it is copied, unless `copies_ids` is false and host memory is read.
    """
    if table.ids is None or (index := table.ids.index) is None:
        return 0
    ids = index.slots * ID_BYTES
    is_array = index.id_at < 0
    without_ids = index.bytes - (-(-ids // INDEX_UNIT_BYTES) * INDEX_UNIT_BYTES if is_array else 0)
    takes_ids = is_array if rows_in_hbm else copies_ids
    return without_ids + (ids if takes_ids else 0)


def with_copied_ids(tables: Iterable[StoredTable], budget_bytes: int) -> frozenset[str]:
    """The names of the tables, whose rows are not all in HBM, that have their ids copied there: the smallest first, as far as the
    budget goes."""
    names, left = [], budget_bytes
    for table in sorted(tables, key=lambda t: t.rows):
        left -= index_bytes(table, False) - index_bytes(table, False, copies_ids=False)
        if left >= 0:
            names.append(table.name)
    return frozenset(names)


def rows_of_same_ids(rows: NDArray[np.int64], old: Table, new: Table) -> NDArray[np.int64]:
    """The rows that `new` has of the ids of these rows of `old`, in their order; ids that it lacks are left out."""
    parts = [_found(_ids_of(old, rows[at : at + _AT_ONCE]), new) for at in range(0, rows.size, _AT_ONCE)]
    return np.concatenate(parts) if parts else rows


def _ids_of(table: Table, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of rows, but for the default row, which is the last one."""
    if (row_map := table.row_map) is None:
        return rows
    if row_map.index is not None:
        return row_map.index.ids[rows[rows < row_map.index.slots]]
    return rows[rows < row_map.count] + np.int64(row_map.first)


def _found(ids: NDArray[np.int64], table: Table) -> NDArray[np.int64]:
    rows = ids if table.row_map is None else table.row_map.find(ids)
    return rows[(rows >= 0) & (rows < table.rows)]
