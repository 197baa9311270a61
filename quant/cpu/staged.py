"""Lookups of tables whose rows are fetched (`quant.rows.fetched`). A plan begins by finding row numbers; its
`Waiting` fetches each row of a table once into a staging table; the plan that this gives reads them there, by
the backend's kernels, beside the lookups of tables in memory. Of a raw id the row is fetched that it has if
it is there, and then the id that the row keeps is compared."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

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
from tableside.quant.cpu.checked import inputs_of, rows_of
from tableside.quant.cpu.in_memory import WHICH_IDS, CopiedRows, How, InMemory, addresses
from tableside.quant.cpu.staged_rows import Found, TableRows
from tableside.quant.errors import BadIds, RowsNotRead
from tableside.quant.rows.fetched import FetchedTable

if TYPE_CHECKING:
    from tableside.quant.cpu.backend import CpuBackend

_FEW_ROWS = 16  # that are copied in a moment
_READY, _FETCH = attrgetter("ready"), attrgetter("fetch")
_ANY_ROWS = 1 << 62


class StagedPlanner(Planner):
    """Plans lookups of which some read fetched tables. backend: reads what was staged."""

    waits = True

    def __init__(self, backend: "CpuBackend", kinds: Sequence[Lookup | LookupKind], threads: int) -> None:
        self.backend, self.kinds, self.threads = backend, tuple(kinds), threads
        tables = [k.table.in_place if isinstance(k.table, FetchedTable) else k.table for k in kinds]
        held = [table for table in tables if isinstance(table, Table)]
        self.in_memory = InMemory(backend, kinds, held, threads) if len(held) == len(tables) else None
        self.is_fetched = np.array([isinstance(kind.table, FetchedTable) for kind in kinds])
        self.all_fetched = bool(self.is_fetched.all())
        readers = [k.table.reader if isinstance(k.table, FetchedTable) else None for k in kinds]
        self.notes = [None if reader is None else reader.note for reader in readers]
        self.has_notes = any(note is not None for note in self.notes)

    def plan(self, places: Any, out_bytes: int = 0) -> Plan:
        return _StagedPlan(self, places)


class _StagedPlan(Plan):
    def __init__(self, planner: StagedPlanner, places: Any) -> None:
        self._planner = planner
        self._places = np.frombuffer(places, np.int64).reshape(-1, len(Place._fields))
        self.waits = planner.all_fetched or bool(planner.is_fetched[self._places[:, FIELD["kind"]]].any())

    @cached_property
    def _asked(self) -> list[tuple[Lookup | LookupKind, Place]]:
        return [(self._planner.kinds[place.kind], place) for place in places_in(self._places)]

    def run_at_once(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        if (in_memory := self._planner.in_memory) is None:
            return None
        if (found := in_memory.run_in_layers(self._places, inputs, outputs)) is not None:
            self._note(inputs)
        return found

    def begin(self, inputs: Any) -> Plan | Waiting:
        self._note(inputs)
        here, copied = self.in_memory(inputs, _FEW_ROWS)
        if here is not None:
            return here
        later = _Later(self, inputs, may_be_here=not copied)
        is_few = self._places[:, FIELD["ids"]].sum() <= _FEW_ROWS
        return later.fetched() if is_few and not copied else later

    def _note(self, inputs: Any) -> None:
        if not self._planner.has_notes:
            return
        is_due: bool | None = None
        for kind, ids_at, count in self._places[:, WHICH_IDS].tolist():
            if (note := self._planner.notes[kind]) is None:
                continue
            if not (is_due := note(np.frombuffer(inputs, np.int64, count, ids_at), is_due)):
                return

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
        found: dict[int, Found] = {}
        wrong: BadIds | None = None
        for job, (kind, place) in enumerate(self._asked):
            if not isinstance(kind.table, FetchedTable):
                continue
            try:
                found[job] = Found.of(kind.table, *inputs_of(kind, place, inputs), job)
            except BadIds as error:
                wrong = error
                break

        refuse = partial(_refuse, self._asked, found, inputs)
        if wrong is not None and all(one.ids is None for one in found.values()):
            refuse(wrong)
        # a lookup that is wrong, or comes after that, has rows of its own that nobody takes
        return _Fetching(self._planner, self._places, found, wrong, refuse, () if wrong else copied)

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Blocks until the rows are here. RowsNotRead: some do not come. After an error found masks hold
        anything."""
        if (found := self.run_at_once(inputs, outputs)) is not None:
            return found or None
        self._note(inputs)
        return _Later(self, inputs).wait().run(inputs, outputs)


def _refuse(
    asked: Sequence[tuple[Lookup | LookupKind, Place]],
    found: Mapping[int, Found],
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
        found: Mapping[int, Found],
        wrong: BadIds | None,
        refuse: Callable[[BadIds], NoReturn],
        copied: Sequence[CopiedRows],
    ) -> None:
        self._planner, self._places, self._found = planner, places, found
        self._wrong, self._refuse = wrong, refuse
        self._tables = list({id(one.table): one.table for one in found.values()}.values())
        self._jobs = {id(t): [job for job, one in found.items() if one.table is t] for t in self._tables}
        self._rows = {
            id(t): TableRows(t, [found[job].rows for job in self._jobs[id(t)]]) for t in self._tables
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
        found: Mapping[int, Found],
        staged: Mapping[int, Table],
        at: Mapping[int, NDArray[np.int64]],
    ) -> None:
        self._found, self._at = found, at
        self._places = np.frombuffer(places, np.int64).reshape(-1, len(Place._fields)).copy()
        self._numbers_at = addresses(at, len(self._places))
        kinds = self._places[:, FIELD["kind"]].tolist()
        used = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
        self._places[:, FIELD["kind"]] = [used[kind] for kind in kinds]
        of_kind = [
            LookupKind(staged.get(id(kind.table), kind.table), kind.pooling, kind.precision)
            for kind in (planner.kinds[number] for number in used)
        ]
        self._read_places = self._places.copy()
        self._read_places[list(at), FIELD["found_at"]] = -1
        self._planner = planner.backend.memory_planner(of_kind, planner.threads)

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        read = self._planner.run_rows(self._read_places, inputs, outputs, self._numbers_at)
        unfound = [Unfound(0, 0)] * len(self._places) if read is None else list(read)
        for job, one in self._found.items():
            unfound[job] = one.unfound
            if (found_at := int(self._places[job, FIELD["found_at"]])) >= 0:
                mask = np.frombuffer(outputs, np.uint8, one.rows.size, found_at)
                mask[:] = True if one.mask is None else one.mask
                if one.late is not None:
                    mask[one.late] = MASK_LATE
        return unfound if any(map(any, unfound)) else None
