"""`RowFormat`: the only place that knows the bytes of a row and the position of scale and bias.
It is FBGEMM's inference layout, so its kernels and ours read the same bytes. Its `row_alignment` is 4, or
16 for rows that a GPU reads in host memory:
    int2, int4, int8   fp16 scale | fp16 bias | values, low bits first | zeros to a multiple of it
    fp8                values (sign, 4 exponent bits with bias 7, 3 mantissa; no inf, largest 240) | zeros
    fp16, fp32         values | zeros
    fp8_e4m3           fp32 scale | values (E4M3FN: as fp8's, largest 448, no 0x7f or 0xff) | zeros
    fp8_e4m3_block32   values (E4M3FN) | ue8m0 scales, one for 32 values | zeros
    nvfp4              values (e2m1, low bits first) | fp32 scale | e4m3 scales, one for 16 values | zeros
    value = q * scale + bias     (int2, int4, int8)
    value = q * scale            (fp8_e4m3, fp8_e4m3_block32)
    value = q * (block's scale * row's scale)   (nvfp4)
The scales of the last three are not negative. OCP's formats: Microscaling v1.0 (E4M3, UE8M0, E2M1); NVFP4 as
NVIDIA's ModelOpt writes it. A scale of a whole table is each row's: so rows of any origin lie beside each
other, and a delta's may be larger than its table's.
"""

from enum import IntEnum
from functools import cache

from tableside.quant.errors import QuantError

GPU_ALIGNMENT, ALIGNMENTS = 16, (4, 16)  # bytes
HEAD_BYTES = 4  # before the values: fp16 scale and bias, or an fp32 scale
FP8_EXPONENT_BITS, FP8_EXPONENT_BIAS, FP8_MAX = 4, 7, 240.0
FP16_MAX, FP32_MAX = 65504.0, (2 - 2**-23) * 2.0**127
E4M3_MAX, E2M1_MAX = 448.0, 6.0
SCALED_MAX = 2.0**126  # of formats with an fp32 or ue8m0 scale, so that no product is infinite
# Scale, quotient and product are fp32, and half a step is a 28th of the value or more; scales reach 2 ** -126
_ROUNDED, _TINY_SCALE = 1 + 2.0**-17, 2.0**-121
_HALF_RELATIVE, _HALF_TINY = 2.0**-11, 2.0**-25  # rounding to fp16: half a step, relative or of a subnormal


