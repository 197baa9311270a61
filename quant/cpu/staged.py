"""Lookups of tables whose rows are fetched (`quant.rows.fetched`). A plan begins by finding row numbers; its
`Waiting` fetches each row of a table once into a staging table; the plan that this gives reads them there, by
the backend's kernels, beside the lookups of tables in memory. Of a raw id the row is fetched that it has if
it is there, and then the id that the row keeps is compared."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import (
    Ids,
    Lengths,
    Lookup,
    LookupKind,
    Place,
    Plan,
    Planner,
    Table,
    Unfound,
    Waiting,
    places_in,
)
from tableside.quant.cpu.address_space import BASE, MEMORY, offset_of
from tableside.quant.cpu.checked import check_ids, inputs_of, rows_of
from tableside.quant.cpu.index_builder import find_rows
from tableside.quant.errors import BadIds, Problem, RowsNotRead
from tableside.quant.rows.fetched import Fetch, FetchedTable, RowReader, RowState
from tableside.quant.rows.ids import ID_BYTES, RowMap

if TYPE_CHECKING:
    from tableside.quant.cpu.backend import CpuBackend

_FIELD = {name: n for n, name in enumerate(Place._fields)}
_OF_INPUTS = [_FIELD[name] for name in ("ids_at", "lengths_at", "weights_at")]
_OF_OUTPUTS = [_FIELD[name] for name in ("out_at", "found_at")]


def _numbers(table: FetchedTable, ids: Ids) -> Iterator[Ids]:
    """The rows that a lookup may read, and others that the table has not."""
    if (row_map := table.row_map) is None:
        yield ids
        return
    yield row_map.find(ids) if table.id_at < 0 else _candidates(row_map, ids)
    if row_map.default_row is not None:
        yield np.array([row_map.default_row])


def _candidates(row_map: RowMap, ids: Ids) -> Ids:
    """The row that each id has if it is there, or -1; an overlay's are sure."""
    assert row_map.index is not None
    rows = np.empty(ids.size, np.int64)
    find_rows(row_map.index, ids, rows)
    if row_map.overlay is not None:
        row_map.overlay.override(ids, rows)
    return rows


class _Found(NamedTuple):
    """The row numbers of a lookup of a fetched table. mask: of ids with a row of their own; None: all. ids:
    raw ones, to be compared with those that the rows keep: until then a row is what an id has if it is there,
    or -1."""

    table: FetchedTable
    rows: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    unfound: Unfound
    ids: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, table: FetchedTable, ids: Ids, lengths: Lengths | None, job: int) -> "_Found":
        """BadIds: as `rows_of`."""
        if table.id_at < 0:
            return cls(table, *rows_of(table, ids, lengths, job))
        check_ids(ids, lengths, -1, job)
        assert table.row_map is not None
        return cls(table, _candidates(table.row_map, ids), None, Unfound(0, 0), ids)

    @property
    def wanted(self) -> NDArray[np.int64]:
        """The rows to fetch: the last one, which is the default row, in place of none."""
        return self.rows if self.ids is None else np.where(self.rows == -1, self.table.rows - 1, self.rows)

    def settled(self, rows: "_FetchedRows", at: NDArray[np.int64], default_at: int, job: int) -> "_Found":
        """Once the rows are here. at: of each id, its row among them, which becomes default_at where it is
        missing. BadIds: it is, and is refused."""
        late = rows.is_late[at]
        if self.ids is None:
            row_map = self.table.row_map
            if row_map is not None and row_map.default_row is not None:
                late &= self.rows != row_map.default_row  # which is known
            if not late.any():
                return self
            mask = ~late if self.mask is None else self.mask & ~late
            return self._replace(mask=mask, unfound=self.unfound._replace(late=int(late.sum())))
        table, ids = self.table, self.ids
        row_map = table.row_map
        assert row_map is not None and row_map.index is not None
        id_bytes = rows.table.packed[:, table.id_at : table.id_at + ID_BYTES]
        is_own = (self.rows >= 0) & (self.rows < row_map.index.slots)
        late &= is_own
        kept = np.ascontiguousarray(id_bytes).view(np.int64)[at, 0]
        found = np.where(is_own, (kept == ids) & ~late, self.rows != -1)
        lacks = np.flatnonzero(~found & ~late)
        if lacks.size and row_map.default_row is None:
            raise BadIds(Problem.MISSING, job, int(lacks[0]), int(ids[lacks[0]]), row_map.count)
        at[lacks] = default_at
        backfilled = int(np.count_nonzero(row_map.is_backfilled(self.rows[found & is_own])))
        return self._replace(mask=found, unfound=Unfound(int(lacks.size), backfilled, int(late.sum())))


