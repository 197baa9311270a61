"""Our CPU kernel (`_native*.c`): gathers, dequantizes and pools in one pass; and the quantizer.
With AVX-512 or AVX2 unweighted sums equal FBGEMM's bit for bit; otherwise, and with weights at odd widths,
they differ by rounding (docs/format.md gives the bound)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import (
    Bytes,
    Floats,
    Ids,
    Lengths,
    Lookup,
    LookupKind,
    Place,
    Plan,
    Planner,
    Pooling,
    Table,
    Unfound,
    place_of,
    places_in,
)
from tableside.quant.cpu import _native
from tableside.quant.cpu.backend import (
    CpuBackend,
    LayersRun,
    MemoryPlanner,
    check_quantize,
    host_tables,
    not_representable,
)
from tableside.quant.errors import BadIds, NotRepresentable, Problem
from tableside.quant.row_format import RowFormat, Source
from tableside.quant.rows.ids import NativeRowMap, RowMap
from tableside.quant.rows.overlay import NativeLayer

_MEASURED_FROM = 64 << 20  # bytes of a table; smaller ones lie in caches
_measured = 0  # bytes of the largest table that prefetches were measured on

_PACKED = 3  # the pooling of `gather`: rows are copied as they are packed
_PROBLEMS = (None, Problem.ID, Problem.LENGTH, Problem.SUM, Problem.MISSING)


class _Kind(NamedTuple):
    """The table's part of a lookup for `_native.run`, int64 each."""

    table: int  # address of the first row
    rows: int
    row_bytes: int
    dim: int
    row_format: int
    pooling: int
    precision: int
    row_map: int  # address of a NativeRowMap, or 0
    is_away: int = 0  # whether ids are refused that have not their rows in a layer


_FIELDS = (
    _native.KIND_FIELDS,
    _native.PLACE_FIELDS,
    _native.ROW_MAP_FIELDS,
    _native.LAYER_FIELDS,
)
if (_Kind._fields, Place._fields, NativeRowMap._fields, NativeLayer._fields) != _FIELDS:
    raise ImportError("the native kernel was built from other sources than these; reinstall tableside")


def _raise(verdict: tuple[int, int, int, int], table: Table, ids: int) -> NoReturn:
    """Raises BadIds for a lookup of so many ids in `table`."""
    job, kind, position, value = verdict
    problem = _PROBLEMS[kind]
    assert problem is not None
    known = table.rows if table.row_map is None else table.row_map.count
    if problem is Problem.MISSING and table.row_map is not None and table.row_map.is_plain:
        problem = Problem.ID
    bound = {Problem.ID: table.rows, Problem.MISSING: known, Problem.LENGTH: 0, Problem.SUM: ids}[problem]
    raise BadIds(problem, job, position, value, bound)


def _unfound(pairs: bytes) -> Sequence[Unfound]:
    return [Unfound(*pair) for pair in np.frombuffer(pairs, np.int64).reshape(-1, 2).tolist()]


