"""The gather kernel, in Triton: rows of one table, dequantized, a vector an id. Its arguments say all of a
call: the host sends no jobs, and a graph may replay it over other ids."""

import triton
import triton.language as tl

from tableside.quant.device.launch import kernel
from tableside.quant.gpu.kernels.constants import (
    AS_FP16,
    AS_FP32,
    FORMAT_FP8,
    FORMAT_FP8_E4M3,
    FORMAT_INT2,
    FORMAT_INT8,
    REPORT_BAG,
    REPORT_END,
    REPORT_IDS,
    REPORT_IS_THERE,
    REPORT_NAME,
    REPORT_POSITION,
    REPORT_SIZE,
    REPORT_VALUE,
)
from tableside.quant.gpu.kernels.row_values import (
    FP8_SCALE,
    half,
    interleaved,
    scale_of,
    scales_of,
    values_of,
)

_NONE = tl.constexpr(2**62)  # above every place of an id


@triton.jit
def _load_ids(ids, at, is_read, IDS_32: tl.constexpr):
    """Returns ids as int64, 0 where not read. ids: address of int32 (IDS_32) or int64."""
    if IDS_32:
        found = tl.load(ids.to(tl.pointer_type(tl.int32)) + at, is_read, 0).to(tl.int64)
    else:
        found = tl.load(ids.to(tl.pointer_type(tl.int64)) + at, is_read, 0)
    return found


@kernel
def gather(
    ids: tl.int64,
    order: tl.int64,
    bounds: tl.int64,
    heads: tl.int64,
    count: tl.int64,
    table: tl.int64,
    rows: tl.int64,
    row_bytes: tl.int64,
    out: tl.int64,
    target: tl.int64,
    name: tl.int64,
    DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
    IDS_32: tl.constexpr,
    ORDERED: tl.constexpr,
    HEADS: tl.constexpr,
    PER_WORD: tl.constexpr,
    HEADER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes the vectors of `count` ids, [count, DIM]; that of a wrong id is zeros. Programs take blocks of
    COLUMNS chunks in turns, so that any number of them does all. PER_WORD, HEADER: values of a word of a row,
    and words before them. Addresses:
    ids      int64 or int32 (IDS_32) [count]
    order    int64 [count], ORDERED: places of the ids in the order in which their rows are read
    bounds   int64 [2, heads], HEADS: first rows and ends of heads; the id at place n is of head n % heads,
             and its row is that of the head with this number
    table    uint8 [rows, row_bytes], in HBM or registered host memory
    target   of a report (`quant.gpu.kernels.tensor_bags.report`), which calls the table `name`"""
    HAS_BIAS: tl.constexpr = FORMAT <= FORMAT_INT8
    HAS_SCALE: tl.constexpr = FORMAT >= FORMAT_FP8_E4M3
    WORDS: tl.constexpr = 2 if FORMAT == FORMAT_INT2 else 4
    CHUNKS: tl.constexpr = (HEADER + (DIM + PER_WORD - 1) // PER_WORD + WORDS - 1) // WORDS
    word = tl.arange(0, WORDS)[None, :]
    blocks = (count * CHUNKS + COLUMNS - 1) // COLUMNS
    for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0)):
        column = tl.arange(0, COLUMNS).to(tl.int64) + block * COLUMNS
        vector = column // CHUNKS
        chunk = (column % CHUNKS).to(tl.int32)
        is_real = vector < count
        if ORDERED:
            vector = tl.load(order.to(tl.pointer_type(tl.int64)) + vector, is_real, 0)
        id = _load_ids(ids, vector, is_real, IDS_32)
        bound = rows.to(tl.uint64)
        first_row = tl.zeros((COLUMNS,), tl.int64)
        if HEADS:
            head = bounds.to(tl.pointer_type(tl.int64)) + vector % heads
            first_row = tl.load(head, is_real, 0)
            end = tl.minimum(tl.load(head + heads, is_real, 0), rows)  # a next version may have fewer
            bound = tl.maximum(end - first_row, 0).to(tl.uint64)
        is_row = id.to(tl.uint64) < bound  # negative ids are large ones
        is_read = is_real & is_row
        id += first_row
        row = table + id * row_bytes
        begin = tl.multiple_of((row + chunk * (4 * WORDS)).to(tl.pointer_type(tl.int32)), 4 * WORDS)
        words = tl.load(begin[:, None] + word, is_read[:, None], 0)
        factor = tl.full((COLUMNS, 1), 1.0, tl.float32)
        bias = tl.zeros((COLUMNS, 1), tl.float32)
        if HAS_BIAS:
            both = tl.load(row.to(tl.pointer_type(tl.int32)), is_read, 0)
            factor = half(both)[:, None]
            bias = half(both >> 16)[:, None]
        elif HAS_SCALE:
            factor = scales_of(row, chunk, word, DIM, is_read, FORMAT)
        elif FORMAT == FORMAT_FP8:
            factor = factor * (1.0 / FP8_SCALE)
        values = values_of(words, FORMAT, PER_WORD)
        results = ()
        for i in tl.static_range(PER_WORD):
            result = values[i] * scale_of(factor, i, FORMAT, PER_WORD)
            if HAS_BIAS:
                result += bias
            results = results + (result,)
        first = (chunk * WORDS - HEADER) * PER_WORD
        number = first[:, None] + tl.arange(0, WORDS * PER_WORD)[None, :]
        is_value = is_real[:, None] & (number >= 0) & (number < DIM)
        at = (vector * DIM + first)[:, None] + tl.arange(0, WORDS * PER_WORD)[None, :]
        found = interleaved(results, PER_WORD)
        if PRECISION == AS_FP32:
            tl.store(out.to(tl.pointer_type(tl.float32)) + at, found, is_value)
        elif PRECISION == AS_FP16:
            tl.store(out.to(tl.pointer_type(tl.float16)) + at, found.to(tl.float16), is_value)
        else:
            tl.store(out.to(tl.pointer_type(tl.bfloat16)) + at, found.to(tl.bfloat16), is_value)
        is_wrong = is_real & (is_row == 0)
        if tl.max(is_wrong.to(tl.int32), 0) != 0:
            position = tl.min(tl.where(is_wrong, vector, _NONE), 0)
            told = target.to(tl.pointer_type(tl.int64))
            claim = tl.load(told + REPORT_SIZE).to(tl.pointer_type(tl.int32))
            if tl.atomic_cas(claim, 0, 1) == 0:
                tl.store(told + REPORT_NAME, name)
                tl.store(told + REPORT_BAG, tl.full((), -1, tl.int64))
                tl.store(told + REPORT_POSITION, position)
                tl.store(told + REPORT_VALUE, _load_ids(ids, position, position >= 0, IDS_32))
                tl.store(told + REPORT_END, tl.zeros((), tl.int64))
                tl.store(told + REPORT_IDS, count)
                tl.store(told + REPORT_IS_THERE, tl.full((), 1, tl.int64))
