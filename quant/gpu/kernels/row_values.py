"""Values of packed rows inside the lookup kernel, in Triton: from words to fp32 to the output.
tests/helpers/reference.py has every format in plain torch."""

import triton
import triton.language as tl

from tableside.quant.gpu.kernels.constants import (
    AS_FP16,
    AS_FP32,
    FORMAT_FP8,
    FORMAT_FP8_E4M3,
    FORMAT_FP8_E4M3_BLOCK32,
    FORMAT_FP16,
    FORMAT_FP32,
    FORMAT_INT4,
    FORMAT_INT8,
    FORMAT_NVFP4,
    JOB_OUT_AT,
    JOB_OUT_STEP,
    JOB_PRECISION,
)

FP8_SCALE = tl.constexpr(2.0**-8)  # fp8 bits taken for fp16 bits are 2 ** 8 times too small, see `values_of`
_TWO_23 = tl.constexpr(8388608.0)  # 2 ** 23, above which fp32 counts integers one by one
_TWO_23_BITS = tl.constexpr(0x4B000000)
_TWO_22_BITS = tl.constexpr(1 << 22)  # of 2 ** -127, which is subnormal
_TWO_8, _TWO_14 = tl.constexpr(256.0), tl.constexpr(16384.0)


@triton.jit
def _exact(part):
    """Integers 0 … 2**23 - 1 as fp32 through the mantissa of 2**23; a conversion is a slow instruction."""
    return (part | _TWO_23_BITS).to(tl.float32, bitcast=True) - _TWO_23


