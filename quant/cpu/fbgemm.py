"""FBGEMM's CPU operators behind our contract; no other file imports fbgemm_gpu for lookups and quantizing.
The import fails without torch or if the installed versions do not match (`quant.installed`)."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.contract import (
    Bytes,
    Floats,
    Ids,
    Lengths,
    Lookup,
    LookupKind,
    Pooling,
    Precision,
    Table,
)
from tableside.quant.cpu.backend import (
    CheckedLookup,
    CpuBackend,
    CpuPlanner,
    check_quantize,
    not_representable,
)
from tableside.quant.cpu.checked import plain_rows, rows_of
from tableside.quant.cpu.native import Native
from tableside.quant.errors import MissingBackend, QuantError
from tableside.quant.installed import check_pair
from tableside.quant.row_format import (
    FP8_EXPONENT_BIAS,
    FP8_EXPONENT_BITS,
    FP8_MAX,
    RowFormat,
    Source,
)

check_pair()
try:
    import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
except ImportError as error:
    raise MissingBackend(
        f"fbgemm does not import ({error}); install tableside[fbgemm], or choose another backend"
    ) from error

SPARSE_TYPES = {f: SparseType[f.name] for f in RowFormat if f <= RowFormat.FP32}
_POOLING = {Pooling.NONE: PoolingMode.NONE, Pooling.SUM: PoolingMode.SUM, Pooling.MEAN: PoolingMode.MEAN}
_BOUND = (
    64  # operators that a planner keeps: kinds of one request that have as many bags, in all their groupings
)
_NO_WEIGHTS = torch.empty(0, dtype=torch.uint8)


def _check_formats(*row_formats: RowFormat) -> None:
    for row_format in row_formats:
        if row_format not in SPARSE_TYPES:
            raise QuantError(f"FBGEMM has no {row_format.label}; choose the backend native")


def _pack(x: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """fp32 [n, dim] -> uint8 [n, used bytes], scale and bias moved to the front."""
    ops = torch.ops.fbgemm
    if row_format is RowFormat.INT8:
        q = ops.FloatToFused8BitRowwiseQuantized(x)
        return torch.cat(
            [q[:, -8:].contiguous().view(torch.float32).half().view(torch.uint8), q[:, : x.shape[1]]], dim=1
        )
    if row_format.has_bias:
        if x.shape[1] * row_format.bits % 16:
            raise QuantError(
                f"dim {x.shape[1]} in {row_format.label} is not a multiple of {16 // row_format.bits}, which "
                "FBGEMM needs"
            )
        q = ops.FloatToFusedNBitRowwiseQuantizedSBHalf(x, row_format.bits)
        return torch.cat([q[:, -4:], q[:, :-4]], dim=1)
    if row_format is RowFormat.FP8:
        return torch.as_tensor(ops.FloatToHFP8Quantized(x, FP8_EXPONENT_BITS, FP8_EXPONENT_BIAS, FP8_MAX))
    return x.to(torch.float16 if row_format is RowFormat.FP16 else torch.float32).view(torch.uint8)


class Fbgemm(CpuBackend):
    """FBGEMM's inference operator and quantizers; one thread, whatever is asked."""

    name = "fbgemm"

    def quantize(self, values: NDArray[Any], source: Source, row_format: RowFormat, out: Bytes) -> None:
        check_quantize(values, source, row_format, out)
        if source.packed is not None:
            raise QuantError(f"FBGEMM has no {source.label}; choose the backend native")
        _check_formats(row_format)
        is_bf16 = source is Source.BF16
        given = torch.from_numpy(values.view(np.int16) if is_bf16 else values)
        x = (given.view(torch.bfloat16) if is_bf16 else given).float()
        if (bad := torch.nonzero(~(x.abs() <= row_format.largest).all(1))).numel():
            raise not_representable(int(bad[0]), row_format)
        packed = _pack(x, row_format)
        out[:, : packed.shape[1]] = packed.numpy()
        out[:, packed.shape[1] :] = 0

    def write_vectors(
        self, table: Table, ids: Ids, lengths: Lengths | None, pooling: Pooling,
        weights: NDArray[np.float32] | None, out: Floats, threads: int,
    ) -> None:  # fmt: skip
        plain, rows = plain_rows(table, rows_of(table, ids, lengths)[0])
        bound = operator(plain, out.dtype == np.float16)
        _call(bound, [CheckedLookup(plain, pooling, rows, lengths, weights, out)])

    def memory_planner(self, kinds: Sequence[Lookup | LookupKind], threads: int) -> CpuPlanner:
        return _Planner(kinds)


