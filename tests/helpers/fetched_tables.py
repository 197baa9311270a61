"""Tables whose rows are fetched from an array in memory, which notes what it was asked for."""

import threading
from collections.abc import Mapping

import numpy as np

from tableside.quant import Table
from tableside.quant.rows.fetched import FetchedTable, RowReader, RowState


class FromArray:
    """Fetches rows of a table. states: of some rows, by their numbers. asked: the numbers of each call.
    is_open: set, else a call waits for it. away: rows that may not be read where they lie."""

    def __init__(self, table: Table, states: Mapping[int, RowState] | None = None) -> None:
        self.table, self.states = table, states or {}
        self.asked: list[list[int]] = []
        self.away: set[int] = set()
        self.is_open = threading.Event()
        self.is_open.set()

    def __call__(self, rows: np.ndarray, out: np.ndarray, state: np.ndarray, deadline: float | None) -> None:
        self.is_open.wait()
        assert out.shape == (rows.size, self.table.row_bytes) and not state.any()
        self.asked.append(rows.tolist())
        out[:] = self.table.packed[rows]
        state[:] = [self.states.get(row, RowState.HERE) for row in rows.tolist()]

    def are_here(self, rows: np.ndarray) -> bool:
        return self.away.isdisjoint(rows.tolist())


def fetched_table(table: Table, states: Mapping[int, RowState] | None = None) -> FetchedTable:
    """The same rows, fetched by a `FromArray`."""
    return table.fetched_by(RowReader(FromArray(table, states)))
