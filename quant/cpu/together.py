"""Lookups of tables whose rows are asked for by ids, those of all tables at once (`AskedTable`). Who waits
splits the ids by owner and table, each id once, and has the rows brought to one buffer, in which the
backend's kernels then read them. Other lookups of a request have a planner of their own. What the places of
lookups say is kept, as clients repeat them."""

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
from tableside.quant.errors import BadIds, Problem
from tableside.quant.rows.fetched import AskedTable, RowsAsked, RowState, not_read
from tableside.quant.rows.ids import array_address

if TYPE_CHECKING:
    from tableside.quant.cpu.backend import CpuBackend, MemoryPlanner

_ADDRESSES = 1 << 47  # bytes of the address space of a process
_MOST_FORMS = 64  # that are kept
_ROOM = 16  # bytes around the rows of an owner, beside one for each (`RowsAsked`)


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
        self.ends = np.array([table.owners.ends for table in self.tables], np.int64)
        shapes = [_Shape.of(table, backend.reads_any_rows) for table in self.tables]
        self.shapes = np.array(shapes, np.int64)
        self.notes = [table.note for table in self.tables]
        self.has_notes = any(note is not None for note in self.notes)
        # What reads rows anywhere in memory; without it each staging needs a reader of its own
        self.any_rows = self.reader(list(map(_all_memory, self.tables))) if backend.reads_any_rows else None
        self._forms: dict[bytes, _Form] = {}

    def reader(self, tables: Sequence[Table]) -> "MemoryPlanner":
        """Returns a planner that reads these tables by row numbers."""
        kinds = [
            LookupKind(tables[table], kind.pooling, kind.precision)
            for kind, table in zip(self.kinds, self.table_of.tolist(), strict=True)
            if table >= 0
        ]
        return self.backend.memory_planner(kinds, self.threads)

    def plan(self, places: Any, out_bytes: int = 0) -> Plan:
        key = bytes(places)
        if (form := self._forms.get(key)) is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms = {}
            form = self._forms[key] = _Form(self, key)
        return _TogetherPlan(self, form)


class _Shape(NamedTuple):
    """What `_native.split_ids` is told of a table."""

    buckets: int
    bucket_ids: int
    row_bytes: int
    base: int
    marks: int = 0
    marked: int = 0
    first_hot: int = 0
    hot: int = 0

    @classmethod
    def of(cls, table: AskedTable, reads_any_rows: bool) -> "_Shape":
        """reads_any_rows: as of a backend; without it there are no hot rows."""
        base = _base(table) if reads_any_rows else -1
        shape = cls(table.owners.buckets, table.owners.bucket_ids, table.row_bytes, base)
        if table.hot is None or not reads_any_rows:
            return shape
        marks, _, slots, marked = table.hot.native
        first = (array_address(table.hot.packed) - base) // table.row_bytes
        return shape._replace(marks=marks, marked=marked, first_hot=first, hot=slots)


def _base(table: AskedTable) -> int:
    """The address from which rows are numbered, so that hot rows have numbers, too."""
    return BASE + (0 if table.hot is None else (array_address(table.hot.packed) - BASE) % table.row_bytes)


def _all_memory(table: AskedTable) -> Table:
    """A table of such rows from `_base` on."""
    rows = _ADDRESSES // table.row_bytes
    memory = np.frombuffer(memoryview(MEMORY), np.uint8, rows * table.row_bytes, _base(table) - BASE)
    return Table(memory.reshape(rows, -1), table.row_format, table.dim)


