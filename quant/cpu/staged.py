"""Lookups of tables whose rows are fetched (`quant.rows.fetched`). A plan begins by finding row numbers; its
`Waiting` fetches each row of a table once into a staging table; the plan that this gives reads them there, by
the backend's kernels, beside the lookups of tables in memory. Of a raw id the row is fetched that it has if
it is there, and then the id that the row keeps is compared."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import (
    MASK_LATE,
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
from tableside.quant.cpu.address_space import MEMORY
from tableside.quant.cpu.checked import check_ids, inputs_of, rows_of
from tableside.quant.cpu.in_memory import FIELD, CopiedRows, How, InMemory, distinct, places_in_memory
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.errors import BadIds, Problem, RowsNotRead
from tableside.quant.rows.fetched import Fetch, FetchedTable, RowState, not_read
from tableside.quant.rows.ids import ID_BYTES, RowMap

if TYPE_CHECKING:
    from tableside.quant.cpu.backend import CpuBackend

_FEW_ROWS = 16  # that are copied in a moment
_READY, _FETCH = attrgetter("ready"), attrgetter("fetch")
_ANY_ROWS = 1 << 62


def _candidates(row_map: RowMap, ids: Ids) -> Ids:
    """The row that each id has if it is there, or -1; an overlay's are sure."""
    rows = np.empty(ids.size, np.int64)
    place_rows(row_map, ids, rows)
    return rows


class _Found(NamedTuple):
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
    def of(cls, table: FetchedTable, ids: Ids, lengths: Lengths | None, job: int) -> "_Found":
        """BadIds: as `rows_of`."""
        if table.id_at < 0:
            rows, mask, unfound = rows_of(table, ids, lengths, job)
            return cls(table, rows if mask is None else np.where(mask, rows, -1), mask, unfound)
        check_ids(ids, lengths, -1, job)
        assert table.row_map is not None
        return cls(table, _candidates(table.row_map, ids), None, Unfound(0, 0), ids)

    def settled(self, rows: "_TableRows", at: Ids, job: int) -> tuple["_Found", NDArray[np.bool_]]:
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


class _TableRows:
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
        at = self._table.id_at
        return np.ascontiguousarray(self._packed[:, at : at + ID_BYTES]).view(np.int64)[:, 0]

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
        if table.row_map is not None and table.row_map.overlay is not None and state.size < self._wanted.size:
            table.row_map.overlay.rows(self._wanted, self._packed[:-1])

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


class StagedPlanner(Planner):
    """Plans lookups of which some read fetched tables. backend: reads what was staged."""

    waits = True

    def __init__(self, backend: "CpuBackend", kinds: Sequence[Lookup | LookupKind], threads: int) -> None:
        self.backend, self.kinds, self.threads = backend, tuple(kinds), threads
        tables = [k.table.in_place if isinstance(k.table, FetchedTable) else k.table for k in kinds]
        held = [table for table in tables if isinstance(table, Table)]
        self.in_memory = InMemory(backend, kinds, held, threads) if len(held) == len(tables) else None

    def plan(self, places: Any, out_bytes: int = 0) -> Plan:
        return _StagedPlan(self, places)


