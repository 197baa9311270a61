"""Packed rows by their ids, for who looks them up elsewhere."""

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Ids, Table
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.rows.ids import RowMap


def rows_with_ids(table: Table, ids: Ids) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Returns 1 for each id [n] that has a row of its own, else 0, and its row, or any. The table has no
    overlay."""
    row_map, rows = table.row_map or RowMap(table.rows), np.empty(ids.size, np.int64)
    place_rows(row_map, ids, rows)
    found = rows >= 0
    rows[~found] = 0
    if row_map.index is not None and row_map.index.slots:
        found &= row_map.index.ids[rows] == ids
    return found.view(np.uint8), rows