class _NativePlanner(MemoryPlanner):
    """Holds the kinds in the extension's form, and keeps their tables alive."""

    def __init__(self, kinds: Sequence[_Kind], tables: Sequence[Table], threads: int) -> None:
        self.tables, self.threads = tuple(tables), threads
        self.kinds = np.array(kinds, np.int64).tobytes()

    def run(self, places: Any, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        return self.run_rows(places, inputs, outputs, None)

    def run_rows(
        self, places: Any, inputs: Any, outputs: Any, numbers_at: NDArray[np.int64] | None
    ) -> Sequence[Unfound] | None:
        found = _native.run(self.kinds, places, inputs, outputs, self.threads, numbers_at)
        if isinstance(found, tuple):
            place = places_in(places)[found[0]]
            _raise(found, self.tables[place.kind], place.ids)
        return None if found is None else _unfound(found)


def _kinds(kinds: Sequence[Lookup | LookupKind], tables: Sequence[Table]) -> list[_Kind]:
    return [
        _Kind(
            table=table.address,
            rows=table.rows,
            row_bytes=table.row_bytes,
            dim=table.dim,
            row_format=table.row_format,
            pooling=kind.pooling,
            precision=kind.precision,
            row_map=0 if table.row_map is None else table.row_map.native_address,
        )
        for kind, table in zip(kinds, tables, strict=True)
    ]


def _choose_prefetch(tables: Sequence[Table]) -> None:
    """Measures the ways to prefetch rows on the largest table (10 to 20 ms), unless one half as large was
    measured in this process; another way is chosen if it takes a twentieth less time."""
    global _measured
    if not tables:
        return
    table = max(tables, key=lambda t: t.rows * t.row_bytes)
    size = table.rows * table.row_bytes
    if size < max(_MEASURED_FROM, 2 * _measured):
        return
    _measured = size
    times = _native.measure_prefetches(
        table.address, table.rows, table.row_bytes, table.dim, table.row_format
    )
    best, now = min(times, key=times.__getitem__), _native.prefetches()[0]
    if times[best] < 0.95 * times[now]:
        _native.prefetch(best)


class Native(CpuBackend):
    """The compiled kernel, on the widest vectors that the processor has."""

    name = "native"
    writes_bf16 = True
    reads_any_rows = True

    def __init__(self) -> None:
        self._isa: str = _native.isas()[0]

    @property
    def description(self) -> str:
        return f"native ({self._isa})"

    def quantize(self, values: NDArray[Any], source: Source, row_format: RowFormat, out: Bytes) -> None:
        check_quantize(values, source, row_format, out)
        rows, dim = len(values), source.dim_of(values.shape[1])
        bad = _native.quantize(row_format, source, values, rows, dim, out, out.shape[1])
        if bad >= 0:
            if source.packed is not None:  # is the row damaged, or out of the other's range?
                own = np.empty((1, source.packed.row_bytes(dim)), np.uint8)
                if _native.quantize(source.packed, source, values[bad : bad + 1], 1, dim, own, own.size) >= 0:
                    raise NotRepresentable(bad, source.label, "")
            raise not_representable(bad, row_format)

    def write_vectors(
        self, table: Table, ids: Ids, lengths: Lengths | None, pooling: Pooling,
        weights: NDArray[np.float32] | None, out: Floats, threads: int,
    ) -> None:  # fmt: skip
        shape = table.address, table.rows, table.row_bytes, table.dim, table.row_format
        row_map = 0 if table.row_map is None else table.row_map.native_address
        half = out.dtype == np.float16
        verdict = _native.lookup(*shape, pooling, ids, lengths, weights, out, half, threads, row_map)
        if verdict:
            _raise(verdict, table, ids.size)

    def planner(self, kinds: Sequence[Lookup | LookupKind], threads: int = 1) -> Planner:
        # Not on rows that are fetched: of a mapped file, random rows would be read from the disk
        _choose_prefetch([kind.table for kind in kinds if isinstance(kind.table, Table)])
        return super().planner(kinds, threads)

    def memory_planner(self, kinds: Sequence[Lookup | LookupKind], threads: int) -> MemoryPlanner:
        tables = host_tables(kinds)
        return _NativePlanner(_kinds(kinds, tables), tables, threads)

    def layers_run(self, kinds: Sequence[LookupKind], are_away: Sequence[bool], threads: int) -> LayersRun:
        away = zip(_kinds(kinds, host_tables(kinds)), are_away, strict=True)
        packed = np.array([kind._replace(is_away=is_away) for kind, is_away in away], np.int64).tobytes()

        def run(places: Any, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
            found = _native.run(packed, places, inputs, outputs, threads, None)
            if found is None:
                return ()
            return None if isinstance(found, tuple) else _unfound(found)

        return run


def packed_planner(tables: Sequence[Table]) -> Planner:
    """Returns a planner of lookups that copy packed rows, uint8 [ids, row_bytes], to `out_at`. A kind
    is a number of the tables. An id without a row of its own gets zeros, and 0 at `found_at`."""
    maps = [replace(t.row_map or RowMap(t.rows), default_row=t.rows) for t in tables]
    whole = [replace(table, row_map=row_map) for table, row_map in zip(tables, maps, strict=True)]
    kinds = [
        k._replace(pooling=_PACKED, dim=1, row_format=0, precision=0)
        for k in _kinds([LookupKind(table, Pooling.NONE) for table in whole], whole)
    ]
    return _NativePlanner(kinds, whole, 1)


def gather(lookups: Sequence[Lookup], threads: int = 1) -> Plan:
    """Returns a plan that copies packed rows, uint8 [ids, row_bytes], to `out_at`. Ids are row numbers;
    pooling is ignored."""
    tables = host_tables(lookups)
    kinds = [
        k._replace(pooling=_PACKED, dim=1, row_format=0, precision=0, row_map=0)
        for k in _kinds(lookups, tables)
    ]
    places = np.array([place_of(lookup, n) for n, lookup in enumerate(lookups)], np.int64)
    return _NativePlanner(kinds, tables, threads).plan(places.tobytes())