@triton.jit
def half(bits):
    """fp16 in the low 16 bits -> fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def values_of(word, FORMAT: tl.constexpr, PER_WORD: tl.constexpr):
    """Returns the PER_WORD values of each int32 word, a tuple of fp32 tensors, before scale and bias. int4,
    int2: too large by their left shift in the half word (`scale_of`). fp8: 2 ** 8 times too small."""
    values = ()
    if FORMAT == FORMAT_FP32:
        values = (word.to(tl.float32, bitcast=True),)
    elif FORMAT == FORMAT_FP16:
        values = (half(word), half(word >> 16))
    elif (FORMAT == FORMAT_FP8) | (FORMAT == FORMAT_FP8_E4M3) | (FORMAT == FORMAT_FP8_E4M3_BLOCK32):
        # The same bits in fp16, whose exponent bias is 15, not 7; two at a time.
        even = ((word << 8) & -2147450880) | ((word << 7) & 0x3F803F80)
        odd = (word & -2147450880) | ((word >> 1) & 0x3F803F80)
        values = (half(even), half(odd), half(even >> 16), half(odd >> 16))
        if FORMAT != FORMAT_FP8:  # whose sums are multiplied: a scale times 2 ** 8 may be infinite
            values = (values[0] * _TWO_8, values[1] * _TWO_8, values[2] * _TWO_8, values[3] * _TWO_8)
    elif FORMAT == FORMAT_NVFP4:
        # As an fp16, whose exponent bias is 15, not 1: 2 ** 14 times too small
        for i in tl.static_range(8):
            part = word >> (4 * i)
            values = values + (half(((part & 8) << 12) | ((part & 7) << 9)) * _TWO_14,)
    elif FORMAT == FORMAT_INT8:
        for i in tl.static_range(4):
            values = values + (_exact((word >> (8 * i)) & 0xFF),)
    else:
        ones: tl.constexpr = (1 << (32 // PER_WORD)) - 1
        for i in tl.static_range(PER_WORD):
            part = word if 2 * i < PER_WORD else word >> 16
            values = values + (_exact(part & (ones << (i % (PER_WORD // 2) * (32 // PER_WORD)))),)
    return values


@triton.jit
def _e4m3(bits):
    """E4M3 in the low 8 bits, int32 -> fp32."""
    return half(((bits & 0x80) << 8) | ((bits & 0x7F) << 7)) * _TWO_8


@triton.jit
def scales_of(row, chunk, word, dim, is_read, FORMAT: tl.constexpr):
    """Returns the scales of a chunk's words, fp32 [columns, 1 or WORDS], of a format without a bias; 1 where
    `is_read` is not set. row: int64 addresses [columns]; chunk: int32 [columns]; word: [1, WORDS]."""
    if FORMAT == FORMAT_FP8_E4M3:
        scales = tl.load(row.to(tl.pointer_type(tl.float32)), is_read, 1.0)[:, None]
    elif FORMAT == FORMAT_FP8_E4M3_BLOCK32:
        at = (row + dim + chunk // 2).to(tl.pointer_type(tl.uint8))
        bits = tl.load(at, is_read, 127).to(tl.int32)
        scales = tl.where(bits == 0, _TWO_22_BITS, bits << 23).to(tl.float32, bitcast=True)[:, None]
    else:
        tl.static_assert(FORMAT == FORMAT_NVFP4)
        block = chunk[:, None] * 2 + word // 2
        is_there = is_read[:, None] & (block * 16 < dim)
        at = row[:, None] + dim // 2 + 4 + block
        of_blocks = _e4m3(tl.load(at.to(tl.pointer_type(tl.uint8)), is_there, 0x38).to(tl.int32))  # 1.0
        scales = of_blocks * tl.load((row + dim // 2).to(tl.pointer_type(tl.float32)), is_read, 1.0)[:, None]
    return scales


@triton.jit
def scale_of(scale, INDEX: tl.constexpr, FORMAT: tl.constexpr, PER_WORD: tl.constexpr):
    """Factor of value INDEX of `values_of`."""
    left: tl.constexpr = INDEX % (PER_WORD // 2) * (32 // PER_WORD) if FORMAT <= FORMAT_INT4 else 0
    return scale * (1.0 / (1 << left))


@triton.jit
def interleaved(values, COUNT: tl.constexpr):
    """Interleaves a tuple of COUNT tensors [.., n], COUNT a power of two, to [.., n * COUNT]."""
    if COUNT == 1:
        result = values[0]
    else:
        pairs: tl.constexpr = COUNT // 2
        even = ()
        odd = ()
        for i in tl.static_range(pairs):
            even = even + (values[2 * i],)
            odd = odd + (values[2 * i + 1],)
        result = tl.interleave(interleaved(even, pairs), interleaved(odd, pairs))
    return result


@triton.jit
def store(job, outputs, vector, value, result, is_real, dim, WHOLE_WORDS: tl.constexpr, VALUES: tl.constexpr):
    """Writes columns to [VECTORS, DIM] of the job's precision at OUT_AT, with vector stride OUT_STEP values.
    vector, value: int32 [columns], each column's vector and first value, negative for a chunk with scale and
    bias. result: fp32 [columns, VALUES]. is_real: mask of existing vectors. outputs: as for
    `quant.gpu.kernels.lookup.pool`."""
    number = value[:, None] + tl.arange(0, VALUES)[None, :]
    is_value = is_real[:, None] & (number >= 0)
    is_value = is_value & (number < dim)
    at = vector.to(tl.int64) * tl.load(job + JOB_OUT_STEP) + value
    out = outputs + tl.load(job + JOB_OUT_AT)
    precision = tl.load(job + JOB_PRECISION)
    if precision == AS_FP32:
        _write(out.to(tl.pointer_type(tl.float32)), at, result, is_value, WHOLE_WORDS, VALUES)
    elif precision == AS_FP16:
        _write(out.to(tl.pointer_type(tl.float16)), at, result, is_value, WHOLE_WORDS, VALUES)
    else:
        _write(out.to(tl.pointer_type(tl.bfloat16)), at, result, is_value, WHOLE_WORDS, VALUES)


@triton.jit
def _write(out, at, result, is_value, WHOLE_WORDS: tl.constexpr, VALUES: tl.constexpr):
    """Writes each column's VALUES values to `out` at index `at`. WHOLE_WORDS: columns are cut at multiples of
    4 values."""
    begin = out + at
    if WHOLE_WORDS:
        begin = tl.multiple_of(begin, 4 * out.dtype.element_ty.primitive_bitwidth // 8)
    tl.store(begin[:, None] + tl.arange(0, VALUES)[None, :], result.to(out.dtype.element_ty), is_value)
