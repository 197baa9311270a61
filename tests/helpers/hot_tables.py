"""Tables of which some rows lie at a second place, with other values there: these tell what a lookup read."""

from dataclasses import replace

import numpy as np

from tableside.quant import Table
from tableside.quant.rows.hot import HotRows, fill_hot, hot_words
from tableside.quant.rows.ids import ID_BYTES, RowMap, array_address, id_at


def with_hot(table: Table, rows: np.ndarray, memory: np.ndarray | None = None) -> Table:
    """A table with hot rows [n], ascending, each with the values of row 1 and its own id. memory: uint8, for
    one row more than these; None: some."""
    size, row_map = table.row_bytes, table.row_map or RowMap(table.rows)
    memory = np.zeros((rows.size + 1) * size, np.uint8) if memory is None else memory
    skipped = (table.address - array_address(memory)) % size
    packed = memory[skipped : skipped + rows.size * size].reshape(-1, size)
    packed[:] = table.packed[1]
    if row_map.index is not None:
        at = id_at(table.row_format, table.dim)
        packed[:, at : at + ID_BYTES] = table.packed[rows, at : at + ID_BYTES]
    marks = np.zeros((hot_words(table.rows), 2), np.uint64)
    fill_hot(rows, marks)
    first = (array_address(memory) + skipped - table.address) // size
    return replace(table, row_map=replace(row_map, hot=HotRows(marks, packed, first)))