class _Planner(CpuPlanner):
    """Runs pooled lookups with equal bag counts as one operator call. It reuses an operator for calls with
    the same tables."""

    def __init__(self, kinds: Sequence[Lookup | LookupKind]) -> None:
        super().__init__(kinds)
        tables, precisions = self.tables, [kind.precision for kind in kinds]
        self._are_alike = bool(_alignments(*tables)) if tables else True
        self._bound = lru_cache(_BOUND)(
            lambda *kinds: operator([tables[kind] for kind in kinds], precisions[kinds[0]] is Precision.FP16)
        )

    def look_up(self, lookups: Sequence[CheckedLookup], kinds: Sequence[int]) -> None:
        together: dict[Any, list[int]] = {}
        for job, one in enumerate(lookups):
            alike: Any = job
            if one.lengths is not None:
                alignment = self._are_alike or min(_alignments(one.table))
                alike = one.pooling, one.lengths.size, one.weights is None, one.out.dtype, alignment
            together.setdefault(alike, []).append(job)
        for jobs in together.values():
            of_call = [lookups[job] for job in jobs]
            _call(self._operator([kinds[job] for job in jobs], of_call), of_call)

    def _operator(self, kinds: Sequence[int], lookups: Sequence[CheckedLookup]) -> Any:
        maps = [self.tables[kind].row_map for kind in kinds]
        if any(m is not None and m.elsewhere for m in maps):
            return operator(
                [one.table for one in lookups], lookups[0].out.dtype == np.float16
            )  # of rows copied for this call
        return self._bound(*kinds)


def _call(bound: Any, lookups: Sequence[CheckedLookup]) -> None:
    """Writes the vectors of lookups by one call of an operator that is bound to their tables."""
    first = lookups[0]
    ids = _joined([one.ids for one in lookups])
    offsets = torch.arange(ids.numel() + 1)
    if first.lengths is not None:
        offsets = torch.zeros(len(lookups) * first.lengths.size + 1, dtype=torch.int64)
        torch.cumsum(_joined([one.lengths for one in lookups]).long(), 0, out=offsets[1:])
    weights = None if first.weights is None else _joined([one.weights for one in lookups])
    found = bound(ids, offsets, _POOLING[first.pooling], weights).numpy()
    at = 0
    for one in lookups:
        one.out[:] = found[:, at : at + one.table.dim]
        at += one.table.dim
        _keep_signs(one)


def _keep_signs(one: CheckedLookup) -> None:
    """Makes +0 in the vector of one row -0 again where the row has that. FBGEMM adds every row to +0."""
    if one.table.row_format.has_bias:
        return
    lengths = np.ones(one.ids.size, np.int64) if one.lengths is None else one.lengths.astype(np.int64)
    vectors = np.flatnonzero(lengths == 1)
    vectors = vectors[(one.out[vectors] == 0).any(axis=1)]  # the others are not looked at
    if not vectors.size:
        return
    at = (np.cumsum(lengths) - lengths)[vectors]
    rows = Native().lookup(one.table, one.ids[at], pooling=Pooling.NONE)
    one.out[vectors] = np.copysign(
        one.out[vectors], rows if one.weights is None else rows * one.weights[at, None]
    )


def _joined(arrays: Sequence[Any]) -> torch.Tensor:
    """Arrays of the operator's inputs one after another; they may be read-only, and are not written."""
    return torch.from_numpy(np.concatenate(arrays))


def _alignments(*tables: Table) -> frozenset[int]:
    """Returns the alignments that the rows of all these tables have."""
    return frozenset.intersection(*(t.row_format.alignments(t.dim, t.row_bytes) for t in tables))


def operator(tables: Table | Sequence[Table], half: bool = False) -> Any:
    """Returns FBGEMM's raw operator bound to `tables`: f(ids, offsets, pooling mode, weights | None) ->
    [bags, dims of all tables]. ids and offsets of all tables lie one after another, with equal bag counts.
    The operator checks nothing and reads out of bounds for wrong ids. The caller keeps `tables` alive, whose
    rows have one alignment. QuantError: FBGEMM lacks a table's format."""
    tables = (tables,) if isinstance(tables, Table) else tables
    _check_formats(*(t.row_format for t in tables))
    alignment = max(_alignments(*tables))
    # One view from the first table's memory to the last's: what lies between them, or nowhere, is never read.
    # A segment is mapped read-only and its array says so; torch warns of that, though the operator never
    # writes.
    start, end = min(t.address for t in tables), max(t.address + t.packed.size for t in tables)
    packed = torch.frombuffer((ctypes.c_uint8 * (end - start)).from_address(start), dtype=torch.uint8)
    widest = {f: max((t.dim for t in tables if t.row_format is f), default=0) for f in SPARSE_TYPES}
    dims = [0, *accumulate(t.dim for t in tables)]
    fixed = (
        packed,
        _NO_WEIGHTS,
        torch.full((len(tables),), EmbeddingLocation.HOST.value, dtype=torch.int32),
        torch.tensor([t.address - start for t in tables], dtype=torch.int64),
        torch.tensor([SPARSE_TYPES[t.row_format].as_int() for t in tables], dtype=torch.uint8),
        torch.tensor(dims, dtype=torch.int32),
        dims[-1],
        widest[RowFormat.INT2],
        widest[RowFormat.INT4],
        widest[RowFormat.INT8],
        widest[RowFormat.FP16],
        widest[RowFormat.FP32],
    )
    output_dtype = (SparseType.FP16 if half else SparseType.FP32).as_int()
    fp8 = (widest[RowFormat.FP8], FP8_EXPONENT_BITS, FP8_EXPONENT_BIAS)
    lookup = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default

    def call(
        ids: torch.Tensor, offsets: torch.Tensor, mode: Any, weights: torch.Tensor | None
    ) -> torch.Tensor:
        result = lookup(*fixed, ids, offsets, mode.value, weights, output_dtype, None, None, alignment, *fp8)
        return torch.as_tensor(result)

    return call