class RowFormat(IntEnum):
    """Storage format of a row. The native kernel uses the same values (`_rows.h`)."""

    INT2 = 0
    INT4 = 1
    INT8 = 2
    FP8 = 3
    FP16 = 4
    FP32 = 5
    FP8_E4M3 = 6
    FP8_E4M3_BLOCK32 = 7
    NVFP4 = 8

    @classmethod
    def parse(cls, name: str) -> "RowFormat":
        """The format called `name` ("int8"); QuantError names the known ones."""
        try:
            return cls[name.upper()]
        except (KeyError, AttributeError):
            known = ", ".join(f.label for f in cls)
            raise QuantError(f"row format {name!r} is unknown; expected one of: {known}") from None

    @property
    def label(self) -> str:
        """The name used in model.toml and everywhere a person reads it."""
        return self.name.lower()

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return (2, 4, 8, 8, 16, 32, 8, 8, 4)[self]

    @property
    def has_bias(self) -> bool:
        """True if a row begins with an fp16 scale and an fp16 bias."""
        return self <= RowFormat.INT8

    @property
    def block(self) -> int:
        """Values that share a scale, of which a row holds whole blocks; 0: there are no blocks."""
        return {RowFormat.FP8_E4M3_BLOCK32: 32, RowFormat.NVFP4: 16}.get(self, 0)

    @property
    def largest(self) -> float:
        """Of the absolute values that a row can hold."""
        if self is RowFormat.FP8:
            return FP8_MAX
        if self is RowFormat.FP32:
            return FP32_MAX
        return SCALED_MAX if self >= RowFormat.FP8_E4M3 else FP16_MAX

    def value_bytes(self, dim: int) -> int:
        """Bytes of a row's values and of what lies before them: without the scales of blocks behind them."""
        return (HEAD_BYTES if self.has_bias or self is RowFormat.FP8_E4M3 else 0) + dim * self.bits // 8

    def used_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` values before the padding."""
        of_blocks = dim // self.block if self.block else 0
        return self.value_bytes(dim) + (4 if self is RowFormat.NVFP4 else 0) + of_blocks

    def row_bytes(self, dim: int, alignment: int = GPU_ALIGNMENT) -> int:
        """Returns the bytes of a row, padding included. alignment: of ALIGNMENTS. QuantError: `dim` does not
        fill whole bytes."""
        if dim < 1:
            raise QuantError(f"dim is {dim}; expected at least 1")
        whole = self.block or max(1, 8 // self.bits)
        if dim % whole:
            what = "blocks" if self.block else "bytes"
            raise QuantError(
                f"dim {dim} does not fill whole {what} in {self.label}; expected a multiple of {whole}, or "
                "another format"
            )
        return -(-self.used_bytes(dim) // alignment) * alignment

    @cache
    def row_sizes(self, dim: int) -> tuple[int, ...]:
        """Returns the bytes that a row may have, one for each of ALIGNMENTS, ascending and distinct."""
        return tuple(dict.fromkeys(self.row_bytes(dim, alignment) for alignment in ALIGNMENTS))

    def alignments(self, dim: int, row_bytes: int) -> frozenset[int]:
        """Returns those of ALIGNMENTS whose rows have so many bytes."""
        return frozenset(a for a in ALIGNMENTS if self.row_bytes(dim, a) == row_bytes)

    def error_bound(self, low: float, high: float) -> float:
        """Returns the largest |dequantized - original| for a row with values in [low, high]: half a step,
        plus fp16's rounding of the bias and, `levels` times, of the scale."""
        largest = max(abs(low), abs(high))
        if self is RowFormat.FP32:
            return 0.0
        if self is RowFormat.FP16:
            return max(largest * _HALF_RELATIVE, _HALF_TINY)
        if self is RowFormat.FP8:
            return max(largest * 0.0625, 2.0**-10)
        if self is RowFormat.FP8_E4M3:  # half a step below 448 is 16
            return largest * (16.0 / E4M3_MAX * _ROUNDED) + _TINY_SCALE
        if self is RowFormat.FP8_E4M3_BLOCK32:
            return largest * 0.0625 + _TINY_SCALE
        if self is RowFormat.NVFP4:  # half a step below 6 is 1; the block's scale is off by a 16th
            return largest * (1.0625 / E2M1_MAX * _ROUNDED) + _TINY_SCALE
        levels = int(2**self.bits) - 1
        bias_error = max(abs(low) * _HALF_RELATIVE, _HALF_TINY)
        step = (high - low + bias_error) / levels
        scale_error = max(step * _HALF_RELATIVE, _HALF_TINY)
        fp32_error = 4 * largest * 2.0**-23
        return (step + scale_error) / 2 + levels * scale_error + 2 * bias_error + fp32_error


def device_row_bytes(row_bytes: int) -> int:
    """Returns the bytes of a packed row in HBM, which is padded there if it was not."""
    return -(-row_bytes // GPU_ALIGNMENT) * GPU_ALIGNMENT


class Source(IntEnum):
    """Formats that values are quantized from. The values are shared with the native kernel. Those of packed
    rows come as uint8 [rows, `row_bytes`]; into their own format they are copied."""

    FP16 = 4
    FP32 = 5
    FP8_E4M3 = 6
    FP8_E4M3_BLOCK32 = 7
    NVFP4 = 8
    BF16 = 9

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def packed(self) -> RowFormat | None:
        """The format of its rows; None: they are values one after another."""
        return RowFormat(self) if Source.FP32 < self < Source.BF16 else None

    @property
    def item_bytes(self) -> int:
        """Bytes of one item of an array of its rows: a value, or a byte of packed rows."""
        return 1 if self.packed is not None else 4 if self is Source.FP32 else 2

    def items(self, dim: int) -> int:
        """Items of a row of `dim` values."""
        return dim if self.packed is None else self.packed.used_bytes(dim)

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` values."""
        return self.items(dim) * self.item_bytes

    def dim_of(self, items: int) -> int:
        """Values of a row of so many items. QuantError: no row has so many."""
        if self.packed is None:
            return items
        block, dim = self.packed.block, items - self.packed.used_bytes(0)
        if block:
            dim = dim // (block * self.packed.bits // 8 + 1) * block
        if dim < 1 or self.items(dim) != items:
            raise QuantError(f"{items:,} bytes are no row of {self.label}, whatever its dim")
        return dim
