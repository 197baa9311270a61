"""What lookups ask of fetched tables (`quant.rows.fetched`): row numbers, and the rows once they come."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Ids, Lengths, Table, Unfound
from tableside.quant.cpu.checked import check_ids, rows_of
from tableside.quant.cpu.in_memory import CopiedRows, distinct, kept_ids
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.errors import BadIds, Problem
from tableside.quant.rows.fetched import Fetch, FetchedTable, RowState, not_read


class Found(NamedTuple):
    """The row numbers of a lookup of a fetched table. mask: of ids with a row of their own; None: all. ids:
    raw ones, to be compared with those that the rows keep: until then a row is what an id has if it is there,
    or -1. late: mask of ids whose rows came late; None: none did."""

    table: FetchedTable
    rows: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    unfound: Unfound
    ids: NDArray[np.int64] | None = None
    late: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, table: FetchedTable, ids: Ids, lengths: Lengths | None, job: int) -> "Found":
        """BadIds: as `rows_of`."""
        if table.id_at < 0:
            rows, mask, unfound = rows_of(table, ids, lengths, job)
            return cls(table, rows if mask is None else np.where(mask, rows, -1), mask, unfound)
        check_ids(ids, lengths, -1, job)
        assert table.row_map is not None
        return cls(table, place_rows(table.row_map, ids)[0], None, Unfound(0, 0), ids)

    def settled(self, rows: "TableRows", at: Ids, job: int) -> tuple["Found", NDArray[np.bool_]]:
        """Once the rows are here: the same, and the mask of ids that get the default row behind them. at: of
        each id, its row among them. BadIds: an id is missing, and refused."""
        row_map, late, lacks = self.table.row_map, rows.is_late[at], self.rows == -1
        if self.ids is None:
            if not late.any():
                return self, lacks
            found = ~late if self.mask is None else self.mask & ~late
            missing = self.unfound.missing
        else:
            assert row_map is not None and row_map.index is not None
            is_own = (self.rows >= 0) & (self.rows < row_map.index.slots)
            late &= is_own
            found = np.where(is_own, (rows.kept_ids()[at] == self.ids) & ~late, self.rows != -1)
            lacks = ~found & ~late
            missing = int(np.count_nonzero(lacks))
            if missing and row_map.default_row is None:
                first = int(lacks.argmax())
                raise BadIds(Problem.MISSING, job, first, int(self.ids[first]), row_map.count)
        backfilled = 0 if row_map is None else int(row_map.is_backfilled(self.rows[found]).sum())
        unfound = Unfound(missing, backfilled, int(np.count_nonzero(late)))
        return self._replace(mask=found, unfound=unfound, late=late if unfound.late else None), lacks


class TableRows:
    """The rows of one table that lookups ask for, each once, and one more for the default row. at: of each
    lookup, the place here of each of its rows; is_late: mask of those for which the default row stands."""

    def __init__(self, table: FetchedTable, rows: Sequence[Ids]) -> None:
        """rows: of each lookup; -1: none."""
        self._table = table
        self._wanted, at = distinct(rows[0] if len(rows) == 1 else np.concatenate(rows))
        ends = list(accumulate(one.size for one in rows))
        self.at = [at[end - one.size : end] for one, end in zip(rows, ends, strict=True)]
        self._packed = np.zeros((self._wanted.size + 1, table.row_bytes), np.uint8)
        self._own = slice(*self._wanted.searchsorted((0, table.rows)).tolist())
        self._state = np.full(self._own.stop - self._own.start, RowState.LATE, np.uint8)
        self._is_left = np.ones(self._state.size, np.bool_)
        self.is_late = np.zeros(self._wanted.size + 1, np.bool_)
        self._has_default = False

    @property
    def table(self) -> Table:
        """These rows alone, without a map."""
        return Table(self._packed, self._table.row_format, self._table.dim)

    def kept_ids(self) -> Ids:
        """The id that each row keeps."""
        return kept_ids(self._packed, self._table.id_at)

    def take(self, copied: CopiedRows) -> None:
        """Takes rows that came, or that will not come."""
        at = self._wanted.searchsorted(copied.rows)
        is_new = self._state[at - self._own.start] != RowState.HERE  # another lookup may have had it
        at = at[is_new]
        self._packed[at] = copied.packed[is_new]
        at -= self._own.start
        self._state[at], self._is_left[at] = copied.state[is_new], False

    def ask(self) -> None:
        """Has the rows that are left brought, without a wait."""
        if self._table.reader.ask is not None:
            self._table.reader.ask(self._wanted[self._own][self._is_left])

    def fetch(self, fetch: Fetch, deadline: float | None, is_last: bool) -> None:
        """Fetches the rows that are left. is_last: the default row stands for rows that are late, if it is
        known. RowsNotRead: some are late or corrupt."""
        table, own, state = self._table, self._own, self._state
        left = np.flatnonzero(self._is_left)
        if 0 < left.size < state.size:
            at, came = own.start + left, np.zeros(left.size, np.uint8)
            packed = np.empty((left.size, table.row_bytes), np.uint8)
            fetch(self._wanted[at], packed, came, deadline)
            self._packed[at], state[left] = packed, came
        elif left.size:
            state[:] = RowState.HERE
            fetch(self._wanted[own], self._packed[own], state, deadline)
        self._is_left[left] = state[left] != RowState.HERE
        if state.any():
            error = not_read(state)
            may_stand = is_last and not error.corrupt
            default = table.reader.default() if may_stand and table.reader.default else None
            if default is None:
                raise error
            self.is_late[own] = state == RowState.LATE
            self._packed[self.is_late] = default
        if table.row_map is not None and state.size < self._wanted.size:
            table.row_map.copy_elsewhere(self._wanted, self._packed[:-1])

    def default_at(self, fetch: Fetch, deadline: float | None) -> int:
        """The place here of the default row. RowsNotRead: it is late or corrupt."""
        reader, row_map = self._table.reader, self._table.row_map
        if self._has_default:
            return len(self._packed) - 1
        default = None if reader.default is None else reader.default()
        if default is None:
            assert row_map is not None and row_map.default_row is not None
            default, state = np.empty(self._table.row_bytes, np.uint8), np.zeros(1, np.uint8)
            fetch(np.array([row_map.default_row]), default[None], state, deadline)
            if state[0]:
                raise not_read(state)
        self._packed[-1], self._has_default = default, True
        return len(self._packed) - 1


def fetched(table: FetchedTable, rows: Ids, fetch: Fetch, deadline: float | None = None) -> tuple[Table, Ids]:
    """Fetches the rows [n] of a table, its own by `fetch`, and those elsewhere. Returns a table of each
    of them once, without a map, and the number there of each one. RowsNotRead: some are late or corrupt."""
    came = TableRows(table, [rows])
    came.fetch(fetch, deadline, is_last=False)
    return came.table, came.at[0]
