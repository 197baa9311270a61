"""The specification of the CPU's backends, in plain torch: slow, short, and what they are tested against.

Sums are accumulated in fp64, so that its only rounding is the last one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant import choose
from tableside.quant.contract import (
    Bytes,
    Floats,
    Ids,
    Lengths,
    Lookup,
    LookupKind,
    Planner,
    Pooling,
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
from tableside.quant.row_format import RowFormat, Source


def unpack(packed: torch.Tensor, row_format: RowFormat, dim: int) -> torch.Tensor:
    """Packed rows uint8 [n, row_bytes] -> fp32 [n, dim]."""
    if not len(packed):
        return torch.empty(0, dim)
    used = packed[:, : row_format.used_bytes(dim)].contiguous()
    if row_format is RowFormat.FP32:
        return used.view(torch.float32)
    if row_format is RowFormat.FP16:
        return used.view(torch.float16).float()
    if row_format is RowFormat.FP8:
        wide = used.to(torch.int16)
        half = (wide & 0x80) << 8 | (
            wide & 0x7F
        ) << 7  # the same bits in fp16, whose exponent bias is 15, not 7
        return half.view(torch.float16).float() * 256.0
    if row_format >= RowFormat.FP8_E4M3:
        return _unpack_scaled(used, row_format, dim)
    scale_bias = used[:, :4].contiguous().view(torch.float16).float()
    per_byte = 8 // row_format.bits
    shifts = torch.arange(per_byte) * row_format.bits
    q = (used[:, 4:, None].to(torch.int32) >> shifts) & (2**row_format.bits - 1)
    fused = q.reshape(len(used), dim).double() * scale_bias[:, :1].double() + scale_bias[:, 1:].double()
    return torch.as_tensor(fused.float())


def _unpack_scaled(used: torch.Tensor, row_format: RowFormat, dim: int) -> torch.Tensor:
    if row_format is RowFormat.FP8_E4M3:
        scale = used[:, :4].contiguous().view(torch.float32)
        return used[:, 4:].contiguous().view(torch.float8_e4m3fn).float() * scale
    scales = used[:, used.shape[1] - dim // row_format.block :].contiguous()
    if row_format is RowFormat.FP8_E4M3_BLOCK32:
        values = used[:, :dim].contiguous().view(torch.float8_e4m3fn).float()
        of_blocks = scales.view(torch.float8_e8m0fnu).float()
    else:
        codes = used[:, : dim // 2, None] >> torch.tensor([0, 4]) & 15
        values = torch.where(codes >= 8, -1.0, 1.0) * _E2M1[(codes & 7).long()]
        of_blocks = scales.view(torch.float8_e4m3fn).float() * used[
            :, dim // 2 : dim // 2 + 4
        ].contiguous().view(torch.float32)
    return (values.reshape(len(used), -1, row_format.block) * of_blocks[:, :, None]).reshape(len(used), dim)


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_TINY = 2.0**-126


def _pack_scaled(x: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """As the quantizers of OCP's and NVIDIA's formats do, by torch's own casts."""
    largest = x.abs().amax(1, keepdim=True)
    if row_format is RowFormat.FP8_E4M3:
        scale = (largest / 448.0).clamp(min=_TINY)
        return torch.cat([scale.view(torch.uint8), (x / scale).to(torch.float8_e4m3fn).view(torch.uint8)], 1)
    blocks = x.reshape(len(x), -1, row_format.block)
    of_block = blocks.abs().amax(2)
    if row_format is RowFormat.FP8_E4M3_BLOCK32:
        mantissa, exponent = torch.frexp(of_block.double() / 448.0)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.exp2(torch.where(of_block == 0, -126, exponent).clamp(min=-126).double()).float()
        values = (blocks / scale[:, :, None]).to(torch.float8_e4m3fn).reshape(len(x), -1)
        return torch.cat([values.view(torch.uint8), scale.to(torch.float8_e8m0fnu).view(torch.uint8)], 1)
    scale = (largest / 2688.0).clamp(min=_TINY)
    scales = (of_block / 6.0 / scale).to(torch.float8_e4m3fn)
    step = (scales.float() * scale)[:, :, None]
    y = torch.where(step == 0, 0.0, blocks / torch.where(step == 0, 1.0, step))
    distance = (y.abs().double()[..., None] - _E2M1.double()).abs()
    # The nearest; of two that are as near the even one, which is the first or the second of the two
    nearest = distance.argmin(-1)
    tied = (distance == distance.amin(-1, keepdim=True)).sum(-1) == 2
    nearest = torch.where(tied & (nearest % 2 == 1), nearest + 1, nearest)
    codes = (nearest | torch.where(torch.signbit(blocks) & (step != 0), 8, 0)).reshape(len(x), -1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return torch.cat([packed, scale.view(torch.uint8), scales.view(torch.uint8)], 1)


def _pack_ints(x: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    levels = 2**row_format.bits - 1
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    bias = low.half()
    if row_format is RowFormat.INT8:
        scale = ((high - low) / 255.0).half()
        levels_fp32 = torch.tensor(
            255.0
        )  # a Python number would divide as a reciprocal times 255: two roundings
        q = torch.round((x - low) * (levels_fp32 / (high - low + 1e-8)))
    else:
        span = high - bias.float()
        scale = torch.where(span == 0, 1.0, span / levels).half()
        scale = torch.where((scale == 0) | torch.isinf(1.0 / scale.float()), torch.ones_like(scale), scale)
        q = torch.round((x - bias.float()) * (1.0 / scale.float()))
    q = q.clamp(0, levels).to(torch.uint8)
    per_byte = 8 // row_format.bits
    grouped = q.reshape(len(q), -1, per_byte)
    packed = torch.zeros(grouped.shape[:2], dtype=torch.uint8)
    for i in range(per_byte):
        packed |= grouped[:, :, i] << (i * row_format.bits)
    return torch.cat([scale.view(torch.uint8), bias.view(torch.uint8), packed], dim=1)


def _pack_fp8(x: torch.Tensor) -> torch.Tensor:
    # Exponent bias 7 in 4 bits is fp16's 15 less 8: scaled by 2^-8, an fp8 is the upper byte of an fp16,
    # without bit 6's carry.
    magnitude = x.abs().double()
    exponent = torch.floor(torch.log2(magnitude.clamp(min=2.0**-6)))
    step = torch.exp2(exponent - 3)
    rounded = torch.round(magnitude / step) * step  # torch.round: to even
    half = (rounded / 256.0).half().view(torch.int16).to(torch.int32)
    sign = torch.signbit(x).to(torch.int32) << 7
    return (half >> 7 | sign).to(torch.uint8)


def pack(x: torch.Tensor, row_format: RowFormat, row_bytes: int) -> torch.Tensor:
    """fp32 [n, dim] -> packed rows uint8 [n, row_bytes]. Values are taken to be representable."""
    if row_format is RowFormat.FP32:
        used = x.contiguous().view(torch.uint8)
    elif row_format is RowFormat.FP16:
        used = x.half().view(torch.uint8)
    elif row_format is RowFormat.FP8:
        used = _pack_fp8(x)
    elif row_format >= RowFormat.FP8_E4M3:
        used = _pack_scaled(x, row_format)
    else:
        used = _pack_ints(x, row_format)
    return torch.nn.functional.pad(used, (0, row_bytes - used.shape[1]))


def as_fp32(values: NDArray[Any], source: Source) -> torch.Tensor:
    """fp32, fp16, or bf16 held as uint16, [rows, dim], or packed rows -> fp32."""
    if source.packed is not None:
        return unpack(torch.from_numpy(values), source.packed, source.dim_of(values.shape[1]))
    if source is Source.BF16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(values).float()


def check_representable(x: torch.Tensor, row_format: RowFormat) -> None:
    """Raises for the first row with a value that `row_format` cannot represent."""
    if (bad := torch.nonzero(~(x.abs() <= row_format.largest).all(1))).numel():
        raise not_representable(int(bad[0]), row_format)


class Reference(CpuBackend):
    """Plain torch."""

    name = "reference"

    def quantize(self, values: NDArray[Any], source: Source, row_format: RowFormat, out: Bytes) -> None:
        check_quantize(values, source, row_format, out)
        x = as_fp32(values, source)
        check_representable(x, row_format)
        out[:] = pack(x, row_format, out.shape[1]).numpy()

    def write_vectors(
        self, table: Table, ids: Ids, lengths: Lengths | None, pooling: Pooling,
        weights: NDArray[np.float32] | None, out: Floats, threads: int,
    ) -> None:  # fmt: skip
        plain, rows = plain_rows(table, rows_of(table, ids, lengths)[0])
        vectors = unpack(torch.from_numpy(plain.packed[rows]), table.row_format, table.dim)
        if lengths is not None:
            terms = vectors.double()
            if weights is not None:
                terms = terms * torch.from_numpy(weights.copy()).double()[:, None]
            counts = torch.from_numpy(lengths.astype(np.int64))
            bag_of_id = torch.repeat_interleave(torch.arange(len(counts)), counts)
            begin = torch.where(
                counts == 1, -0.0, 0.0
            ).double()  # the sum of one row is that row, and x + -0 is x
            sums = begin[:, None].repeat(1, table.dim).index_add_(0, bag_of_id, terms)
            vectors = sums / counts.clamp(min=1)[:, None] if pooling is Pooling.MEAN else sums
        out[:] = vectors.to(torch.float16 if out.dtype == np.float16 else torch.float32).numpy()

    def memory_planner(self, kinds: Sequence[Lookup | LookupKind], threads: int) -> Planner:
        return _Planner(kinds)


class _Planner(CpuPlanner):
    """One lookup after another."""

    def look_up(self, lookups: Sequence[CheckedLookup], kinds: Sequence[int]) -> None:
        for table, pooling, ids, lengths, weights, out in lookups:
            half = out.dtype == np.float16
            out[:] = REFERENCE.lookup(table, ids, lengths, pooling=pooling, weights=weights, half=half)


REFERENCE = Reference()


def backend_of(name: str) -> CpuBackend:
    """The product's backend of this name, or the reference."""
    return REFERENCE if name == "reference" else choose(name)
