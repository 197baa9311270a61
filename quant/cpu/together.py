"""Lookups of tables whose rows are asked for by ids, those of all tables at once (`AskedTable`). A plan
splits the ids of its lookups by table and owner, each id once; its `Waiting` has the rows brought to one
buffer, in which the backend's kernels then read them. Other lookups of a request have a planner of their
own."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import (
    FIELD,
    MASK_LATE,
    Ids,
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
from tableside.quant.cpu import _native
from tableside.quant.cpu.address_space import BASE, MEMORY
from tableside.quant.cpu.checked import check_ids, inputs_of, rows_of
from tableside.quant.cpu.in_memory import places_in_memory
from tableside.quant.errors import BadIds, Problem
from tableside.quant.rows.fetched import AskedTable, RowsAsked, RowState, not_read
from tableside.quant.rows.ids import array_address

if TYPE_CHECKING:
    from tableside.quant.cpu.backend import CpuBackend

_ADDRESSES = 1 << 47  # bytes of the address space of a process


class TogetherPlanner(Planner):
    """Plans lookups of which some read tables that are fetched together."""

    waits = True

    def __init__(self, backend: "CpuBackend", kinds: Sequence[Lookup | LookupKind], threads: int) -> None:
        self.backend, self.kinds, self.threads = backend, tuple(kinds), threads
        asked = [kind.table for kind in kinds if isinstance(kind.table, AskedTable)]
        self.tables = list({id(table): table for table in asked}.values())
        self.call = self.tables[0].call
        numbers = {id(table): number for number, table in enumerate(self.tables)}
        self.table_of = np.array([numbers.get(id(kind.table), -1) for kind in kinds], np.int64)
        is_rest = self.table_of < 0
        self.number_of = np.where(is_rest, is_rest.cumsum(), (~is_rest).cumsum()) - 1  # among its like
        rest = [kind for kind, table in zip(kinds, self.table_of, strict=True) if table < 0]
        self.rest = backend.planner(rest, threads) if rest else None
        owners = [table.owners for table in self.tables]
        most = max(one.ends.size for one in owners)
        self.ends = np.array(
            [np.pad(one.ends, (0, most - one.ends.size), mode="edge") for one in owners], np.int64
        )
        self.shapes = np.array([(one.buckets, one.bucket_ids, 0) for one in owners], np.int64)
        self.row_bytes = np.array([table.row_bytes for table in self.tables], np.int64)
        # What reads rows anywhere in memory; without it each staging needs a reader of its own
        self.any_rows = self.reader([_all_memory(t) for t in self.tables]) if backend.reads_any_rows else None

    def reader(self, tables: Sequence[Table]) -> Planner:
        """Returns a planner that reads these tables by row numbers."""
        kinds = [
            LookupKind(tables[table], kind.pooling, kind.precision)
            for kind, table in zip(self.kinds, self.table_of.tolist(), strict=True)
            if table >= 0
        ]
        return self.backend.memory_planner(kinds, self.threads)

    def plan(self, places: Any, out_bytes: int = 0) -> Plan:
        return _TogetherPlan(self, places)


def _all_memory(table: AskedTable) -> Table:
    """A table of such rows from `BASE` on."""
    rows = _ADDRESSES // table.row_bytes
    packed = np.frombuffer(memoryview(MEMORY), np.uint8, rows * table.row_bytes).reshape(rows, -1)
    return Table(packed, table.row_format, table.dim)


class _TogetherPlan(Plan):
    """remote: numbers of the lookups of tables that are fetched together; rest: those of the others."""

    waits = True

    def __init__(self, planner: TogetherPlanner, places: Any) -> None:
        self.planner = planner
        self.places = np.frombuffer(places, np.int64).reshape(-1, len(Place._fields))
        kinds = self.places[:, FIELD["kind"]]
        self.table_of = planner.table_of[kinds]
        self.remote, self.rest = np.flatnonzero(self.table_of >= 0), np.flatnonzero(self.table_of < 0)
        self._rest: Plan | None = None
        if self.rest.size and planner.rest is not None:
            others = self.places[self.rest].copy()
            others[:, FIELD["kind"]] = planner.number_of[kinds[self.rest]]
            self._rest = planner.rest.plan(others.tobytes())

    def begin(self, inputs: Any) -> Plan | Waiting:
        if not self.remote.size and self._rest is not None:
            return self._rest.begin(inputs)
        return _RowsComing(self, inputs, *self._begin_rest(inputs))

    def _begin_rest(self, inputs: Any) -> tuple[Plan | Waiting | None, BadIds | None]:
        """Begins the other lookups; the error of one of them waits for those of earlier ones."""
        if self._rest is None:
            return None, None
        try:
            return self._rest.begin(inputs), None
        except BadIds as error:
            return None, renumbered(error, self.rest)

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Blocks until the rows are here. RowsNotRead: some do not come."""
        begun = self.begin(inputs)
        return (begun.wait() if isinstance(begun, Waiting) else begun).run(inputs, outputs)

    def refuse(self, error: BadIds, inputs: Any) -> NoReturn:
        """Raises an error, or that of a lookup before it."""
        for job, place in enumerate(places_in(self.places.tobytes())[: error.job + 1]):
            kind = self.planner.kinds[place.kind]
            ids, lengths = inputs_of(kind, place, inputs)
            if self.table_of[job] >= 0:
                check_ids(ids, lengths, -1, job)
            elif job < error.job:
                rows_of(kind.table, ids, lengths, job)
        raise error


