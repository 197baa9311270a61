"""FBGEMM's CPU operators behind our contract. The only file that imports fbgemm_gpu for lookups and quantizing.

Importing it checks that the installed fbgemm and torch belong together (`quant.installed`); without torch it does not import.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant import contract
from tableside.quant.contract import Bytes, Floats, Ids, Lengths, Pooling, RowSource, Table
from tableside.quant.cpu import reference
from tableside.quant.cpu.backend import CpuBackend, host_table
from tableside.quant.errors import MissingBackend, QuantError
from tableside.quant.installed import check_pair
from tableside.quant.row_format import FP8_EXPONENT_BIAS, FP8_EXPONENT_BITS, FP8_MAX, ROW_ALIGNMENT_BYTES, RowFormat, Source

check_pair()
try:
    import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
except ImportError as error:
    raise MissingBackend(f"fbgemm does not import ({error}); install tableside[fbgemm], or choose another backend") from error

SPARSE_TYPES = {f: SparseType[f.name] for f in RowFormat}
_POOLING = {Pooling.NONE: PoolingMode.NONE, Pooling.SUM: PoolingMode.SUM, Pooling.MEAN: PoolingMode.MEAN}
_NO_WEIGHTS = torch.empty(0, dtype=torch.uint8)


def _pack(x: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """fp32 [n, dim] -> uint8 [n, used bytes], scale and bias moved to the front."""
    ops = torch.ops.fbgemm
    if row_format is RowFormat.INT8:
        q = ops.FloatToFused8BitRowwiseQuantized(x)
        return torch.cat([q[:, -8:].view(torch.float32).half().view(torch.uint8), q[:, : x.shape[1]]], dim=1)
    if row_format.has_scale:
        if x.shape[1] * row_format.bits % 16:
            raise QuantError(
                f"dim {x.shape[1]} in {row_format.label} is not a multiple of {16 // row_format.bits}, which FBGEMM needs"
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
        contract.check_quantize(values, source, row_format, out)
        x = reference.as_fp32(values, source).contiguous()
        reference.check_representable(x, row_format)
        packed = _pack(x, row_format)
        out[:, : packed.shape[1]] = packed.numpy()
        out[:, packed.shape[1] :] = 0

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
        out = contract.check_arguments(table, ids, lengths, pooling, weights, half, out)
        ids, _, _ = contract.rows_of(table, ids, lengths)
        offsets = torch.arange(ids.size + 1)
        if lengths is not None:
            offsets = torch.zeros(lengths.size + 1, dtype=torch.int64)
            torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=offsets[1:])
        out[:] = operator(host_table(table), half)(
            torch.tensor(ids), offsets, _POOLING[pooling], None if weights is None else torch.tensor(weights)
        ).numpy()
        return out


def operator(table: Table, half: bool = False) -> Any:
    """FBGEMM's raw operator bound to one table: f(ids, offsets, pooling mode, weights | None) -> [bags, dim].

    Nothing is checked: ids out of range read out of bounds. The caller keeps `table` alive.
    """
    # A segment is mapped read-only and its array says so; torch warns of that, though the operator never writes.
    memory = (ctypes.c_uint8 * table.packed.size).from_address(table.address)
    packed = torch.frombuffer(memory, dtype=torch.uint8)
    widest = {f: table.dim if f is table.row_format else 0 for f in RowFormat}
    fixed = (
        packed,
        _NO_WEIGHTS,
        torch.tensor([EmbeddingLocation.HOST.value], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([SPARSE_TYPES[table.row_format].as_int()], dtype=torch.uint8),
        torch.tensor([0, table.dim], dtype=torch.int32),
        table.dim,
        widest[RowFormat.INT2],
        widest[RowFormat.INT4],
        widest[RowFormat.INT8],
        widest[RowFormat.FP16],
        widest[RowFormat.FP32],
    )
    output_dtype = (SparseType.FP16 if half else SparseType.FP32).as_int()
    fp8 = (widest[RowFormat.FP8], FP8_EXPONENT_BITS, FP8_EXPONENT_BIAS)
    lookup = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default

    def call(ids: torch.Tensor, offsets: torch.Tensor, mode: Any, weights: torch.Tensor | None) -> torch.Tensor:
        result = lookup(*fixed, ids, offsets, mode.value, weights, output_dtype, None, None, ROW_ALIGNMENT_BYTES, *fp8)
        return torch.as_tensor(result)

    return call
