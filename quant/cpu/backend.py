"""What the CPU's backends share: the tables that they read, and plans made of one lookup after another."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import (
    Backend,
    Bytes,
    Lookup,
    LookupKind,
    Plan,
    Pooling,
    Precision,
    RowSource,
    Table,
    Unfound,
    by_row_number,
    check_ids,
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
        return _OneByOne(self, lookups, threads)

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


class _OneByOne(Plan):
    """A plan for backends that look up one table at a time. All inputs are checked first, as the contract asks."""

    def __init__(self, backend: Backend, lookups: Sequence[Lookup], threads: int) -> None:
        self._backend, self._threads = backend, threads
        self._lookups = list(zip(lookups, host_tables(lookups), strict=True))

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        parsed = []
        unfound: list[Unfound] = []
        marks: list[tuple[Lookup, NDArray[np.bool_] | None]] = []
        for job, (lookup, table) in enumerate(self._lookups):
            ids = np.frombuffer(inputs, np.int64, lookup.ids, lookup.ids_at)
            if lookup.pooling is Pooling.NONE:
                lengths = None
            elif lookup.lengths_at is None:
                lengths = np.full(lookup.bags, lookup.bag_length, np.int32)
            else:
                lengths = np.frombuffer(inputs, np.int32, lookup.bags, lookup.lengths_at)
            weights = None if lookup.weights_at is None else np.frombuffer(inputs, np.float32, lookup.ids, lookup.weights_at)
            rows, found, lacks = rows_of(table, ids, lengths, job)
            unfound.append(lacks)
            parsed.append((lookup, host_table(by_row_number(table)), rows, lengths, weights))
            marks.append((lookup, found))
        for lookup, found in marks:
            if lookup.found_at is not None:
                np.frombuffer(outputs, np.bool_, lookup.ids, lookup.found_at)[:] = True if found is None else found
        for lookup, table, ids, lengths, weights in parsed:
            half = lookup.precision is Precision.FP16
            dtype = np.float16 if half else np.float32
            how: dict[str, Any] = {"pooling": lookup.pooling, "weights": weights, "half": half, "threads": self._threads}
            if lookup.out_row_bytes is None:
                out = np.frombuffer(outputs, dtype, lookup.outputs * table.dim, lookup.out_at).reshape(-1, table.dim)
                self._backend.lookup(table, ids, lengths, out=out, **how)
            else:
                shape, strides = (lookup.outputs, table.dim), (lookup.out_row_bytes, np.dtype(dtype).itemsize)
                apart = np.ndarray(shape, dtype, outputs, lookup.out_at, strides)
                apart[:] = self._backend.lookup(table, ids, lengths, **how)
        return unfound if any(map(any, unfound)) else None