def renumbered(error: BadIds, jobs: Ids) -> BadIds:
    """The error of a lookup among others. jobs: the number of each in the whole plan."""
    return BadIds(error.problem, int(jobs[error.job]), error.position, error.value, error.bound)


class _Staged(NamedTuple):
    """Room for the different rows of one table. number: of the table; start: of its ids among all different
    ones; first: the number that readers know row 0 by; rows: uint8 [ids, row_bytes]."""

    number: int
    start: int
    first: int
    rows: NDArray[np.uint8]


class _RowsComing(Waiting):
    """Ids of a request, split by owner. rest: the other lookups, begun; wrong: the error of one of them."""

    def __init__(
        self, plan: _TogetherPlan, inputs: Any, rest: Plan | Waiting | None, wrong: BadIds | None
    ) -> None:
        self._plan, self._inputs, self._rest, self._wrong = plan, inputs, rest, wrong
        planner = plan.planner
        self._deadline = time.monotonic() + min(table.wait_s for table in planner.tables)
        tables = plan.table_of[plan.remote]
        order = tables.argsort(kind="stable")
        self.jobs = plan.remote[order]  # those of one table one after another
        used, local = np.unique(tables[order], return_inverse=True)
        counts = plan.places[self.jobs, FIELD["ids"]]
        self.starts = np.concatenate(([0], counts.cumsum()))  # of each job's ids in `at`
        asked = np.stack((plan.places[self.jobs, FIELD["ids_at"]], counts, local), 1)
        # Room for as many rows as ids, and for one more, since readers count from a multiple of a row's bytes
        row_bytes = planner.row_bytes[used]
        sizes = row_bytes * (np.bincount(local, counts, used.size).astype(np.int64) + 1)
        ends = sizes.cumsum()
        self.staging = np.empty(int(ends[-1]), np.uint8)
        address = array_address(self.staging)
        shapes = planner.shapes[used]
        at = ends - sizes
        if planner.any_rows is not None:
            shapes[:, 2] = -(-(address + at - BASE) // row_bytes)
            at = BASE + shapes[:, 2] * row_bytes - address
        n = int(self.starts[-1])
        distinct, self.at = np.empty(n, np.int64), np.empty(n, np.int64)
        by_owner = np.empty((used.size, planner.ends.shape[1] + 1), np.int64)
        total = _native.split_ids(inputs, asked, shapes, planner.ends[used], distinct, self.at, by_owner)
        self.state = np.zeros(total, np.uint8)
        self.staged, self._asked, start = list[_Staged](), list[RowsAsked](), 0
        owner_ends = by_owner.cumsum(1).tolist()
        of_tables = used.tolist(), at.tolist(), shapes[:, 2].tolist(), owner_ends
        for number, begin, first, of_owners in zip(*of_tables, strict=True):
            table, end = planner.tables[number], start + of_owners[-1]
            rows = self.staging[begin : begin + (end - start) * table.row_bytes].reshape(-1, table.row_bytes)
            self.staged.append(_Staged(number, start, first, rows))
            asked_ids, state = distinct[start:end], self.state[start:end]
            self._asked.append(RowsAsked(table.name, asked_ids, of_owners, rows, state))
            start = end

    def wait(self, deadline: float | None = None) -> Plan:
        until = self._deadline if deadline is None else min(self._deadline, deadline)
        self._plan.planner.call(self._asked, until)
        rest = self._rest.wait(deadline) if isinstance(self._rest, Waiting) else self._rest
        unfound, flags = self._settle() if self.state.any() else ({}, None)
        if self._wrong is not None:
            self._plan.refuse(self._wrong, self._inputs)
        return _CamePlan(self._plan, self, rest, unfound, flags)

    def _settle(self) -> tuple[dict[int, Unfound], NDArray[np.uint8]]:
        """Puts default rows where rows are missing or late. Returns the counts of lookups, and the state of
        each id. RowsNotRead: rows are late, and nothing stands for them. BadIds: an id is missing, and
        refused."""
        for one in self.staged:
            self._fill(one)
        shifts = {one.number: one.start - one.first for one in self.staged}
        tables = self._plan.table_of[self.jobs].tolist()
        shift = np.repeat([shifts[table] for table in tables], np.diff(self.starts))
        flags = self.state[self.at + shift]
        unfound: dict[int, Unfound] = {}
        wrong = [] if self._wrong is None else [self._wrong]
        for n, (job, table) in enumerate(zip(self.jobs.tolist(), tables, strict=True)):
            of_job = flags[self.starts[n] : self.starts[n + 1]]
            counts = np.bincount(of_job, minlength=len(RowState)).tolist()
            unfound[job] = Unfound(counts[RowState.MISSING], 0, counts[RowState.LATE])
            if counts[RowState.MISSING] and self._plan.planner.tables[table].default is None:
                wrong.append(self._missing(job, table, int((of_job == RowState.MISSING).argmax())))
        if wrong:
            self._plan.refuse(min(wrong, key=lambda error: error.job), self._inputs)
        return unfound, flags

    def _fill(self, one: _Staged) -> None:
        state = self.state[one.start : one.start + len(one.rows)]
        if not state.any():
            return
        table, is_damaged = self._plan.planner.tables[one.number], bool((state == RowState.CORRUPT).any())
        may_be_late = table.default is not None and table.late_is_default
        if is_damaged or (not may_be_late and (state == RowState.LATE).any()):
            raise not_read(state)
        if table.default is not None:
            one.rows[state != RowState.HERE] = table.default

    def _missing(self, job: int, table: int, position: int) -> BadIds:
        place = Place(*self._plan.places[job].tolist())
        ids = np.frombuffer(self._inputs, np.int64, place.ids, place.ids_at)
        of = self._plan.planner.tables[table]
        problem = Problem.MISSING if of.owners.buckets else Problem.ID
        return BadIds(problem, job, position, int(ids[position]), of.rows)


def _tables(planner: TogetherPlanner, staged: Sequence[_Staged]) -> list[Table]:
    """Returns a planner's tables, with the rows that were staged, or one of zeros."""
    rows = {one.number: one.rows for one in staged if len(one.rows)}
    packed = [rows.get(n, np.zeros((1, t.row_bytes), np.uint8)) for n, t in enumerate(planner.tables)]
    return [Table(p, t.row_format, t.dim) for p, t in zip(packed, planner.tables, strict=True)]


class _CamePlan(Plan):
    """Reads rows that are here. rest: the other lookups; unfound: counts by lookup; flags: the state of each
    id; None: all rows are there."""

    def __init__(
        self,
        plan: _TogetherPlan,
        fetched: _RowsComing,
        rest: Plan | None,
        unfound: dict[int, Unfound],
        flags: NDArray[np.uint8] | None,
    ) -> None:
        self._plan, self._fetched, self._rest = plan, fetched, rest
        self._unfound, self._flags = unfound, flags
        self._reader = plan.planner.any_rows or plan.planner.reader(_tables(plan.planner, fetched.staged))

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        plan, fetched, wrong = self._plan, self._fetched, list[BadIds]()
        places = plan.places[fetched.jobs]
        found_at = places[:, FIELD["found_at"]].tolist()
        at = array_address(fetched.at) + 8 * fetched.starts[:-1]
        places[:, FIELD["kind"]] = plan.planner.number_of[places[:, FIELD["kind"]]]
        places[:, FIELD["found_at"]] = -1
        places = places_in_memory(places, inputs, outputs, at)
        order = fetched.jobs.argsort()
        try:
            self._reader.run(places[order].tobytes(), MEMORY, MEMORY)
        except BadIds as error:
            wrong.append(renumbered(error, plan.remote))
        unfound = [Unfound(0, 0)] * len(plan.places)
        try:
            of_rest = None if self._rest is None else self._rest.run(inputs, outputs)
            for job, counts in zip(plan.rest.tolist(), of_rest or (), strict=False):
                unfound[job] = counts
        except BadIds as error:
            wrong.append(renumbered(error, plan.rest))
        if wrong:
            raise min(wrong, key=lambda error: error.job)
        for n, (job, mask_at) in enumerate(zip(fetched.jobs.tolist(), found_at, strict=True)):
            unfound[job] = self._unfound.get(job, unfound[job])
            if mask_at >= 0:
                start, end = fetched.starts[n : n + 2].tolist()
                mask = np.frombuffer(outputs, np.uint8, end - start, mask_at)
                mask[:] = True if self._flags is None else self._flags[start:end] == RowState.HERE
                if self._flags is not None:
                    mask[self._flags[start:end] == RowState.LATE] = MASK_LATE
        return unfound if any(map(any, unfound)) else None
