"""The base of the CPU backends: tables, id checks, and plans that check inputs first."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
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
from tableside.quant.cpu.address_space import MEMORY, places_in_memory
from tableside.quant.cpu.checked import check_arguments, inputs_of, plain_rows, rows_of
from tableside.quant.cpu.staged import StagedPlanner
from tableside.quant.cpu.staged_rows import fetched
from tableside.quant.cpu.together import TogetherPlanner
from tableside.quant.errors import NotRepresentable, QuantError
from tableside.quant.row_format import RowFormat, Source
from tableside.quant.rows.fetched import AskedTable, FetchedTable

# Of arrays of rows that are quantized
ITEM_TYPES: dict[Source, np.dtype[Any]] = {
    Source.FP32: np.dtype("<f4"),
    Source.FP16: np.dtype("<f2"),
    Source.BF16: np.dtype("<u2"),
    **{s: np.dtype("u1") for s in Source if s.packed is not None},
}

# places, inputs, outputs -> as of `Plan.run_at_once`
LayersRun = Callable[[Any, Any, Any], Sequence[Unfound] | None]


class CpuBackend(Backend):
    """A backend that also quantizes; stateless. writes_bf16: plans take bf16 vectors. reads_any_rows: a table
    may be any part of the address space, of which it touches the rows that are asked for alone."""

    writes_bf16 = False
    reads_any_rows = False

    @abstractmethod
    def quantize(self, values: NDArray[Any], source: Source, row_format: RowFormat, out: Bytes) -> None:
        """Packs values [rows, dim] (fp32, fp16, or bf16 as uint16), or rows that are packed already, uint8
        [rows, bytes], into out [rows, row_bytes]. QuantError: names the first row that the format cannot
        represent; the rows before it are written."""

    def lookup(
        self,
        table: RowSource,
        ids: Ids,
        lengths: Lengths | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        weights: NDArray[np.float32] | None = None,
        half: bool = False,
        out: Floats | None = None,
        threads: int = 1,
    ) -> Floats:
        out = check_arguments(table, ids, lengths, pooling, weights, half, out)
        held, ids = held_rows(table, ids, lengths)
        self.write_vectors(held, ids, lengths, pooling, weights, out, threads)
        return out

    @abstractmethod
    def write_vectors(
        self, table: Table, ids: Ids, lengths: Lengths | None, pooling: Pooling,
        weights: NDArray[np.float32] | None, out: Floats, threads: int,
    ) -> None:  # fmt: skip
        """As `lookup`, to `out`, of arguments that were checked but for the values of ids and lengths."""

    def planner(self, kinds: Sequence[Lookup | LookupKind], threads: int = 1) -> Planner:
        """As `Backend.planner`. Lookups of rows that are fetched are staged first (`quant.cpu.staged`), those
        of rows that are asked for, too (`quant.cpu.together`)."""
        if any(isinstance(kind.table, AskedTable) for kind in kinds):
            return TogetherPlanner(self, kinds, threads)
        if any(isinstance(kind.table, FetchedTable) for kind in kinds):
            return StagedPlanner(self, kinds, threads)
        return self.memory_planner(kinds, threads)

    @abstractmethod
    def memory_planner(self, kinds: Sequence[Lookup | LookupKind], threads: int) -> "MemoryPlanner":
        """As `planner`, of tables in memory."""

    def layers_run(
        self, kinds: Sequence[LookupKind], are_away: Sequence[bool], threads: int
    ) -> LayersRun | None:
        """Returns what runs lookups if all ids of kinds that are away are rows of layers; whoever asks keeps
        the tables. None: this backend has none."""
        return None

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


def held_rows(table: RowSource, ids: Ids, lengths: Lengths | None) -> tuple[Table, Ids]:
    """The table in memory and what to look up there: rows that are fetched are fetched now. BadIds,
    RowsNotRead: of rows that are. QuantError: as `host_table`."""
    if isinstance(table, FetchedTable):
        return fetched(table, rows_of(table, ids, lengths)[0], table.reader.fetch)
    return host_table(table), ids


def host_tables(lookups: Sequence[Lookup | LookupKind]) -> list[Table]:
    """The tables of lookups that the CPU can run. QuantError: one is on a device."""
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


class MemoryPlanner(Planner):
    """Plans lookups of tables in memory."""

    def run_rows(
        self, places: Any, inputs: Any, outputs: Any, numbers_at: NDArray[np.int64]
    ) -> Sequence[Unfound] | None:
        """As `run`, of places [n, fields of `Place`]. numbers_at: [n] addresses of what a lookup reads
        instead of its ids, or 0."""
        return self.run(places_in_memory(places, inputs, outputs, numbers_at).tobytes(), MEMORY, MEMORY)


class CpuPlanner(MemoryPlanner):
    """Runs lookups of a backend that checks nothing by itself: all inputs are checked first, then looked
    up."""

    def __init__(self, kinds: Sequence[Lookup | LookupKind]) -> None:
        """QuantError: as `host_tables`, or bf16 is asked for, which NumPy lacks."""
        self.kinds, self.tables = tuple(kinds), host_tables(kinds)
        if any(kind.precision is Precision.BF16 for kind in kinds):
            raise QuantError("bf16 vectors are written by the backend native and by GPUs; ask for fp32")

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
    ids, lengths = inputs_of(kind, place, inputs)
    weights = None if place.weights_at < 0 else np.frombuffer(inputs, np.float32, place.ids, place.weights_at)
    rows, found, lacks = rows_of(table, ids, lengths, job)
    table, rows = plain_rows(table, rows)
    dtype = np.dtype(np.float16 if kind.precision is Precision.FP16 else np.float32)
    vectors = place.ids if lengths is None else place.bags
    step = place.out_row_bytes or table.dim * dtype.itemsize
    out: Floats = np.ndarray((vectors, table.dim), dtype, outputs, place.out_at, (step, dtype.itemsize))
    return CheckedLookup(table, kind.pooling, rows, lengths, weights, out), found, lacks


def check_quantize(values: NDArray[Any], source: Source, row_format: RowFormat, out: Bytes) -> None:
    """Checks dtypes and shapes of a quantization."""
    dtype = ITEM_TYPES[source]
    if values.dtype != dtype or values.ndim != 2 or not values.flags.c_contiguous:
        raise QuantError(
            f"values are {values.dtype} {list(values.shape)}; expected contiguous {np.dtype(dtype)} [rows, "
            f"{'dim' if source.packed is None else 'bytes'}]"
        )
    sizes = row_format.row_sizes(source.dim_of(values.shape[1]))
    is_fit = out.ndim == 2 and len(out) == len(values) and out.shape[1] in sizes
    if out.dtype != np.uint8 or not is_fit or not out.flags.c_contiguous:
        raise QuantError(
            f"out is {out.dtype} {list(out.shape)}; expected contiguous uint8 [{len(values)}, "
            f"{' or '.join(map(str, sizes))}]"
        )


def not_representable(row: int, row_format: RowFormat) -> NotRepresentable:
    """The error for the first row that `row_format` cannot represent."""
    largest = "fp32" if row_format is RowFormat.FP32 else f"|x| <= {row_format.largest:g}"
    return NotRepresentable(row, row_format.label, largest)
