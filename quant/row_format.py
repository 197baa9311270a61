"""`RowFormat`: the only place that knows the bytes of a row and the position of scale and bias.
It is FBGEMM's inference layout, so its kernels and ours read the same bytes. Its `row_alignment` is 4, or
16 for rows that a GPU reads in host memory:
    int2, int4, int8   fp16 scale | fp16 bias | values, low bits first | zeros to a multiple of it
    fp8                values (sign, 4 exponent bits with bias 7, 3 mantissa; no inf, largest 240) | zeros
    fp16, fp32         values | zeros
    value = q * scale + bias   (int2, int4, int8)
"""

from enum import IntEnum

from tableside.quant.errors import QuantError

GPU_ALIGNMENT, ALIGNMENTS = 16, (4, 16)  # bytes
SCALE_BIAS_BYTES = 4
FP8_EXPONENT_BITS, FP8_EXPONENT_BIAS, FP8_MAX = 4, 7, 240.0
FP16_MAX = 65504.0
_HALF_RELATIVE, _HALF_TINY = 2.0**-11, 2.0**-25  # rounding to fp16: half a step, relative or of a subnormal


class RowFormat(IntEnum):
    """Storage format of a row. The native kernel uses the same values (`_rows.h`)."""

    INT2 = 0
    INT4 = 1
    INT8 = 2
    FP8 = 3
    FP16 = 4
    FP32 = 5

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
        return (2, 4, 8, 8, 16, 32)[self]

    @property
    def has_scale(self) -> bool:
        """True if a row begins with an fp16 scale and an fp16 bias."""
        return self <= RowFormat.INT8

    def used_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` values before the padding."""
        return (SCALE_BIAS_BYTES if self.has_scale else 0) + dim * self.bits // 8

    def row_bytes(self, dim: int, alignment: int = GPU_ALIGNMENT) -> int:
        """Returns the bytes of a row, padding included. alignment: of ALIGNMENTS. QuantError: `dim` does not
        fill whole bytes."""
        if dim < 1:
            raise QuantError(f"dim is {dim}; expected at least 1")
        if dim * self.bits % 8:
            raise QuantError(
                f"dim {dim} does not fill whole bytes in {self.label}; expected a multiple of "
                f"{8 // self.bits}, or another format"
            )
        return -(-self.used_bytes(dim) // alignment) * alignment

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
    """Formats that values are quantized from. The values are shared with the native kernel."""

    FP16 = 4
    FP32 = 5
    BF16 = 6

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def bytes(self) -> int:
        """Bytes of one value."""
        return 4 if self is Source.FP32 else 2