class _Form:
    """What the places of a request's lookups say. jobs: numbers of the lookups of tables that are fetched
    together, those of one table one after another; starts: of their ids among all of these, [jobs + 1];
    used: the numbers of these tables; local: which of them each job reads. rest: numbers of the other
    lookups, which `rest_plan` runs. The others are for `_native.split_ids` and for what reads the rows."""

    def __init__(self, planner: TogetherPlanner, places: bytes) -> None:
        self.places = np.frombuffer(places, np.int64).reshape(-1, len(Place._fields))
        kinds = self.places[:, FIELD["kind"]]
        self.table_of = planner.table_of[kinds]
        remote, self.rest = np.flatnonzero(self.table_of >= 0), np.flatnonzero(self.table_of < 0)
        self.rest_plan: Plan | None = None
        if self.rest.size and planner.rest is not None:
            others = self.places[self.rest].copy()
            others[:, FIELD["kind"]] = planner.number_of[kinds[self.rest]]
            self.rest_plan = planner.rest.plan(others.tobytes())
        self.jobs = remote[self.table_of[remote].argsort(kind="stable")]
        self.used, self.local = np.unique(self.table_of[self.jobs], return_inverse=True)
        counts = self.places[self.jobs, FIELD["ids"]]
        self.starts = np.concatenate(([0], counts.cumsum()))
        self.asked = np.stack((self.places[self.jobs, FIELD["ids_at"]], counts, self.local), 1)
        self.shapes, self.ends = planner.shapes[self.used], planner.ends[self.used]
        self.has_hot = bool(self.shapes[:, _Shape._fields.index("hot")].any())
        self.names = [planner.tables[table].name for table in self.used.tolist()]
        # As many rows as ids, and for each owner one more of each table, since readers count from a multiple
        groups, row_bytes = self.ends.shape[1] + 1, self.shapes[:, 2]
        self.room = int(counts @ row_bytes[self.local] + counts.sum() + groups * (row_bytes.sum() + _ROOM))
        # In the order of lookups, without masks
        self.order = self.jobs.argsort()
        self.read_places = self.places[remote]
        self.read_places[:, FIELD["kind"]] = planner.number_of[kinds[remote]]
        self.read_places[:, FIELD["found_at"]] = -1
        masks = enumerate(self.places[self.jobs, FIELD["found_at"]].tolist())
        self.masks = [(n, found_at) for n, found_at in masks if found_at >= 0]


