"""Packed rows by their ids, for who looks them up elsewhere."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Ids, Table
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.rows.ids import RowMap
from tableside.quant.rows.overlay import NO_ROW


def rows_with_ids(table: Table, ids: Ids) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Returns 1 for each id [n] that has a row of its own, else 0, and its row, or any."""
    # where an id without a row had the default row, it would look like any other
    row_map = replace(table.row_map or RowMap(table.rows), default_row=None)
    rows, _ = place_rows(row_map, ids)
    found = rows != NO_ROW
    if row_map.index is not None and row_map.index.slots:
        own = (rows >= 0) & (rows < table.rows)
        found[own] = row_map.index.ids[rows[own]] == ids[own]
    rows[~found] = 0
    return found.view(np.uint8), rows