class _FetchedRows(NamedTuple):
    """Rows of a table, each once. table: of these alone, without a map; is_late: bool [rows], the default row
    stands for them."""

    table: Table
    is_late: NDArray[np.bool_]


class StagedPlanner(Planner):
    """Plans lookups of which some read fetched tables. backend: reads what was staged."""

    def __init__(self, backend: "CpuBackend", kinds: Sequence[Lookup | LookupKind], threads: int) -> None:
        self.backend, self.kinds, self.threads = backend, tuple(kinds), threads
        tables = [k.table.in_place if isinstance(k.table, FetchedTable) else k.table for k in kinds]
        self.in_place: Planner | None = None  # reads all rows where they lie in memory
        if None not in tables:
            of_kind = [
                LookupKind(table, kind.pooling, kind.precision)
                for table, kind in zip(tables, kinds, strict=True)
                if table is not None
            ]
            self.in_place = backend.planner(of_kind, threads)

    @property
    def waits(self) -> bool:
        return True

    def plan(self, places: Any, out_bytes: int = 0) -> Plan:
        return _StagedPlan(self, places)


class _StagedPlan(Plan):
    def __init__(self, planner: StagedPlanner, places: Any) -> None:
        self._planner, self._places = planner, places

    @property
    def waits(self) -> bool:
        return True

    def begin(self, inputs: Any) -> Plan | Waiting:
        if (in_place := self._planner.in_place) is not None and self._are_here(inputs):
            return in_place.plan(self._places)
        found: dict[int, _Found] = {}
        asked = [(self._planner.kinds[place.kind], place) for place in places_in(self._places)]
        wrong: BadIds | None = None
        for job, (kind, place) in enumerate(asked):
            if not isinstance(kind.table, FetchedTable):
                continue
            try:
                found[job] = _Found.of(kind.table, *inputs_of(kind, place, inputs), job)
            except BadIds as error:
                wrong = error
                break

        def refuse(error: BadIds) -> NoReturn:
            """The error names the first lookup that is wrong."""
            for before, (other, at) in enumerate(asked[: error.job]):
                if before not in found:
                    rows_of(other.table, *inputs_of(other, at, inputs), before)
            raise error

        if wrong is not None and all(one.ids is None for one in found.values()):
            refuse(wrong)
        return _Fetching(self._planner, self._places, found, wrong, refuse).ready()

    def _are_here(self, inputs: Any) -> bool:
        """Whether all rows of fetched tables may be read where they lie in memory; they may be missing, or
        wrong."""
        for place in places_in(self._places):
            table = self._planner.kinds[place.kind].table
            if isinstance(table, FetchedTable):
                are_here = table.reader.are_here
                ids = np.frombuffer(inputs, np.int64, place.ids, place.ids_at)
                if are_here is None or not all(map(are_here, _numbers(table, ids))):
                    return False
        return True

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Blocks until the rows are here. RowsNotRead: some do not come."""
        begun = self.begin(inputs)
        return (begun.wait() if isinstance(begun, Waiting) else begun).run(inputs, outputs)


class _Fetching(Waiting):
    """Rows of a request that must be fetched. found: by the lookup's number. wrong: a lookup behind them.
    refuse: raises an error, or that of a lookup before it. The time that its tables let a lookup wait begins
    here."""

    def __init__(
        self,
        planner: StagedPlanner,
        places: Any,
        found: Mapping[int, _Found],
        wrong: BadIds | None,
        refuse: Callable[[BadIds], NoReturn],
    ) -> None:
        self._planner, self._places, self._found = planner, places, found
        self._wrong, self._refuse = wrong, refuse
        self._tables = list({id(one.table): one.table for one in found.values()}.values())
        limits = [wait_s for table in self._tables if (wait_s := table.reader.wait_s) is not None]
        self._deadline = time.monotonic() + min(limits) if limits else None

    def ready(self) -> Plan | Waiting:
        """Returns the plan to run, where no row needs a wait."""
        if any(table.reader.ready is None for table in self._tables):
            return self
        try:
            return self._staged(lambda reader: reader.ready, None, is_last=False)
        except RowsNotRead:
            return self

    def wait(self, deadline: float | None = None) -> Plan:
        until = self._deadline if deadline is None else deadline
        return self._staged(lambda reader: reader.fetch, until, is_last=True)

    def _staged(
        self, how: Callable[[RowReader], Fetch | None], deadline: float | None, is_last: bool
    ) -> "_ReadPlan":
        """is_last: rows that do not come are late, and not asked for in another way."""
        staged: dict[int, Table] = {}  # by the table's id
        at: dict[int, NDArray[np.int64]] = {}
        found, wrong = dict(self._found), [] if self._wrong is None else [self._wrong]
        for table in self._tables:
            jobs = [job for job, one in found.items() if one.table is table]
            rows = [found[job].wanted for job in jobs]
            fetch = how(table.reader)
            assert fetch is not None
            needs_default = table.id_at >= 0 and any(one.size for one in rows)
            rows.append(np.full(int(needs_default), table.rows - 1))
            came, places = _fetched(table, np.concatenate(rows), fetch, deadline, is_last)
            staged[id(table)] = came.table
            ends = np.cumsum([one.size for one in rows])
            at |= zip(jobs, np.split(places, ends[:-1]), strict=False)
            for job in jobs:
                try:
                    default_at = int(places[-1]) if needs_default else -1
                    found[job] = found[job].settled(came, at[job], default_at, job)
                except BadIds as error:
                    wrong.append(error)
        if wrong:
            self._refuse(min(wrong, key=lambda error: error.job))
        return _ReadPlan(self._planner, self._places, found, staged, at)


class _ReadPlan(Plan):
    """Reads rows that were staged. staged: tables by the id of the fetched one. at: the staged row of each id
    of a lookup, by the lookup's number."""

    def __init__(
        self,
        planner: StagedPlanner,
        places: Any,
        found: Mapping[int, _Found],
        staged: Mapping[int, Table],
        at: Mapping[int, NDArray[np.int64]],
    ) -> None:
        self._found, self._at = found, at
        self._places = np.frombuffer(places, np.int64).reshape(-1, len(Place._fields)).copy()
        kinds = self._places[:, _FIELD["kind"]]
        used, kinds[:] = np.unique(kinds, return_inverse=True)
        of_kind = [
            LookupKind(staged.get(id(kind.table), kind.table), kind.pooling, kind.precision)
            for kind in (planner.kinds[number] for number in used.tolist())
        ]
        self._planner = planner.backend.planner(of_kind, planner.threads)

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        places = self._places.copy()
        for columns, start in ((_OF_INPUTS, offset_of(inputs)), (_OF_OUTPUTS, offset_of(outputs))):
            places[:, columns] += np.where(places[:, columns] >= 0, start, 0)
        for job, at in self._at.items():
            places[job, _FIELD["ids_at"]], places[job, _FIELD["found_at"]] = at.ctypes.data - BASE, -1
        read = self._planner.run(places.tobytes(), MEMORY, MEMORY)
        unfound = [Unfound(0, 0)] * len(places) if read is None else list(read)
        for job, one in self._found.items():
            unfound[job] = one.unfound
            if (found_at := int(self._places[job, _FIELD["found_at"]])) >= 0:
                mask = np.frombuffer(outputs, np.bool_, one.rows.size, found_at)
                mask[:] = True if one.mask is None else one.mask
        return unfound if any(map(any, unfound)) else None


