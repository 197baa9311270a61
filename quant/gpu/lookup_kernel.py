"""The fused GPU lookup, in Triton: gather, dequantize and pool many tables of different formats and widths in one launch.

One column is one piece of a row, 16 bytes (8 of int2), of one output vector: 16 values of int8 and fp8, 32 of int4 and int2,
8 of fp16, 4 of fp32; the first piece of a quantized row begins with its scale and bias. A program takes COLUMNS neighbouring
columns of one job (a job is one feature of one request) and walks down their bags, ROWS ids at a time, so that ROWS rows are on
their way at once. A thread reads a piece in one instruction; neighbouring columns are neighbouring pieces. Where few bags are
long, WALKERS threads share one's walk, and their sums are added at the end.

Addresses are int64 throughout. An id out of range is not read: its job's flag is raised, and the caller finds out which.

`jobs` is int64 [jobs, FIELDS], laid out by `quant.gpu.backend`:
"""

from enum import IntEnum

import triton
import triton.language as tl

from tableside.quant.contract import SPLIT_BLOCK


class Field(IntEnum):
    """The columns of `jobs`. Offsets are bytes from the start of the buffer named; -1: there is none."""

    TABLE = 0  # address of the first row
    ROWS = 1
    ROW_BYTES = 2
    DIM = 3
    FORMAT = 4
    MEAN = 5  # 1: divide by the bag's length
    IDS_AT = 6  # in inputs, int64; -1: row i of the job is row i of the table
    IDS = 7
    LENGTHS_AT = 8  # in inputs, int32; -1: every bag has BAG_LENGTH ids
    BAG_LENGTH = 9
    VECTORS = 10
    WEIGHTS_AT = 11  # in inputs, fp32
    OUT_AT = 12  # in outputs
    PRECISION = 13
    FIRST_PROGRAM = 14
    STARTS_AT = 15  # in scratch, int32 [.]: a verdict, then VECTORS + 1 starts of bags
    SLOTS = 16  # address of the cache's first slot, or of a split table's rows in HBM
    LOCATIONS_AT = 17  # in locations, int32 an id: its slot; -1: in the table; else -2 - unit of the pad; -1 here: no cache
    SHARE = 18  # of SPLIT_BLOCK rows, that are in HBM; 0: the table is not split


FIELDS = len(Field)

_TABLE = tl.constexpr(int(Field.TABLE))
_ROWS = tl.constexpr(int(Field.ROWS))
_ROW_BYTES = tl.constexpr(int(Field.ROW_BYTES))
_DIM = tl.constexpr(int(Field.DIM))
_FORMAT = tl.constexpr(int(Field.FORMAT))
_MEAN = tl.constexpr(int(Field.MEAN))
_IDS_AT = tl.constexpr(int(Field.IDS_AT))
_IDS = tl.constexpr(int(Field.IDS))
_LENGTHS_AT = tl.constexpr(int(Field.LENGTHS_AT))
_BAG_LENGTH = tl.constexpr(int(Field.BAG_LENGTH))
_VECTORS = tl.constexpr(int(Field.VECTORS))
_WEIGHTS_AT = tl.constexpr(int(Field.WEIGHTS_AT))
_OUT_AT = tl.constexpr(int(Field.OUT_AT))
_PRECISION = tl.constexpr(int(Field.PRECISION))
_FIRST_PROGRAM = tl.constexpr(int(Field.FIRST_PROGRAM))
_STARTS_AT = tl.constexpr(int(Field.STARTS_AT))
_SLOTS = tl.constexpr(int(Field.SLOTS))
_LOCATIONS_AT = tl.constexpr(int(Field.LOCATIONS_AT))
_SHARE = tl.constexpr(int(Field.SHARE))
_FIELDS = tl.constexpr(int(FIELDS))
_SPLIT_BLOCK = tl.constexpr(SPLIT_BLOCK)