class _TogetherPlan(Plan):
    def __init__(self, planner: TogetherPlanner, form: _Form) -> None:
        self.planner, self.form = planner, form
        rest, asks = form.rest_plan, bool(form.jobs.size)
        self.waits = asks or (rest is not None and rest.waits)
        self.begins_at_once = asks and not (form.has_hot or planner.has_notes)

    def run_at_once(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        rest = None if self.form.jobs.size else self.form.rest_plan
        return None if rest is None else rest.run_at_once(inputs, outputs)

    def begin(self, inputs: Any) -> Plan | Waiting:
        if not self.form.jobs.size and self.form.rest_plan is not None:
            return self.form.rest_plan.begin(inputs)
        is_due: bool | None = None
        for ids_at, count, local in self.form.asked.tolist() if self.planner.has_notes else ():
            if (note := self.planner.notes[self.form.used[local]]) is None:
                continue
            if not (is_due := note(np.frombuffer(inputs, np.int64, count, ids_at), is_due)):
                break
        coming = _RowsComing(self, inputs)
        return coming.here() if self.form.has_hot else coming

    def begin_rest(self, inputs: Any) -> tuple[Plan | Waiting | None, BadIds | None]:
        """Begins the other lookups; the error of one of them waits for those of earlier ones."""
        if self.form.rest_plan is None:
            return None, None
        try:
            return self.form.rest_plan.begin(inputs), None
        except BadIds as error:
            return None, renumbered(error, self.form.rest)

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Blocks until the rows are here. RowsNotRead: some do not come."""
        begun = self.begin(inputs)
        return (begun.wait() if isinstance(begun, Waiting) else begun).run(inputs, outputs)

    def refuse(self, error: BadIds, inputs: Any) -> NoReturn:
        """Raises an error, or that of a lookup before it."""
        for job, place in enumerate(places_in(self.form.places)[: error.job + 1]):
            kind = self.planner.kinds[place.kind]
            ids, lengths = inputs_of(kind, place, inputs)
            if self.form.table_of[job] >= 0:
                check_ids(ids, lengths, -1, job)
            elif job < error.job:
                rows_of(kind.table, ids, lengths, job)
        raise error


def renumbered(error: BadIds, jobs: Ids | Sequence[int]) -> BadIds:
    """The error of a lookup among others. jobs: the number of each in the whole plan."""
    return BadIds(error.problem, int(jobs[error.job]), error.position, error.value, error.bound)


class _RowsComing(Waiting):
    """A request whose ids are split by who waits. Set then: asked, the different ids; at, int64 [ids], the
    number of each one's row, for what reads them; firsts, int64 [tables, owners + 1], that of the first row
    of each of `asked.counts`."""

    asked: RowsAsked
    at: Ids
    firsts: NDArray[np.int64]

    def __init__(self, plan: _TogetherPlan, inputs: Any) -> None:
        self._plan, self._inputs = plan, inputs
        self._deadline = time.monotonic() + min(table.wait_s for table in plan.planner.tables)
        self._wrong: BadIds | None = None  # the error of one of the other lookups
        self._is_split = False

    def here(self) -> Plan | Waiting:
        """Returns the plan to run where all rows are hot, and the other lookups wait for nothing; else
        itself."""
        self._split()
        if self.asked.ids.size or (self._plan.form.rest_plan is not None and self._plan.form.rest_plan.waits):
            return self
        return self.wait()

    def wait(self, deadline: float | None = None) -> Plan:
        until = self._deadline if deadline is None else min(self._deadline, deadline)
        rest, self._wrong = self._plan.begin_rest(self._inputs)
        if not self._is_split:
            self._split()
        if self.asked.ids.size:
            self._plan.planner.call(self.asked, until)
        rest = rest.wait(deadline) if isinstance(rest, Waiting) else rest
        unfound, flags = self._settle() if self.asked.state.any() else ({}, None)
        if self._wrong is not None:
            self._plan.refuse(self._wrong, self._inputs)
        return _CamePlan(self._plan, self, rest, unfound, flags)

    def _split(self) -> None:
        form = self._plan.form
        n, groups = int(form.starts[-1]), form.ends.shape[1] + 1
        out = np.empty(form.room, np.uint8)
        distinct, self.at = np.empty(n, np.int64), np.empty(n, np.int64)
        blocks, self._is_split = np.empty((3, form.used.size, groups), np.int64), True
        given = form.asked, form.shapes, form.ends, distinct, self.at, blocks, out
        total = _native.split_ids(self._inputs, *given)
        counts, at, self.firsts = blocks
        state = np.zeros(total, np.uint8)
        row_bytes = form.shapes[:, 2]
        self.asked = RowsAsked(form.names, row_bytes, distinct[:total], counts, at, out, state)

    def _settle(self) -> tuple[dict[int, Unfound], NDArray[np.uint8]]:
        """Puts default rows where rows are missing or late. Returns the counts of lookups, and the state of
        each id. RowsNotRead: rows are late, and nothing stands for them. BadIds: an id is missing, and
        refused."""
        form, tables = self._plan.form, self._plan.planner.tables
        for n, number in enumerate(form.used.tolist()):
            self._fill(n, tables[number])
        shifts, flags = self.asked.starts - self.firsts, np.empty(self.at.size, np.uint8)
        unfound: dict[int, Unfound] = {}
        wrong = [] if self._wrong is None else [self._wrong]
        for n, (job, table) in enumerate(zip(form.jobs.tolist(), form.local.tolist(), strict=True)):
            of_job = slice(form.starts[n], form.starts[n + 1])
            flags[of_job] = self._flags(self.at[of_job], table, shifts)
            counts = np.bincount(flags[of_job], minlength=len(RowState)).tolist()
            unfound[job] = Unfound(counts[RowState.MISSING], 0, counts[RowState.LATE])
            if counts[RowState.MISSING] and tables[form.used[table]].default is None:
                first = int((flags[of_job] == RowState.MISSING).argmax())
                wrong.append(self._missing(job, tables[form.used[table]], first))
        if wrong:
            self._plan.refuse(min(wrong, key=lambda error: error.job), self._inputs)
        return unfound, flags

    def _flags(self, at: Ids, table: int, shifts: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The state of rows by their numbers. shifts: [tables, owners + 1], to places in `asked`."""
        shape = _Shape(*self._plan.form.shapes[table].tolist())
        flags = np.full(at.size, RowState.HERE, np.uint8)
        came = (at < shape.first_hot) | (at >= shape.first_hot + shape.hot)
        owner = self.firsts[table].searchsorted(at[came], "right") - 1
        flags[came] = self.asked.state[at[came] + shifts[table, owner]]
        return flags

    def _fill(self, n: int, table: AskedTable) -> None:
        may_be_late = table.default is not None and table.late_is_default
        for ids, rows in self.asked.blocks(n):
            state = self.asked.state[ids]
            if not state.any():
                continue
            is_damaged = bool((state == RowState.CORRUPT).any())
            if is_damaged or (not may_be_late and (state == RowState.LATE).any()):
                raise not_read(np.concatenate([self.asked.state[ids] for ids, _ in self.asked.blocks(n)]))
            if table.default is not None:
                rows[state != RowState.HERE] = table.default

    def _missing(self, job: int, table: AskedTable, position: int) -> BadIds:
        place = Place(*self._plan.form.places[job].tolist())
        ids = np.frombuffer(self._inputs, np.int64, place.ids, place.ids_at)
        problem = Problem.MISSING if table.owners.buckets else Problem.ID
        return BadIds(problem, job, position, int(ids[position]), table.rows)


def _tables(plan: _TogetherPlan, asked: RowsAsked) -> list[Table]:
    """Returns a planner's tables, with the rows that were asked for, or one of zeros."""
    packed = [np.zeros((1, table.row_bytes), np.uint8) for table in plan.planner.tables]
    for n, number in enumerate(plan.form.used.tolist()):
        if asked.counts[n].any():
            packed[number] = np.concatenate([rows for _, rows in asked.blocks(n)])
    return [Table(p, t.row_format, t.dim) for p, t in zip(packed, plan.planner.tables, strict=True)]


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
        self._reader = plan.planner.any_rows or plan.planner.reader(_tables(plan, fetched.asked))

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        form, wrong = self._plan.form, list[BadIds]()
        at = array_address(self._fetched.at) + 8 * form.starts[form.order]
        try:
            self._reader.run_rows(form.read_places, inputs, outputs, at)
        except BadIds as error:
            wrong.append(renumbered(error, form.jobs[form.order]))
        of_rest: Sequence[Unfound] | None = None
        try:
            of_rest = None if self._rest is None else self._rest.run(inputs, outputs)
        except BadIds as error:
            wrong.append(renumbered(error, form.rest))
        if wrong:
            raise min(wrong, key=lambda error: error.job)
        for n, mask_at in form.masks:
            self._write_mask(int(form.starts[n]), int(form.starts[n + 1]), outputs, mask_at)
        if of_rest is None and not self._unfound:
            return None
        unfound = [self._unfound.get(job, Unfound(0, 0)) for job in range(len(form.places))]
        for job, counts in zip(form.rest.tolist(), of_rest or (), strict=False):
            unfound[job] = counts
        return unfound if any(map(any, unfound)) else None

    def _write_mask(self, start: int, end: int, outputs: Any, mask_at: int) -> None:
        mask = np.frombuffer(outputs, np.uint8, end - start, mask_at)
        mask[:] = True if self._flags is None else self._flags[start:end] == RowState.HERE
        if self._flags is not None:
            mask[self._flags[start:end] == RowState.LATE] = MASK_LATE
