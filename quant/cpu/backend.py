"""What the CPU's backends share: the tables that they read, and plans made of one lookup after another."""

from abc import abstractmethod
from collections.abc import Sequence
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
    check_ids,
    place_of,
    plain_rows,
    rows_of,
)
from tableside.quant.errors import QuantError
from tableside.quant.row_format import RowFormat, Source


class CpuBackend(Backend):
    """A backend that also quantizes; stateless."""

    @abstractmethod
    def quantize(self, values: NDArray[Any], source: Source, row_format: RowFormat, out: Bytes) -> None:
        """Packs values [rows, dim] (fp32, fp16, or bf16 as uint16) into out [rows, row_bytes].

        QuantError names the first row that the format cannot represent; rows before it are written.
        """

    def plan(self, lookups: Sequence[Lookup], threads: int = 1, out_bytes: int = 0) -> Plan:
        return CpuPlan(CpuPlanner(self, lookups, threads), [place_of(lookup) for lookup in lookups])

    def planner(self, kinds: Sequence[LookupKind], threads: int = 1) -> Planner:
        return CpuPlanner(self, kinds, threads)

    def gather(self, lookups: Sequence[Lookup], threads: int = 1) -> Plan:
        """A plan that copies rows as they are packed, uint8 [ids, row_bytes], to `out_at`, whatever a lookup's pooling."""
        return _Gather(lookups)


def host_table(table: RowSource) -> Table:
    """The table, where it lies in host memory. QuantError: it is on a device."""
    if not isinstance(table, Table):
        raise QuantError("a table on a device was given to a backend of the CPU; use the GPU backend of that device")
    return table


def host_tables(lookups: Sequence[Lookup | LookupKind]) -> list[Table]:
    """The tables of lookups that the CPU can run. QuantError: one is on a device, or asks for bf16."""
    for lookup in lookups:
        if lookup.precision is Precision.BF16:
            raise QuantError("bf16 vectors are written by the GPU backend alone; ask for fp32 or fp16")
    return [host_table(lookup.table) for lookup in lookups]


class _Gather(Plan):
    """Rows copied by numpy."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        self._lookups = list(zip(lookups, host_tables(lookups), strict=True))

    def run(self, inputs: Any, outputs: Any) -> None:
        all_ids = [np.frombuffer(inputs, np.int64, lookup.ids, lookup.ids_at) for lookup, _ in self._lookups]
        for job, ((_, table), ids) in enumerate(zip(self._lookups, all_ids, strict=True)):
            check_ids(ids, None, table.rows, job)
        for (lookup, table), ids in zip(self._lookups, all_ids, strict=True):
            out = np.frombuffer(outputs, np.uint8, lookup.ids * table.row_bytes, lookup.out_at)
            out.reshape(-1, table.row_bytes)[:] = table.packed[ids]


class Checked(NamedTuple):
    """One lookup of a plan, its inputs checked. table: whose ids are row numbers; lengths None: not pooled; out: where its
    vectors go, [outputs, dim], of any stride from one to the next."""

    table: Table
    pooling: Pooling
    ids: Ids
    lengths: Lengths | None
    weights: NDArray[np.float32] | None
    out: Floats


class CpuPlan(Plan):
    """Lookups of a backend that has no plans of its own: all inputs are checked first, as the contract asks, and then looked up
    one after another, or as `look_up` does it."""

    def __init__(self, planner: "CpuPlanner", places: Sequence[Place]) -> None:
        self._planner, self._places = planner, places

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        kinds = zip(self._planner.kinds, self._planner.tables, self._places, strict=True)
        checked = [_check(job, *of_it, inputs, outputs) for job, of_it in enumerate(kinds)]
        for place, (_, found, _) in zip(self._places, checked, strict=True):
            if place.found_at >= 0:
                np.frombuffer(outputs, np.bool_, place.ids, place.found_at)[:] = True if found is None else found
        self._planner.look_up([one for one, _, _ in checked])
        unfound = [lacks for _, _, lacks in checked]
        return unfound if any(map(any, unfound)) else None


class CpuPlanner(Planner):
    """What lookups of some kinds read, and who looks them up."""

    def __init__(self, backend: Backend, kinds: Sequence[Lookup | LookupKind], threads: int) -> None:
        self.backend, self.kinds, self.tables, self.threads = backend, tuple(kinds), host_tables(kinds), threads

    def plan(self, places: Any, out_bytes: int = 0) -> Plan:
        rows = np.frombuffer(places, np.int64).reshape(len(self.kinds), len(Place._fields)).tolist()
        return CpuPlan(self, [Place(*row) for row in rows])

    def look_up(self, lookups: Sequence[Checked]) -> None:
        """Writes the vectors of all lookups, one of each kind."""
        for table, pooling, ids, lengths, weights, out in lookups:
            how: dict[str, Any] = {"pooling": pooling, "weights": weights, "half": out.dtype == np.float16}
            if out.flags.c_contiguous:
                self.backend.lookup(table, ids, lengths, out=out, threads=self.threads, **how)
            else:
                out[:] = self.backend.lookup(table, ids, lengths, threads=self.threads, **how)


def _check(
    job: int, kind: Lookup | LookupKind, table: Table, place: Place, inputs: Any, outputs: Any
) -> tuple[Checked, NDArray[np.bool_] | None, Unfound]:
    """A lookup, which of its ids have a row (None: all), and how many do not. BadIds: an id or a length is wrong."""
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
    out: Floats
    if kind.out_row_bytes is None:
        out = np.frombuffer(outputs, dtype, vectors * table.dim, place.out_at).reshape(-1, table.dim)
    else:
        out = np.ndarray((vectors, table.dim), dtype, outputs, place.out_at, (kind.out_row_bytes, dtype.itemsize))
    return Checked(table, kind.pooling, rows, lengths, weights, out), found, lacks