# Every argument that is not a constant is an address, and is not looked at before a launch.
@triton.jit(do_not_specialize=["jobs", "inputs", "scratch", "flags"])
def bag_starts(jobs: tl.int64, inputs: tl.int64, scratch: tl.int64, flags: tl.int64, BLOCK: tl.constexpr):
    """One program a job: running sums of its lengths, and the verdict 1 where one is negative or their sum is not the ids'."""
    number = tl.program_id(0).to(tl.int64)
    job = jobs.to(tl.pointer_type(tl.int64)) + number * _FIELDS
    lengths_at = tl.load(job + _LENGTHS_AT)
    if lengths_at >= 0:
        lengths = (inputs + lengths_at).to(tl.pointer_type(tl.int32))
        starts = scratch.to(tl.pointer_type(tl.int32)) + tl.load(job + _STARTS_AT)
        bags = tl.load(job + _VECTORS)
        total = tl.zeros((), tl.int64)
        negative = tl.zeros((), tl.int32)
        tl.store(starts + 1, 0)
        for first in range(0, bags, BLOCK):
            at = first + tl.arange(0, BLOCK)
            length = tl.load(lengths + at, at < bags, 0).to(tl.int64)
            tl.store(starts + 2 + at, (total + tl.cumsum(length, 0)).to(tl.int32), at < bags)
            total += tl.sum(length, 0)
            negative += tl.sum((length < 0).to(tl.int32), 0)
        wrong = (negative > 0) | (total != tl.load(job + _IDS))
        tl.store(starts, wrong.to(tl.int32))
        if wrong:
            tl.store(flags.to(tl.pointer_type(tl.int32)) + number, 1)