class _StagedPlan(Plan):
    waits = True

    def __init__(self, planner: StagedPlanner, places: Any) -> None:
        self._planner, self._places = planner, places
        self._asked = [(planner.kinds[place.kind], place) for place in places_in(places)]

    def begin(self, inputs: Any) -> Plan | Waiting:
        self._note(inputs)
        here, copied = self.in_memory(inputs, _FEW_ROWS)
        if here is not None:
            return here
        later = _Later(self, inputs, may_be_here=not copied)
        is_few = sum(place.ids for _, place in self._asked) <= _FEW_ROWS
        return later.fetched() if is_few and not copied else later

    def _note(self, inputs: Any) -> None:
        for kind, place in self._asked:
            if isinstance(kind.table, FetchedTable) and (note := kind.table.reader.note) is not None:
                note(np.frombuffer(inputs, np.int64, place.ids, place.ids_at))

    def in_memory(
        self, inputs: Any, most: int = _ANY_ROWS, how: How = _READY, deadline: float | None = None
    ) -> tuple[Plan | None, Sequence[CopiedRows]]:
        """As `InMemory.plan`."""
        if (in_memory := self._planner.in_memory) is None:
            return None, ()
        return in_memory.plan(self._asked, self._places, inputs, most, how, deadline)

    def tables(self) -> "Sequence[FetchedTable]":
        return [kind.table for kind, _ in self._asked if isinstance(kind.table, FetchedTable)]

    def fetching(self, inputs: Any, copied: Sequence[CopiedRows]) -> "_Fetching":
        """Finds the rows. BadIds: an id or a length is wrong."""
        found: dict[int, _Found] = {}
        wrong: BadIds | None = None
        for job, (kind, place) in enumerate(self._asked):
            if not isinstance(kind.table, FetchedTable):
                continue
            try:
                found[job] = _Found.of(kind.table, *inputs_of(kind, place, inputs), job)
            except BadIds as error:
                wrong = error
                break

        refuse = partial(_refuse, self._asked, found, inputs)
        if wrong is not None and all(one.ids is None for one in found.values()):
            refuse(wrong)
        return _Fetching(self._planner, self._places, found, wrong, refuse, copied)

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Blocks until the rows are here. RowsNotRead: some do not come."""
        self._note(inputs)
        return _Later(self, inputs).wait().run(inputs, outputs)


def _refuse(
    asked: Sequence[tuple[Lookup | LookupKind, Place]],
    found: Mapping[int, _Found],
    inputs: Any,
    error: BadIds,
) -> NoReturn:
    """Raises an error, or that of a lookup before it. found: lookups of `asked` whose rows are known."""
    for job, (kind, place) in enumerate(asked[: error.job]):
        if job not in found:
            rows_of(kind.table, *inputs_of(kind, place, inputs), job)
    raise error


class _Later(Waiting):
    """A request whose rows are found by who has time for that. The time that its tables let a lookup wait
    begins here."""

    def __init__(self, plan: _StagedPlan, inputs: Any, may_be_here: bool = True) -> None:
        self._plan, self._inputs, self._began = plan, inputs, time.monotonic()
        self._fetching: _Fetching | None = None  # the rows that came stay
        self.may_be_here = may_be_here

    def look(self) -> Plan | Waiting:
        here, copied = self._plan.in_memory(self._inputs)
        if here is not None:
            return here
        self.may_be_here = False
        return self if copied else self.fetched()

    def fetched(self) -> Plan | Waiting:
        """As `look`, of rows that are away from a mapping, or have none."""
        self.may_be_here = False
        self._fetching = self._plan.fetching(self._inputs, ())
        return self._fetching.ready() or self

    def wait(self, deadline: float | None = None) -> Plan:
        limits = [s for table in self._plan.tables() if (s := table.reader.wait_s) is not None]
        own = self._began + min(limits) if limits else None
        until = min((d for d in (own, deadline) if d is not None), default=None)
        if self._fetching is not None:
            return self._fetching.wait(until)
        here, copied = self._plan.in_memory(self._inputs, how=_FETCH, deadline=until)
        return self._plan.fetching(self._inputs, copied).wait(until) if here is None else here


class _Fetching:
    """Rows of a request that must be fetched. found: by the lookup's number. wrong: a lookup behind them.
    refuse: raises an error, or that of a lookup before it. copied: what was fetched already."""

    def __init__(
        self,
        planner: StagedPlanner,
        places: Any,
        found: Mapping[int, _Found],
        wrong: BadIds | None,
        refuse: Callable[[BadIds], NoReturn],
        copied: Sequence[CopiedRows],
    ) -> None:
        self._planner, self._places, self._found = planner, places, found
        self._wrong, self._refuse = wrong, refuse
        self._tables = list({id(one.table): one.table for one in found.values()}.values())
        self._jobs = {id(t): [job for job, one in found.items() if one.table is t] for t in self._tables}
        self._rows = {
            id(t): _TableRows(t, [found[job].rows for job in self._jobs[id(t)]]) for t in self._tables
        }
        for one in copied:
            self._rows[id(one.table)].take(one)

    def ready(self) -> Plan | None:
        """Returns the plan to run, where no row needs a wait; else None."""
        if any(table.reader.ready is None for table in self._tables):
            return None
        try:
            return self._staged(_READY, None, is_last=False)
        except RowsNotRead:
            return None

    def wait(self, deadline: float | None) -> Plan:
        """Blocks. RowsNotRead: rows do not come."""
        return self._staged(_FETCH, deadline, is_last=True)

    def _staged(self, how: How, deadline: float | None, is_last: bool) -> "_ReadPlan":
        """is_last: rows that do not come are late, and not asked for in another way."""
        at: dict[int, Ids] = {}
        found, wrong = dict(self._found), [] if self._wrong is None else [self._wrong]
        if is_last and len(self._rows) > 1:
            for one in self._rows.values():  # so that no table waits for those before it
                one.ask()
        for table in self._tables:
            fetch, came = how(table.reader), self._rows[id(table)]
            assert fetch is not None
            came.fetch(fetch, deadline, is_last)
            for job, places in zip(self._jobs[id(table)], came.at, strict=True):
                try:
                    found[job], lacks = found[job].settled(came, places, job)
                except BadIds as error:
                    wrong.append(error)
                    continue
                if lacks.any():
                    places = np.where(lacks, came.default_at(fetch, deadline), places)
                at[job] = places
        if wrong:
            self._refuse(min(wrong, key=lambda error: error.job))
        return _ReadPlan(
            self._planner, self._places, found, {n: one.table for n, one in self._rows.items()}, at
        )


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
        kinds = self._places[:, FIELD["kind"]].tolist()
        used = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
        self._places[:, FIELD["kind"]] = [used[kind] for kind in kinds]
        of_kind = [
            LookupKind(staged.get(id(kind.table), kind.table), kind.pooling, kind.precision)
            for kind in (planner.kinds[number] for number in used)
        ]
        self._planner = planner.backend.planner(of_kind, planner.threads)

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        places = places_in_memory(self._places, inputs, outputs, self._at)
        places[list(self._at), FIELD["found_at"]] = -1
        read = self._planner.run(places.tobytes(), MEMORY, MEMORY)
        unfound = [Unfound(0, 0)] * len(places) if read is None else list(read)
        for job, one in self._found.items():
            unfound[job] = one.unfound
            if (found_at := int(self._places[job, FIELD["found_at"]])) >= 0:
                mask = np.frombuffer(outputs, np.uint8, one.rows.size, found_at)
                mask[:] = True if one.mask is None else one.mask
                if one.late is not None:
                    mask[one.late] = MASK_LATE
        return unfound if any(map(any, unfound)) else None


def fetched(table: FetchedTable, rows: Ids, fetch: Fetch, deadline: float | None = None) -> tuple[Table, Ids]:
    """Fetches the rows [n] of a table, its own by `fetch`, and those of its overlay. Returns a table of each
    of them once, without a map, and the number there of each one. RowsNotRead: some are late or corrupt."""
    came = _TableRows(table, [rows])
    came.fetch(fetch, deadline, is_last=False)
    return came.table, came.at[0]
