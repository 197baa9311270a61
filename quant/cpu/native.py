"""Our own CPU kernel (`_native*.c`): gather, dequantize and pool in one pass, and the quantizer.

Pooled sums are computed in FBGEMM's order, so unweighted results are equal to its bit for bit where the processor has
AVX-512 or AVX2; elsewhere, and with weights at odd widths, they differ by rounding (docs/format.md states the bound).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant import contract
from tableside.quant.contract import Bytes, CpuBackend, Floats, Ids, Lengths, Lookup, Plan, Pooling, Table
from tableside.quant.errors import BadIds, MissingBackend, Problem
from tableside.quant.row_format import RowFormat, Source

try:
    from tableside.quant.cpu import _native
except ImportError as error:  # the extension is optional: installing works without a compiler
    raise MissingBackend(
        "the native kernel was not built when tableside was installed (no C compiler?); "
        "install gcc and reinstall tableside, or choose --backend fbgemm"
    ) from error

_PROBLEMS = (None, Problem.ID, Problem.LENGTH, Problem.SUM)


def _raise(verdict: tuple[int, int, int, int], tables: Sequence[Table], counts: Sequence[int]) -> None:
    job, kind, position, value = verdict
    problem = _PROBLEMS[kind]
    assert problem is not None
    bound = {Problem.ID: tables[job].rows, Problem.LENGTH: 0, Problem.SUM: counts[job]}[problem]
    raise BadIds(problem, job, position, value, bound)


_PACKED = 7  # a format of the kernel: any row, copied as it is


class _NativePlan(Plan):
    def __init__(self, lookups: tuple[Lookup, ...], threads: int, packed: bool = False) -> None:
        self.tables = [lk.host_table for lk in lookups]  # keeps their memory alive
        self.counts = [lk.ids for lk in lookups]
        self.threads = threads
        rows = [
            (
                lk.table.address,
                lk.table.rows,
                lk.table.row_bytes,
                lk.table.row_bytes // 4 if packed else lk.table.dim,
                _PACKED if packed else lk.table.row_format,
                lk.pooling,
                lk.ids_at,
                lk.ids,
                -1 if lk.lengths_at is None else lk.lengths_at,
                lk.bag_length,
                lk.bags,
                -1 if lk.weights_at is None else lk.weights_at,
                lk.out_at,
                lk.table.row_bytes if packed else lk.table.dim * lk.precision.bytes,
                lk.precision,
            )
            for lk in lookups
        ]
        self.jobs = np.array(rows, dtype=np.int64).tobytes()

    def run(self, inputs: Any, outputs: Any) -> None:
        if verdict := _native.run(self.jobs, inputs, outputs, self.threads):
            _raise(verdict, self.tables, self.counts)


class Native(CpuBackend):
    """The compiled kernel, on the widest vectors that the processor has."""

    name = "native"

    def __init__(self) -> None:
        self._isa: str = _native.isas()[0]

    @property
    def description(self) -> str:
        return f"native ({self._isa})"

    def quantize(self, values: NDArray[Any], source: Source, row_format: RowFormat, out: Bytes) -> None:
        contract.check_quantize(values, source, row_format, out)
        rows, dim = values.shape
        bad = _native.quantize(row_format, source, values, rows, dim, out, out.shape[1])
        if bad >= 0:
            raise contract.not_representable(bad, row_format)

    def lookup(
        self,
        table: Table,
        ids: Ids,
        lengths: Lengths | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        weights: NDArray[np.float32] | None = None,
        half: bool = False,
        out: Floats | None = None,
        threads: int = 1,
    ) -> Floats:
        out = contract.check_arguments(table, ids, lengths, pooling, weights, half, out)
        rows, row_bytes = table.packed.shape
        verdict = _native.lookup(
            table.address,
            rows,
            row_bytes,
            table.dim,
            table.row_format,
            pooling,
            ids,
            lengths,
            weights,
            out,
            half,
            threads,
        )
        if verdict:
            _raise(verdict, (table,), (ids.size,))
        return out

    def plan(self, lookups: Sequence[Lookup], threads: int = 1, out_bytes: int = 0) -> Plan:
        return _NativePlan(tuple(lookups), threads)

    def gather(self, lookups: Sequence[Lookup], threads: int = 1) -> Plan:
        return _NativePlan(tuple(lookups), threads, packed=True)