@triton.jit
def _exact(part):
    """Integers from 0 to 2**23 - 1 as fp32, as the mantissa of 2**23 plus themselves; a conversion is a slow instruction."""
    return (part | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _values(word, FORMAT: tl.constexpr, PER_WORD: tl.constexpr):
    """The PER_WORD values of each int32 word, a tuple of fp32 tensors, before scale and bias.

    int4, int2: each as many times too large as it stands to the left in its half of the word. fp8: 256 times too small.
    """
    values = ()
    if FORMAT == 5:
        values = (word.to(tl.float32, bitcast=True),)
    elif FORMAT == 4:
        values = (_half(word), _half(word >> 16))
    elif FORMAT == 3:
        # The same bits in fp16, whose exponent bias is 15, not 7; two at a time.
        even = ((word << 8) & -2147450880) | ((word << 7) & 0x3F803F80)
        odd = (word & -2147450880) | ((word >> 1) & 0x3F803F80)
        values = (_half(even), _half(odd), _half(even >> 16), _half(odd >> 16))
    elif FORMAT == 2:
        for i in tl.static_range(4):
            values = values + (_exact((word >> (8 * i)) & 0xFF),)
    else:
        ones: tl.constexpr = (1 << (32 // PER_WORD)) - 1
        for i in tl.static_range(PER_WORD):
            part = word if 2 * i < PER_WORD else word >> 16
            values = values + (_exact(part & (ones << (i % (PER_WORD // 2) * (32 // PER_WORD)))),)
    return values


@triton.jit
def _scale_of(scale, INDEX: tl.constexpr, FORMAT: tl.constexpr, PER_WORD: tl.constexpr):
    """What value number INDEX of `_values` is multiplied by."""
    left: tl.constexpr = INDEX % (PER_WORD // 2) * (32 // PER_WORD) if FORMAT <= 1 else 0
    return scale * (1.0 / (1 << left))


@triton.jit
def _interleaved(values, COUNT: tl.constexpr):
    """A tuple of COUNT tensors [.., n], COUNT a power of two -> [.., n * COUNT]: the first of each, then the second of each."""
    if COUNT == 1:
        result = values[0]
    else:
        half: tl.constexpr = COUNT // 2
        even = ()
        odd = ()
        for i in tl.static_range(half):
            even = even + (values[2 * i],)
            odd = odd + (values[2 * i + 1],)
        result = tl.interleave(_interleaved(even, half), _interleaved(odd, half))
    return result


@triton.jit
def _half(bits):
    """fp16 in the low 16 bits -> fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pool(
    job,
    inputs,
    starts,
    outputs,
    flag,
    locations,
    pad,
    program,
    FORMAT: tl.constexpr,
    POOLED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CACHED: tl.constexpr,
    WHOLE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WALKERS: tl.constexpr,
):
    """One program's columns of a job whose rows are in FORMAT."""
    PER_WORD: tl.constexpr = 16 if FORMAT == 0 else 8 if FORMAT == 1 else 4 if FORMAT <= 3 else 2 if FORMAT == 4 else 1
    HEADER: tl.constexpr = 1 if FORMAT <= 2 else 0
    WORDS: tl.constexpr = 2 if FORMAT == 0 else 4
    dim = tl.load(job + _DIM).to(tl.int32)
    if WHOLE_WORDS:
        dim = tl.multiple_of(dim, 4)
    ids_at = tl.load(job + _IDS_AT)
    vectors = tl.load(job + _VECTORS)
    table = tl.load(job + _TABLE)
    rows = tl.load(job + _ROWS)
    row_bytes = tl.load(job + _ROW_BYTES)
    pieces = (HEADER + (dim + PER_WORD - 1) // PER_WORD + WORDS - 1) // WORDS
    ids = (inputs + tl.maximum(ids_at, 0)).to(tl.pointer_type(tl.int64))

    first = program * COLUMNS
    lane = tl.arange(0, COLUMNS * WALKERS)
    walker = lane // COLUMNS
    column = (first % pieces).to(tl.int32) + (lane % COLUMNS if WALKERS > 1 else lane)
    vector = (first // pieces).to(tl.int32) + column // pieces
    piece = column % pieces
    is_real = vector < vectors

    start = vector
    length = is_real.to(tl.int32)
    longest = 1
    if POOLED:
        if tl.load(job + _LENGTHS_AT) >= 0:
            start = tl.load(starts + vector, is_real, 0)
            length = tl.load(starts + vector + 1, is_real, 0) - start
            longest = tl.max(length, 0)
        else:
            longest = tl.load(job + _BAG_LENGTH).to(tl.int32)
            start = vector * longest
            length = tl.where(is_real, longest, 0)
    if WEIGHTED:
        weights_at = tl.load(job + _WEIGHTS_AT)
        weighted = length * (weights_at >= 0).to(tl.int32)
        weights = (inputs + tl.maximum(weights_at, 0)).to(tl.pointer_type(tl.float32))
    if CACHED:
        slots = tl.load(job + _SLOTS)
        locations_at = tl.load(job + _LOCATIONS_AT)
        share = tl.load(job + _SHARE)
        cached = length * (locations_at >= 0).to(tl.int32)
        places = (locations + tl.maximum(locations_at, 0)).to(tl.pointer_type(tl.int32))

    is_named = ids_at >= 0
    named = length * is_named.to(tl.int32)
    word = tl.arange(0, WORDS)[None, :]
    sums = ()
    for _ in tl.static_range(PER_WORD):
        sums = sums + (tl.zeros((COLUMNS * WALKERS, WORDS), tl.float32),)
    biases = tl.zeros((COLUMNS * WALKERS,), tl.float32)
    is_wrong = tl.zeros((COLUMNS * WALKERS,), tl.int1)
    for step in range(0, longest, ROWS * WALKERS):
        # First all loads of one kind, then the next: ROWS rows are on their way at once.
        place_in_bag = ()
        for r in tl.static_range(ROWS):
            place_in_bag = place_in_bag + (step + r * WALKERS + walker if WALKERS > 1 else step + r,)
        in_bag = ()
        id = ()
        for r in tl.static_range(ROWS):
            in_bag = in_bag + (place_in_bag[r] < length,)
            found = tl.load(ids + (start + place_in_bag[r]), place_in_bag[r] < named, 0)
            id = id + (tl.where(is_named, found, (start + place_in_bag[r]).to(tl.int64)),)
        is_read = ()
        row = ()
        for r in tl.static_range(ROWS):
            is_known = id[r].to(tl.uint64) < rows.to(tl.uint64)  # negative ids are large ones
            is_wrong = is_wrong | (in_bag[r] & (is_known == 0))
            is_read = is_read + (in_bag[r] & is_known,)
            at = table + id[r] * row_bytes
            if CACHED:
                place = tl.load(places + (start + place_in_bag[r]), is_read[r] & (place_in_bag[r] < cached), -1).to(tl.int64)
                in_block = id[r] % _SPLIT_BLOCK
                place = tl.where(in_block < share, id[r] // _SPLIT_BLOCK * share + in_block, place)
                at = tl.where(place >= 0, slots + place * row_bytes, tl.where(place < -1, pad + (-2 - place) * 16, at))
            row = row + (at,)
        words = ()
        scale_bias = ()
        for r in tl.static_range(ROWS):
            begin = tl.multiple_of((row[r] + piece * (4 * WORDS)).to(tl.pointer_type(tl.int32)), 4 * WORDS)
            words = words + (tl.load(begin[:, None] + word, is_read[r][:, None], 0),)
            if FORMAT <= 2:
                scale_bias = scale_bias + (tl.load(row[r].to(tl.pointer_type(tl.int32)), is_read[r], 0),)
        for r in tl.static_range(ROWS):
            scale = tl.full((COLUMNS * WALKERS,), 1.0, tl.float32)
            if WEIGHTED:
                scale = tl.load(weights + (start + place_in_bag[r]), is_read[r] & (place_in_bag[r] < weighted), 1.0)
            if FORMAT <= 2:
                biases += scale * _half(scale_bias[r] >> 16)
                scale = scale * _half(scale_bias[r])
            values = _values(words[r], FORMAT, PER_WORD)
            now = ()
            for i in tl.static_range(PER_WORD):
                now = now + (sums[i] + values[i] * _scale_of(scale, i, FORMAT, PER_WORD)[:, None],)
            sums = now

    tl.store(flag + tl.zeros((COLUMNS * WALKERS,), tl.int32), 1, is_wrong)
    if WALKERS > 1:
        column = (first % pieces).to(tl.int32) + tl.arange(0, COLUMNS)
        vector = (first // pieces).to(tl.int32) + column // pieces
        piece = column % pieces
        is_real = vector < vectors
        length = tl.max(tl.reshape(length, (WALKERS, COLUMNS)), 0)
        biases = tl.sum(tl.reshape(biases, (WALKERS, COLUMNS)), 0)
        total = ()
        for i in tl.static_range(PER_WORD):
            total = total + (tl.sum(tl.reshape(sums[i], (WALKERS, COLUMNS, WORDS)), 0),)
        sums = total
    divisor = tl.full((COLUMNS,), 1.0, tl.float32)
    if POOLED:
        if tl.load(job + _MEAN) != 0:
            divisor = tl.maximum(length, 1).to(tl.float32)
    divisor = divisor * (0.00390625 if FORMAT == 3 else 1.0)
    results = ()
    for i in tl.static_range(PER_WORD):
        results = results + ((sums[i] + biases[:, None]) / divisor[:, None],)

    result = _interleaved(results, PER_WORD)
    value = (piece * WORDS - HEADER) * PER_WORD
    is_value = is_real[:, None] & (value[:, None] + tl.arange(0, WORDS * PER_WORD)[None, :] >= 0)
    is_value = is_value & (value[:, None] + tl.arange(0, WORDS * PER_WORD)[None, :] < dim)
    at = vector.to(tl.int64) * dim + value
    out = outputs + tl.load(job + _OUT_AT)
    precision = tl.load(job + _PRECISION)
    if precision == 0:
        _write(out.to(tl.pointer_type(tl.float32)), at, result, is_value, WHOLE_WORDS, WORDS * PER_WORD)
    elif precision == 1:
        _write(out.to(tl.pointer_type(tl.float16)), at, result, is_value, WHOLE_WORDS, WORDS * PER_WORD)
    else:
        _write(out.to(tl.pointer_type(tl.bfloat16)), at, result, is_value, WHOLE_WORDS, WORDS * PER_WORD)


@triton.jit
def _write(out, at, result, is_value, WHOLE_WORDS: tl.constexpr, VALUES: tl.constexpr):
    """Each column's VALUES values to `out`. WHOLE_WORDS: its own begin and end at multiples of 4 values."""
    begin = out + at
    if WHOLE_WORDS:
        begin = tl.multiple_of(begin, 4 * out.dtype.element_ty.primitive_bitwidth // 8)
    tl.store(begin[:, None] + tl.arange(0, VALUES)[None, :], result.to(out.dtype.element_ty), is_value)


@triton.jit(do_not_specialize=["jobs", "job_of_program", "inputs", "scratch", "outputs", "flags", "locations", "pad"])
def lookup(
    jobs: tl.int64,
    job_of_program: tl.int64,
    inputs: tl.int64,
    scratch: tl.int64,
    outputs: tl.int64,
    flags: tl.int64,
    locations: tl.int64,
    pad: tl.int64,
    FORMATS: tl.constexpr,
    POOLED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CACHED: tl.constexpr,
    WHOLE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WALKERS: tl.constexpr,
):
    """Every job of a batch. FORMATS: a bit for each row format among the tables, so that only those are compiled."""
    number = tl.load(job_of_program.to(tl.pointer_type(tl.int32)) + tl.program_id(0)).to(tl.int64)
    job = jobs.to(tl.pointer_type(tl.int64)) + number * _FIELDS
    starts = scratch.to(tl.pointer_type(tl.int32)) + tl.load(job + _STARTS_AT)
    program = tl.program_id(0).to(tl.int64) - tl.load(job + _FIRST_PROGRAM)
    verdict = 0
    if POOLED:
        if tl.load(job + _LENGTHS_AT) >= 0:
            verdict = tl.load(starts)
    if verdict == 0:
        row_format = tl.load(job + _FORMAT)
        for FORMAT in tl.static_range(6):
            if (FORMATS >> FORMAT) & 1:
                if row_format == FORMAT:
                    _pool(
                        job,
                        inputs,
                        starts + 1,
                        outputs,
                        flags.to(tl.pointer_type(tl.int32)) + number,
                        locations,
                        pad,
                        program,
                        FORMAT,
                        POOLED,
                        WEIGHTED,
                        CACHED,
                        WHOLE_WORDS,
                        ROWS,
                        COLUMNS,
                        WALKERS,
                    )


def interpreted() -> bool:
    """Whether Triton runs these kernels in its interpreter (TRITON_INTERPRET=1 when this module was imported)."""
    return not isinstance(lookup, triton.runtime.JITFunction)
