"""The base of the CPU backends: tables, id checks, and plans that check inputs first."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import (
    Backend,
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
    Precision,
    RowSource,
    Table,
    Unfound,
    place_of,
    places_in,
)
from tableside.quant.errors import BadIds, NotRepresentable, Problem, QuantError
from tableside.quant.row_format import RowFormat, Source


class CpuBackend(Backend):
    """A backend that also quantizes; stateless."""

    @abstractmethod
    def quantize(self, values: NDArray[Any], source: Source, row_format: RowFormat, out: Bytes) -> None:
        """Packs values [rows, dim] (fp32, fp16, or bf16 as uint16) into out [rows, row_bytes]. QuantError:
        names the first row that the format cannot represent; the rows before it are written."""

    @abstractmethod
    def planner(self, kinds: Sequence[Lookup | LookupKind], threads: int = 1) -> Planner: ...

    def plan(self, lookups: Sequence[Lookup], threads: int = 1, out_bytes: int = 0) -> Plan:
        places = np.array([place_of(lookup, n) for n, lookup in enumerate(lookups)], np.int64)
        return self.planner(lookups, threads).plan(places.tobytes())


def host_table(table: RowSource) -> Table:
    """The table, where it lies in host memory. QuantError: it is on a device."""
    if not isinstance(table, Table):
        raise QuantError(
            "a table on a device was given to a backend of the CPU; use the GPU backend of that device"
        )
    return table


def host_tables(lookups: Sequence[Lookup | LookupKind]) -> list[Table]:
    """The tables of lookups that the CPU can run. QuantError: one is on a device, or asks for bf16."""
    for lookup in lookups:
        if lookup.precision is Precision.BF16:
            raise QuantError("bf16 vectors are written by the GPU backend alone; ask for fp32 or fp16")
    return [host_table(lookup.table) for lookup in lookups]


class CheckedLookup(NamedTuple):
    """A lookup with checked inputs. table: ids are its row numbers; lengths None: not pooled; out: [outputs,
    dim], any row stride."""

    table: Table
    pooling: Pooling
    ids: Ids
    lengths: Lengths | None
    weights: NDArray[np.float32] | None
    out: Floats


class CpuPlanner(Planner):
    """Runs lookups of a backend that checks nothing by itself: all inputs are checked first, then looked
    up."""

    def __init__(self, kinds: Sequence[Lookup | LookupKind]) -> None:
        self.kinds, self.tables = tuple(kinds), host_tables(kinds)

    def run(self, places: Any, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        asked = places_in(places)
        checked = [
            _check(job, self.kinds[place.kind], self.tables[place.kind], place, inputs, outputs)
            for job, place in enumerate(asked)
        ]
        for place, (_, found, _) in zip(asked, checked, strict=True):
            if place.found_at >= 0:
                np.frombuffer(outputs, np.bool_, place.ids, place.found_at)[:] = (
                    True if found is None else found
                )
        self.look_up([one for one, _, _ in checked], [place.kind for place in asked])
        unfound = [lacks for _, _, lacks in checked]
        return unfound if any(map(any, unfound)) else None

    @abstractmethod
    def look_up(self, lookups: Sequence[CheckedLookup], kinds: Sequence[int]) -> None:
        """Writes the vectors of all lookups. kinds: the number of each one's kind."""


def _check(
    job: int, kind: Lookup | LookupKind, table: Table, place: Place, inputs: Any, outputs: Any
) -> tuple[CheckedLookup, NDArray[np.bool_] | None, Unfound]:
    """Returns the lookup, its found mask (None: all found) and its counts. BadIds: an id or a length is
    wrong."""
    ids = np.frombuffer(inputs, np.int64, place.ids, place.ids_at)
    if kind.pooling is Pooling.NONE:
        lengths = None
    elif place.lengths_at < 0:
        lengths = np.full(place.bags, place.bag_length, np.int32)
    else:
        lengths = np.frombuffer(inputs, np.int32, place.bags, place.lengths_at)
    weights = None if place.weights_at < 0 else np.frombuffer(inputs, np.float32, place.ids, place.weights_at)
    rows, found, lacks = rows_of(table, ids, lengths, job)
    table, rows = plain_rows(table, rows)
    dtype = np.dtype(np.float16 if kind.precision is Precision.FP16 else np.float32)
    vectors = place.ids if lengths is None else place.bags
    step = place.out_row_bytes or table.dim * dtype.itemsize
    out: Floats = np.ndarray((vectors, table.dim), dtype, outputs, place.out_at, (step, dtype.itemsize))
    return CheckedLookup(table, kind.pooling, rows, lengths, weights, out), found, lacks


