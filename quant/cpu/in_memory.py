"""Lookups of fetched tables (`quant.rows.fetched`) whose rows are read in memory: where the table's address
says, and copies of the others, from the page cache or once they came."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import (
    FIELD,
    Bytes,
    Ids,
    Lookup,
    LookupKind,
    Place,
    Plan,
    Table,
    Unfound,
)
from tableside.quant.cpu.address_space import BASE, MEMORY
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.rows.fetched import Fetch, FetchedTable, RowReader
from tableside.quant.rows.ids import ID_BYTES, array_address
from tableside.quant.rows.overlay import NO_ROW

if TYPE_CHECKING:
    from tableside.quant.cpu.backend import CpuBackend, MemoryPlanner

How = Callable[[RowReader], Fetch | None]  # which way rows are fetched; None: not that way

_ADDRESSES = 1 << 47  # that a process has
_NOWHERE = np.zeros(0, np.int64)
WHICH_IDS = slice(FIELD["ids"] + 1)  # fields of a place: kind, ids_at, ids


class CopiedRows(NamedTuple):
    """Rows of a table that were copied. rows: [n] their numbers, ascending, each once; at: the place here of
    each one that was asked for; packed: [n, row_bytes], a whole number of rows from the table's address;
    state: `RowState` [n]."""

    table: FetchedTable
    rows: Ids
    at: Ids
    packed: Bytes
    state: NDArray[np.uint8]

    @classmethod
    def of(cls, table: FetchedTable, asked: Ids, fetch: Fetch, deadline: float | None) -> "CopiedRows":
        """fetch: of the table's reader."""
        assert table.in_place is not None
        rows, at = distinct(asked)
        size = rows.size * table.row_bytes
        memory, state = np.empty(size + table.row_bytes, np.uint8), np.zeros(rows.size, np.uint8)
        skipped = (table.in_place.address - array_address(memory)) % table.row_bytes
        packed = memory[skipped : skipped + size].reshape(rows.size, table.row_bytes)
        fetch(rows, packed, state, deadline)
        return cls(table, rows, at, packed, state)

    def kept_ids(self) -> Ids:
        """The id that each row keeps."""
        return kept_ids(self.packed, self.table.id_at)