def fetched(
    table: FetchedTable, rows: NDArray[np.int64], fetch: Fetch, deadline: float | None = None
) -> tuple[Table, NDArray[np.int64]]:
    """Fetches the rows [n] of a table, its own by `fetch`, and those of its overlay. Returns a table of each
    of them once, without a map, and the number there of each one. RowsNotRead: some are late or corrupt."""
    came, at = _fetched(table, rows, fetch, deadline, is_last=False)
    return came.table, at


def _fetched(
    table: FetchedTable, rows: NDArray[np.int64], fetch: Fetch, deadline: float | None, is_last: bool
) -> tuple[_FetchedRows, NDArray[np.int64]]:
    """As `fetched`. is_last: the default row stands for those that are late, if it may."""
    wanted, at = np.unique(rows, return_inverse=True)
    packed = np.empty((max(1, wanted.size), table.row_bytes), np.uint8)
    first, end = np.searchsorted(wanted, (0, table.rows)).tolist()
    state, is_late = np.zeros(end - first, np.uint8), np.zeros(packed.shape[0], np.bool_)
    if state.size:
        fetch(wanted[first:end], packed[first:end], state, deadline)
    if state.any():
        late, corrupt = (int(np.count_nonzero(state == s)) for s in (RowState.LATE, RowState.CORRUPT))
        default = table.reader.default if is_last else None
        if corrupt or default is None:
            raise RowsNotRead(state.size, late, corrupt)
        is_late[first:end] = state == RowState.LATE
        packed[is_late] = default
    if table.row_map is not None and table.row_map.overlay is not None and state.size < wanted.size:
        table.row_map.overlay.rows(wanted, packed[: wanted.size])
    read = Table(packed, table.row_format, table.dim)
    return _FetchedRows(read, is_late), at.reshape(-1).astype(np.int64, copy=False)