def check_ids(ids: Ids, lengths: Lengths | None, rows: int, job: int = 0) -> None:
    """Raises BadIds for the first negative length, wrong sum of lengths, or id outside [0, rows). rows -1:
    any id."""
    if lengths is not None:
        if (negative := np.flatnonzero(lengths < 0)).size:
            at = int(negative[0])
            raise BadIds(Problem.LENGTH, job, at, int(lengths[at]), 0)
        if (total := int(lengths.sum(dtype=np.int64))) != ids.size:
            raise BadIds(Problem.SUM, job, lengths.size, total, ids.size)
    if rows >= 0 and (outside := np.flatnonzero((ids < 0) | (ids >= rows))).size:
        at = int(outside[0])
        raise BadIds(Problem.ID, job, at, int(ids[at]), rows)


def rows_of(
    table: RowSource, ids: Ids, lengths: Lengths | None, job: int = 0
) -> tuple[Ids, NDArray[np.bool_] | None, Unfound]:
    """Returns the row of each id, the found mask (None: all found) and the counts. BadIds: as `check_ids`."""
    row_map = table.row_map
    if row_map is None:
        check_ids(ids, lengths, table.rows, job)
        return ids, None, Unfound(0, 0)
    check_ids(ids, lengths, -1, job)
    rows = row_map.find(ids)
    found = rows != -1
    backfilled = int(np.count_nonzero(row_map.is_backfilled(rows[found])))
    if (lacks := np.flatnonzero(~found)).size:
        if row_map.default_row is None:
            at = int(lacks[0])
            raise BadIds(
                Problem.ID if row_map.is_plain else Problem.MISSING, job, at, int(ids[at]), row_map.count
            )
        rows[lacks] = row_map.default_row
    return rows, found, Unfound(int(lacks.size), backfilled)


def plain_rows(table: Table, rows: NDArray[np.int64]) -> tuple[Table, NDArray[np.int64]]:
    """Returns a table without a map and the numbers in it of rows [n] of `table`. `rows` must not contain -1.
    The table is `table` itself, or a copy of the rows if it has an overlay."""
    if table.row_map is None:
        return table, rows
    if (overlay := table.row_map.overlay) is None:
        return replace(table, row_map=None), rows
    own = (rows >= 0) & (rows < table.rows)
    packed = np.empty((max(1, rows.size), table.row_bytes), np.uint8)
    packed[: rows.size][own] = table.packed[rows[own]]
    overlay.rows(rows, packed[: rows.size])
    return Table(packed, table.row_format, table.dim), np.arange(rows.size, dtype=np.int64)


def check_quantize(values: NDArray[Any], source: Source, row_format: RowFormat, out: Bytes) -> None:
    """Checks dtypes and shapes of a quantization."""
    dtype = {Source.FP32: np.float32, Source.FP16: np.float16, Source.BF16: np.uint16}[source]
    if values.dtype != dtype or values.ndim != 2 or not values.flags.c_contiguous:
        raise QuantError(
            f"values are {values.dtype} {list(values.shape)}; expected contiguous {np.dtype(dtype)} [rows, "
            "dim]"
        )
    sizes = row_format.row_sizes(values.shape[1])
    is_fit = out.ndim == 2 and len(out) == len(values) and out.shape[1] in sizes
    if out.dtype != np.uint8 or not is_fit or not out.flags.c_contiguous:
        raise QuantError(
            f"out is {out.dtype} {list(out.shape)}; expected contiguous uint8 [{len(values)}, "
            f"{' or '.join(map(str, sizes))}]"
        )


def not_representable(row: int, row_format: RowFormat) -> NotRepresentable:
    """The error for the first row that `row_format` cannot represent."""
    largest = {RowFormat.FP8: "|x| <= 240", RowFormat.FP32: "fp32"}.get(row_format, "|x| <= 65504")
    return NotRepresentable(row, row_format.label, largest)
