"""Tables whose rows are fetched from an array in memory, which notes what it was asked for."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from tableside.quant import BadIds, Table
from tableside.quant.rows.fetched import FetchedTable, RowReader, RowState

BACKENDS = ("native", "fbgemm", "reference")


class FromArray:
    """Fetches rows of a table. states: of some rows, by their numbers. asked: the numbers of each call.
    is_open: set, else a call waits for it. absent: rows that may not be read where they lie; counted: how
    many were. slow: rows that need a wait; copied: the numbers of each call for those that do not."""

    def __init__(self, table: Table, states: Mapping[int, RowState] | None = None) -> None:
        self.table, self.states = table, states or {}
        self.asked: list[list[int]] = []
        self.absent: set[int] = set()
        self.slow: set[int] = set()
        self.counted: list[int] = []
        self.copied: list[list[int]] = []
        self.is_open = threading.Event()
        self.is_open.set()

    def __call__(self, rows: np.ndarray, out: np.ndarray, state: np.ndarray, deadline: float | None) -> None:
        self.is_open.wait()
        assert out.shape == (rows.size, self.table.row_bytes) and not state.any()
        self.asked.append(rows.tolist())
        out[:] = self.table.packed[rows]
        state[:] = [self.states.get(row, RowState.HERE) for row in rows.tolist()]

    def ready(self, rows: np.ndarray, out: np.ndarray, state: np.ndarray, deadline: float | None) -> None:
        assert out.shape == (rows.size, self.table.row_bytes) and (np.diff(rows) > 0).all()
        self.copied.append(rows.tolist())
        is_slow = np.isin(rows, [*self.slow])
        out[~is_slow], state[is_slow] = self.table.packed[rows[~is_slow]], RowState.LATE

    def away(self, rows: np.ndarray) -> np.ndarray:
        return np.flatnonzero([row in self.absent for row in rows.tolist()])


def fetched_table(table: Table, states: Mapping[int, RowState] | None = None) -> FetchedTable:
    """The same rows, fetched by a `FromArray`."""
    return table.fetched_by(RowReader(FromArray(table, states)))


def outcome(plan: Any, inputs: bytes, out_bytes: int) -> tuple[bytes | str, Any]:
    """Runs a plan: its output and `Unfound`, or what was wrong."""
    out = np.full(out_bytes, 0xEE, np.uint8)
    try:
        unfound = plan.run(inputs, out)
    except BadIds as error:
        return f"{error.problem} {error.job} {error.position} {error.value} {error.bound}", None
    return out.tobytes(), unfound
