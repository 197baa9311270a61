"""Lookups of tables whose rows are fetched (`quant.rows.fetched`). A plan begins by finding row numbers; its
`Waiting` fetches each row of a table once into a staging table; the plan that this gives reads them there, by
the backend's kernels, beside the lookups of tables in memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import (
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
from tableside.quant.cpu.checked import inputs_of, rows_of
from tableside.quant.errors import BadIds, RowsNotRead
from tableside.quant.rows.fetched import Fetch, FetchedTable, RowReader, RowState

if TYPE_CHECKING:
    from tableside.quant.cpu.backend import CpuBackend

_FIELD = {name: n for n, name in enumerate(Place._fields)}
_OF_INPUTS = [_FIELD[name] for name in ("ids_at", "lengths_at", "weights_at")]
_OF_OUTPUTS = [_FIELD[name] for name in ("out_at", "found_at")]


class _Found(NamedTuple):
    """The row numbers of a lookup of a fetched table. mask: of ids with a row of their own; None: all."""

    table: FetchedTable
    rows: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    unfound: Unfound


class StagedPlanner(Planner):
    """Plans lookups of which some read fetched tables. backend: reads what was staged."""

    def __init__(self, backend: "CpuBackend", kinds: Sequence[Lookup | LookupKind], threads: int) -> None:
        self.backend, self.kinds, self.threads = backend, tuple(kinds), threads

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
        found: dict[int, _Found] = {}
        asked = [(self._planner.kinds[place.kind], place) for place in places_in(self._places)]
        for job, (kind, place) in enumerate(asked):
            if not isinstance(kind.table, FetchedTable):
                continue
            try:
                found[job] = _Found(kind.table, *rows_of(kind.table, *inputs_of(kind, place, inputs), job))
            except BadIds:
                for before, (other, at) in enumerate(asked[:job]):  # the error names the first wrong lookup
                    rows_of(other.table, *inputs_of(other, at, inputs), before)
                raise
        return _Fetching(self._planner, self._places, found).ready()

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Blocks until the rows are here. RowsNotRead: some do not come."""
        begun = self.begin(inputs)
        return (begun.wait() if isinstance(begun, Waiting) else begun).run(inputs, outputs)


class _Fetching(Waiting):
    """Rows of a request that must be fetched. found: by the lookup's number. The time that its tables let a
    lookup wait begins here."""

    def __init__(self, planner: StagedPlanner, places: Any, found: Mapping[int, _Found]) -> None:
        self._planner, self._places, self._found = planner, places, found
        self._tables = list({id(one.table): one.table for one in found.values()}.values())
        limits = [wait_s for table in self._tables if (wait_s := table.reader.wait_s) is not None]
        self._deadline = time.monotonic() + min(limits) if limits else None

    def ready(self) -> Plan | Waiting:
        """Returns the plan to run, where no row needs a wait."""
        if any(table.reader.ready is None for table in self._tables):
            return self
        try:
            return self._staged(lambda reader: reader.ready)
        except RowsNotRead:
            return self

    def wait(self, deadline: float | None = None) -> Plan:
        return self._staged(lambda reader: reader.fetch, self._deadline if deadline is None else deadline)

    def _staged(self, how: Callable[[RowReader], Fetch | None], deadline: float | None = None) -> "_ReadPlan":
        staged: dict[int, Table] = {}  # by the table's id
        at: dict[int, NDArray[np.int64]] = {}
        for table in self._tables:
            jobs = [job for job, one in self._found.items() if one.table is table]
            rows = [self._found[job].rows for job in jobs]
            fetch = how(table.reader)
            assert fetch is not None
            staged[id(table)], places = fetched(table, np.concatenate(rows), fetch, deadline)
            ends = np.cumsum([one.size for one in rows])
            at |= zip(jobs, np.split(places, ends[:-1]), strict=True)
        return _ReadPlan(self._planner, self._places, self._found, staged, at)


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
    wanted, at = np.unique(rows, return_inverse=True)
    packed = np.empty((max(1, wanted.size), table.row_bytes), np.uint8)
    first, end = np.searchsorted(wanted, (0, table.rows)).tolist()
    state = np.zeros(end - first, np.uint8)
    if state.size:
        fetch(wanted[first:end], packed[first:end], state, deadline)
    if state.any():
        late, corrupt = (int(np.count_nonzero(state == s)) for s in (RowState.LATE, RowState.CORRUPT))
        raise RowsNotRead(state.size, late, corrupt)
    if table.row_map is not None and table.row_map.overlay is not None and state.size < wanted.size:
        table.row_map.overlay.rows(wanted, packed[: wanted.size])
    return Table(packed, table.row_format, table.dim), at.reshape(-1).astype(np.int64, copy=False)