class InMemory:
    """Plans lookups whose rows lie in memory, or are copied there. To see where they are, ids of fetched
    tables become row numbers; a lookup then reads by these, if no id may be missing."""

    def __init__(
        self,
        backend: "CpuBackend",
        kinds: Sequence[Lookup | LookupKind],
        tables: Sequence[Table],
        threads: int,
    ) -> None:
        """tables: of each kind, in memory."""
        self._kinds, self._tables, self._backend, self._threads = kinds, tables, backend, threads
        self._spans = [_Span.of(table) for table in tables]
        self._planner = self._planner_of(tables)
        self._by_number = self._planner_over(self._spans) if backend.reads_any_rows else None
        self._in_place = [_in_place(kind.table) for kind in kinds]
        away = [isinstance(kind.table, FetchedTable) for kind in kinds]
        has_layers = any(t.row_map is not None and t.row_map.elsewhere for t in tables)
        self._layers_run = backend.layers_run(self._kinds_of(tables), away, threads) if has_layers else None

    def _kinds_of(self, tables: Sequence[Table]) -> list[LookupKind]:
        each = zip(self._kinds, tables, strict=True)
        return [LookupKind(table, kind.pooling, kind.precision) for kind, table in each]

    def _planner_of(self, tables: Sequence[Table]) -> "MemoryPlanner":
        return self._backend.memory_planner(self._kinds_of(tables), self._threads)

    def _planner_over(self, spans: "Sequence[_Span]") -> "MemoryPlanner":
        """Returns what plans by row numbers, from the first one of a span on."""
        each = zip(self._kinds, self._tables, spans, strict=True)
        return self._planner_of([t if t is kind.table else span.table(t) for kind, t, span in each])

    @cached_property
    def _everywhere(self) -> "Sequence[_Span]":
        return [_Span.everywhere(table) for table in self._tables]

    @cached_property
    def _by_address(self) -> "MemoryPlanner":
        return self._planner_over(self._everywhere)

    def plan(
        self,
        asked: Sequence[tuple[Lookup | LookupKind, Place]],
        places: Any,
        inputs: Any,
        most: int,
        how: How,
        deadline: float | None,
    ) -> tuple[Plan | None, Sequence[CopiedRows]]:
        """Returns a plan that reads rows where they lie in memory, and copies of the others; or None, and
        what was copied, where some did not come. Ids may be missing, or wrong. most: rows to copy; of more
        so many are, to see whether they come."""
        rows_of, away_of, is_sure = dict[int, Ids](), dict[int, Ids](), True
        ids_of = dict[int, Ids]()
        counted = list[tuple[Callable[[int], object], int]]()
        for job, (kind, place) in enumerate(asked):
            if not isinstance(table := kind.table, FetchedTable):
                continue
            if (away := table.reader.away) is None:
                return None, ()
            rows = ids = np.frombuffer(inputs, np.int64, place.ids, place.ids_at)
            if (row_map := table.row_map) is not None:
                rows, doubtful = place_rows(row_map, ids, table.rows)
                if doubtful:
                    ids_of[job] = ids
                    is_sure &= table.id_at >= 0 and not row_map.has_backfilled and NO_ROW not in rows
            rows_of[job] = rows
            if (there := away(rows)).size:
                away_of[job] = there
            if table.reader.in_place is not None:
                counted.append((table.reader.in_place, rows.size - there.size))
        plan: Plan | None
        copied: Sequence[CopiedRows] = ()
        if not away_of:
            if any(_lacks_default(_fetched(asked[job][0]), rows_of[job], ids_of[job]) for job in ids_of):
                return None, ()
            plan = self._plain(asked, places, rows_of, is_sure and not ids_of)
        elif not is_sure or not self._backend.reads_any_rows:
            return None, ()
        elif sum(map(len, away_of.values())) > most:
            job, there = next(iter(away_of.items()))
            table = _fetched(asked[job][0])
            if (fetch := how(table.reader)) is None:
                return None, ()
            came = CopiedRows.of(table, rows_of[job][there[:most]], fetch, deadline)
            return None, (came,) if came.state.any() else ()
        else:
            plan, copied = self._mixed(asked, places, rows_of, away_of, ids_of, how, deadline)
        for count, in_place in counted if plan is not None else ():
            count(in_place)
        return plan, copied

    def run_in_layers(self, places: NDArray[np.int64], inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """As `Plan.run_at_once`, of lookups whose rows that may be away all are layers', which never are.
        places: [n, fields of `Place`]."""
        if self._layers_run is None or (found := self._layers_run(places, inputs, outputs)) is None:
            return None
        for kind, _, ids in places[:, WHICH_IDS].tolist():
            if (count := self._in_place[kind]) is not None:
                count(ids)
        return found

    def _plain(
        self,
        asked: Sequence[tuple[Lookup | LookupKind, Place]],
        places: Any,
        rows_of: Mapping[int, Ids],
        is_sure: bool,
    ) -> Plan:
        """Of rows that all lie at their tables' addresses. rows_of: by the lookup's number."""
        mapped = [job for job in rows_of if asked[job][0].table.row_map is not None]
        if self._by_number is None or not is_sure or not mapped:
            return self._planner.plan(places)
        numbers = {job: rows_of[job] - self._spans[asked[job][1].kind].first for job in mapped}
        return _NumberedPlan((self, numbers), self._by_number, places, addresses(numbers, len(asked)))

    def _mixed(
        self,
        asked: Sequence[tuple[Lookup | LookupKind, Place]],
        places: Any,
        rows_of: Mapping[int, Ids],
        away_of: Mapping[int, Ids],
        ids_of: Mapping[int, Ids],
        how: How,
        deadline: float | None,
    ) -> tuple[Plan | None, Sequence[CopiedRows]]:
        """Of rows of which some are copied. By the lookup's number: away_of, the places of these; ids_of, raw
        ids that their rows keep, if they are there."""
        numbers, copied = dict[int, Ids](), list[CopiedRows]()
        for job in list(away_of)[1:]:  # so that no table waits for those before it
            reader = _fetched(asked[job][0]).reader
            if reader.ask is not None and how(reader) == reader.fetch:
                reader.ask(np.sort(rows_of[job][away_of[job]]))
        for job, rows in rows_of.items():
            kind, place = asked[job]
            table = _fetched(kind)
            if (fetch := how(table.reader)) is None or not self._spans[place.kind].has(rows):
                return None, copied
            span = self._everywhere[place.kind]
            numbers[job] = rows - span.first
            there = away_of.get(job, _NOWHERE)
            if there.size:
                came = CopiedRows.of(table, rows[there], fetch, deadline)
                copied.append(came)
                if came.state.any():
                    return None, copied
                if job in ids_of and (came.kept_ids()[came.at] != ids_of[job][there]).any():
                    return None, copied
                first = (array_address(came.packed) - span.address) // table.row_bytes
                numbers[job][there] = came.at + first
            if job in ids_of and not _keep(table, np.delete(rows, there), np.delete(ids_of[job], there)):
                return None, copied
        at = addresses(numbers, len(asked))
        return _NumberedPlan((self, numbers, *copied), self._by_address, places, at), copied


def _lacks_default(table: FetchedTable, rows: Ids, ids: Ids) -> bool:
    """Whether ids [n] may need the default row, which may not be read in place, as their own rows may."""
    assert table.row_map is not None and table.reader.away is not None
    default = table.row_map.default_row
    if default is None or not table.reader.away(np.array([default])).size:
        return False
    return table.id_at < 0 or NO_ROW in rows or not _keep(table, rows, ids)


def _keep(table: FetchedTable, rows: Ids, ids: Ids) -> bool:
    """Whether rows [n] of a table that may be read in place keep these ids. An overlay's rows are sure."""
    assert table.row_map is not None and table.row_map.index is not None
    own = (rows >= 0) & (rows < table.rows)
    return bool((table.row_map.index.ids[rows[own]] == ids[own]).all())


def _fetched(kind: Lookup | LookupKind) -> FetchedTable:
    assert isinstance(kind.table, FetchedTable)
    return kind.table


class _NumberedPlan(Plan):
    """owners: keep rows and numbers in memory. numbers_at: as of `MemoryPlanner.run_rows`."""

    def __init__(
        self,
        owners: Sequence[object],
        planner: "MemoryPlanner",
        places: NDArray[np.int64],
        numbers_at: NDArray[np.int64],
    ) -> None:
        self._owners, self._planner, self._numbers_at, self._places = owners, planner, numbers_at, places

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        return self._planner.run_rows(self._places, inputs, outputs, self._numbers_at)


def kept_ids(packed: Bytes, at: int) -> Ids:
    """The ids that rows [n, row_bytes] keep at a byte, int64 [n]."""
    return np.ascontiguousarray(packed[:, at : at + ID_BYTES]).view(np.int64)[:, 0]


def distinct(rows: Ids) -> tuple[Ids, Ids]:
    """Returns the distinct ones, ascending, and the place among them of each. numpy.unique takes three times
    as long for a few rows."""
    order = rows.argsort(kind="stable")
    ascending = rows[order]
    is_new = np.ones(rows.size, np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    at = np.empty(rows.size, np.int64)
    at[order] = is_new.cumsum() - 1
    return ascending[is_new], at


def addresses(arrays: Mapping[int, Ids], count: int) -> NDArray[np.int64]:
    """Returns addresses, by number; 0: there is none."""
    return np.array([array_address(arrays[n]) if n in arrays else 0 for n in range(count)], np.int64)


def _in_place(table: Any) -> Callable[[int], object] | None:
    return table.reader.in_place if isinstance(table, FetchedTable) else None


class _Span(NamedTuple):
    """Memory as rows of a table: that with number `first` is the first one, at this address; the one before
    `end` is the last."""

    first: int
    end: int
    address: int

    @classmethod
    def of(cls, table: Table) -> "_Span":
        """From the first row of a table, or elsewhere, to the last one."""
        others = () if table.row_map is None else table.row_map.elsewhere
        first = min((0, *(start for start, _ in others)))
        end = max((table.rows, *(start + len(packed) for start, packed in others)))
        return cls(first, end, table.address + first * table.row_bytes)

    @classmethod
    def everywhere(cls, table: Table) -> "_Span":
        """All of the address space."""
        first = -((table.address - BASE) // table.row_bytes)
        address = table.address + first * table.row_bytes
        return cls(first, first + (_ADDRESSES - address) // table.row_bytes, address)

    def has(self, rows: Ids) -> bool:
        return not rows.size or (self.first <= int(rows.min()) and int(rows.max()) < self.end)

    def table(self, table: Table) -> Table:
        """A table without a map of this memory, with rows as those of another one."""
        size = self.end - self.first
        packed = np.frombuffer(memoryview(MEMORY), np.uint8, size * table.row_bytes, self.address - BASE)
        return replace(table, packed=packed.reshape(size, table.row_bytes), row_map=None)
