"""The lookup kernel, in Triton: gathers, dequantizes and pools many tables of different formats and widths in
one launch. A *column* is one chunk of a row, 16 bytes (int2: 8), in one output vector: 16 values of int8 and
fp8s, 32 of int4, int2 and nvfp4, 8 of fp16, 4 of fp32. An integer row's first chunk begins with scale and
bias, that of fp8_e4m3 with its scale; scales of blocks lie behind the chunks and are read beside them. A
*job* is one feature of one request; `quant.gpu.kernels.job.JobField` names its fields and every buffer. A
program takes COLUMNS neighbouring columns of a job and walks down their bags, UNROLL ids at a time, with
UNROLL rows in flight. Few long bags have LANES threads each. Ids out of range are not read: they raise the
job's flag. tests/helpers/kernel_steps.py has the steps in Python."""

import triton
import triton.language as tl

from tableside.quant.cache.kernels.nodes import padded
from tableside.quant.device.launch import kernel
from tableside.quant.gpu.kernels.constants import (
    FORMAT_FP8,
    FORMAT_FP8_E4M3,
    FORMAT_FP16,
    FORMAT_FP32,
    FORMAT_INT2,
    FORMAT_INT4,
    FORMAT_INT8,
    FORMAT_NVFP4,
    FORMAT_SIZE,
    JOB_BAG_LENGTH,
    JOB_DIM,
    JOB_FIRST_PROGRAM,
    JOB_FORMAT,
    JOB_HBM_ROWS,
    JOB_HBM_SHARE,
    JOB_IDS_AT,
    JOB_LENGTHS_AT,
    JOB_LOCATIONS_AT,
    JOB_MEAN,
    JOB_ROW_BYTES,
    JOB_ROWS,
    JOB_SIZE,
    JOB_STARTS_AT,
    JOB_TABLE,
    JOB_VECTORS,
    JOB_WEIGHTS_AT,
)
from tableside.quant.gpu.kernels.job import SPLIT_BLOCK
from tableside.quant.gpu.kernels.row_values import (
    FP8_SCALE,
    half,
    interleaved,
    scale_of,
    scales_of,
    store,
    values_of,
)
from tableside.quant.gpu.kernels.tensor_bags import bags_of_offsets, report

_SPLIT_BLOCK = tl.constexpr(SPLIT_BLOCK)
_STAGING_UNIT = tl.constexpr(16)  # bytes, in which locations count places in the staging buffer
_MINUS_ZERO = tl.constexpr(-2147483648)  # the bits of -0 in fp32, of which no compiler makes +0
_IN_TABLE = tl.constexpr(-1)  # a location: the row is read where the table lies


@triton.jit
def _row_address(
    id, table, row_bytes, location, hbm_rows, share, staging, INDIRECT: tl.constexpr, TIGHT: tl.constexpr
):
    """Returns the addresses of rows by id, int64, of the shape of `id`.
    id        the table's rows; negative: an overlay's, numbered to lie there (`quant.gpu.residence.layers`)
    table     address of row 0 in HBM or registered host memory, or of the first gathered row
    row_bytes of the table; all others are padded to 16 bytes
    location  int64 (int32 in memory, written by the cache): >= 0: a slot; -1: in the table, or no cache;
          below: -2 minus the place in `staging`, in units of 16 bytes
    hbm_rows  address of the cache's slot 0, or of a split table's first HBM row
    share     rows of each SPLIT_BLOCK at `hbm_rows`, dense; 0: the table is not split
    staging   address of the in-flight batch's staging buffer
    INDIRECT  a job of the launch has a cache or a split table
    TIGHT     a table of it may not be padded"""
    slot_bytes = row_bytes
    if TIGHT:
        slot_bytes = padded(row_bytes)
    address = table + id * tl.where(id < 0, slot_bytes, row_bytes)
    if INDIRECT:
        in_block = id % _SPLIT_BLOCK
        is_in_hbm = (in_block < share) & (id >= 0)
        slot = tl.where(is_in_hbm, id // _SPLIT_BLOCK * share + in_block, location)
        staged = staging + (_IN_TABLE - 1 - slot) * _STAGING_UNIT
        address = tl.where(
            slot >= 0, hbm_rows + slot * slot_bytes, tl.where(slot < _IN_TABLE, staged, address)
        )
    return address


@triton.jit
def _bags(job, starts, vector, is_real, POOLED: tl.constexpr):
    """Returns each vector's first id and bag length, int32, and the longest length. An unpooled vector is a
    bag of one. vector: int32; is_real: mask of existing vectors; starts: as for `pool`."""
    start = vector
    length = is_real.to(tl.int32)
    longest = 1
    if POOLED:
        if tl.load(job + JOB_LENGTHS_AT) >= 0:
            start = tl.load(starts + vector, is_real, 0)
            length = tl.load(starts + vector + 1, is_real, 0) - start
            longest = tl.max(length, 0)
        else:
            longest = tl.load(job + JOB_BAG_LENGTH).to(tl.int32)
            start = vector * longest
            length = tl.where(is_real, longest, 0)
    return start, length, longest


@triton.jit
def pool(
    job,
    inputs,
    starts,
    weights_base,
    outputs,
    flag,
    locations,
    staging,
    program,
    ids_count,
    asked,
    FORMAT: tl.constexpr,
    POOLED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INDIRECT: tl.constexpr,
    WHOLE_WORDS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    TIGHT: tl.constexpr,
    TENSORS: tl.constexpr,
):
    """Writes a program's COLUMNS columns of a job in FORMAT: the weighted sums of their bags.
    job           int64 [FIELDS]; TENSORS: [TENSOR_JOB_FIELDS] by `quant.gpu.tensors.tensors`
    inputs        address of the batch's inputs, bytes: int64 ids [ids] at IDS_AT
    starts        int32 [bags + 1], by `bag_starts`; unused for bags of one length.
                  TENSORS: base address of OFFSETS_AT (`quant.gpu.kernels.tensor_bags`)
    weights_base  address of fp32 weights [ids] at WEIGHTS_AT: the batch's inputs, if sent together
    outputs       address of the batch's outputs, bytes: this writes columns of [VECTORS, DIM] at OUT_AT
    flag          int32 [1] of the job: this writes 1 for an id not below ROWS, as uint64. TENSORS: address
                  of a report (`quant.gpu.kernels.tensor_bags.report`)
    locations     address of int32 [ids] at byte LOCATIONS_AT; written by the cache's probe and resolve
    staging       address of the in-flight batch's staging buffer, filled by the cache's fetch kernels
    program       its number in the job
    ids_count     TENSORS: ids of jobs without a number
    asked         TENSORS: base address of ASKED_AT, the original ids
    Tensors below are [COLUMNS * LANES], and [COLUMNS * LANES, WORDS] of a chunk's int32 words."""
    PER_WORD: tl.constexpr = (
        16
        if FORMAT == FORMAT_INT2
        else 8
        if (FORMAT == FORMAT_INT4) | (FORMAT == FORMAT_NVFP4)
        else 2
        if FORMAT == FORMAT_FP16
        else 1
        if FORMAT == FORMAT_FP32
        else 4
    )
    HAS_BIAS: tl.constexpr = FORMAT <= FORMAT_INT8
    HAS_SCALE: tl.constexpr = FORMAT >= FORMAT_FP8_E4M3
    # What is added for a row that is not read: -0, as x + -0 is x for any x. Rows of integers have scale and
    # bias 0 there, those of scaled formats scale 1.
    NOTHING: tl.constexpr = (
        0
        if HAS_BIAS
        else -2004318072  # 0x88888888
        if FORMAT == FORMAT_NVFP4
        else -2139062144  # 0x80808080
        if FORMAT == FORMAT_FP8 or HAS_SCALE
        else -2147450880  # 0x80008000
        if FORMAT == FORMAT_FP16
        else _MINUS_ZERO
    )
    # Words before the values: scale and bias, fp16 each, or an fp32 scale
    HEADER: tl.constexpr = 1 if HAS_BIAS or FORMAT == FORMAT_FP8_E4M3 else 0
    WORDS: tl.constexpr = 2 if FORMAT == FORMAT_INT2 else 4  # of a chunk
    dim = tl.load(job + JOB_DIM).to(tl.int32)
    if WHOLE_WORDS:
        dim = tl.multiple_of(dim, 4)
    ids_at = tl.load(job + JOB_IDS_AT)
    vectors = tl.load(job + JOB_VECTORS)
    table = tl.load(job + JOB_TABLE)
    rows = tl.load(job + JOB_ROWS)
    row_bytes = tl.load(job + JOB_ROW_BYTES)
    chunks = (HEADER + (dim + PER_WORD - 1) // PER_WORD + WORDS - 1) // WORDS  # of a row
    ids = (inputs + tl.maximum(ids_at, 0)).to(tl.pointer_type(tl.int64))

    first = program * COLUMNS
    thread = tl.arange(0, COLUMNS * LANES)
    lane = thread // COLUMNS
    column = (first % chunks).to(tl.int32) + (thread % COLUMNS if LANES > 1 else thread)
    vector = (first // chunks).to(tl.int32) + column // chunks
    chunk = column % chunks
    is_real = vector < vectors

    is_bad = tl.zeros((COLUMNS * LANES,), tl.int1)
    if TENSORS:
        start, length, longest, is_bad = bags_of_offsets(job, starts, ids_count, vector, is_real, POOLED)
    else:
        start, length, longest = _bags(job, starts, vector, is_real, POOLED)
    if WEIGHTED:
        weights_at = tl.load(job + JOB_WEIGHTS_AT)
        weighted = length * (weights_at >= 0).to(tl.int32)
        weights = (weights_base + tl.maximum(weights_at, 0)).to(tl.pointer_type(tl.float32))
    hbm_rows = 0
    share = 0
    if INDIRECT:
        hbm_rows = tl.load(job + JOB_HBM_ROWS)
        locations_at = tl.load(job + JOB_LOCATIONS_AT)
        share = tl.load(job + JOB_HBM_SHARE)
        located = length * (locations_at >= 0).to(tl.int32)
        places = (locations + tl.maximum(locations_at, 0)).to(tl.pointer_type(tl.int32))

    is_named = ids_at >= 0
    named = length * is_named.to(tl.int32)
    word = tl.arange(0, WORDS)[None, :]
    # The sum of one row begins at -0, so that it is that row; any other at +0, as FBGEMM's do.
    zero = tl.where(length == 1, _MINUS_ZERO, 0).to(tl.float32, bitcast=True)[:, None]
    sums = ()
    for _ in tl.static_range(PER_WORD):
        sums = sums + (tl.broadcast_to(zero, (COLUMNS * LANES, WORDS)),)
    biases = tl.zeros((COLUMNS * LANES,), tl.float32)
    is_wrong = tl.zeros((COLUMNS * LANES,), tl.int1)
    for step in range(0, longest, UNROLL * LANES):
        # First all loads of one kind, then the next: UNROLL rows are in flight at once.
        place_in_bag = ()
        for r in tl.static_range(UNROLL):
            place_in_bag = place_in_bag + (step + r * LANES + lane if LANES > 1 else step + r,)
        in_bag = ()
        id = ()
        for r in tl.static_range(UNROLL):
            in_bag = in_bag + (place_in_bag[r] < length,)
            found = tl.load(ids + (start + place_in_bag[r]), place_in_bag[r] < named, 0)
            id = id + (tl.where(is_named, found, (start + place_in_bag[r]).to(tl.int64)),)
        is_read = ()
        row = ()
        is_tight = ()
        for r in tl.static_range(UNROLL):
            is_known = id[r].to(tl.uint64) < rows.to(tl.uint64)  # negative ids are large ones
            is_wrong = is_wrong | (in_bag[r] & (is_known == 0))
            is_read = is_read + (in_bag[r] & is_known,)
            location = _IN_TABLE
            if INDIRECT:
                is_located = is_read[r] & (place_in_bag[r] < located)
                location = tl.load(places + (start + place_in_bag[r]), is_located, _IN_TABLE).to(tl.int64)
            row = row + (
                _row_address(id[r], table, row_bytes, location, hbm_rows, share, staging, INDIRECT, TIGHT),
            )
            if TIGHT:
                is_in_table = is_read[r] & (id[r] >= 0) & (location == _IN_TABLE)
                is_tight = is_tight + (is_in_table.to(tl.int64) * (row_bytes % 16) != 0,)
        words = ()
        scale_bias = ()
        scales = ()
        for r in tl.static_range(UNROLL):
            at = (row[r] + chunk * (4 * WORDS)).to(tl.pointer_type(tl.int32))
            begin = tl.multiple_of(at, 4 * WORDS)[:, None]
            if TIGHT:  # which lie anywhere, and behind which no memory may be
                is_word = (chunk[:, None] * WORDS + word) * 4 < row_bytes
                loaded = tl.load(begin + word, (is_read[r] & (is_tight[r] == 0))[:, None], NOTHING)
                words = words + (tl.load(at[:, None] + word, is_tight[r][:, None] & is_word, loaded),)
            else:
                words = words + (tl.load(begin + word, is_read[r][:, None], NOTHING),)
            if HAS_SCALE:
                scales = scales + (scales_of(row[r], chunk, word, dim, is_read[r], FORMAT),)
            if HAS_BIAS:
                scale_bias = scale_bias + (tl.load(row[r].to(tl.pointer_type(tl.int32)), is_read[r], 0),)
        for r in tl.static_range(UNROLL):
            scale = tl.full((COLUMNS * LANES,), 1.0, tl.float32)
            if WEIGHTED:
                scale = tl.load(
                    weights + (start + place_in_bag[r]), is_read[r] & (place_in_bag[r] < weighted), 1.0
                )
            if HAS_BIAS:
                biases += scale * half(scale_bias[r] >> 16)
                scale = scale * half(scale_bias[r])
            values = values_of(words[r], FORMAT, PER_WORD)
            factor = scale[:, None]
            if HAS_SCALE:
                factor = factor * scales[r]
            now = ()
            for i in tl.static_range(PER_WORD):
                now = now + (sums[i] + values[i] * scale_of(factor, i, FORMAT, PER_WORD),)
            sums = now

    if TENSORS:
        if tl.max((is_wrong | is_bad).to(tl.int32), 0) != 0:
            report(
                job, flag, ids, asked, starts, ids_count, vector, is_bad, start, length, longest, lane, LANES
            )
    else:
        tl.store(flag + tl.zeros((COLUMNS * LANES,), tl.int32), 1, is_wrong)
    if LANES > 1:
        column = (first % chunks).to(tl.int32) + tl.arange(0, COLUMNS)
        vector = (first // chunks).to(tl.int32) + column // chunks
        chunk = column % chunks
        is_real = vector < vectors
        length = tl.max(tl.reshape(length, (LANES, COLUMNS)), 0)
        biases = tl.sum(tl.reshape(biases, (LANES, COLUMNS)), 0)
        total = ()
        for i in tl.static_range(PER_WORD):
            of_lanes = tl.reshape(sums[i], (LANES, COLUMNS, WORDS))
            joined = tl.sum(of_lanes, 0)
            if (
                not HAS_BIAS
            ):  # a sum over lanes may begin at +0; -0, which the lanes without a row hold, has the least bits
                only = tl.max(of_lanes.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
                joined = tl.where((length == 1)[:, None], only, joined)
            total = total + (joined,)
        sums = total
    divisor = tl.full((COLUMNS,), 1.0, tl.float32)
    if POOLED:
        if tl.load(job + JOB_MEAN) != 0:
            divisor = tl.maximum(length, 1).to(tl.float32)
    divisor = divisor * (FP8_SCALE if FORMAT == FORMAT_FP8 else 1.0)
    results = ()
    for i in tl.static_range(PER_WORD):
        result = sums[i]
        if HAS_BIAS:
            result += biases[:, None]
        results = results + (result / divisor[:, None],)
    value = (chunk * WORDS - HEADER) * PER_WORD  # the number of the chunk's first value in the vector
    store(
        job,
        outputs,
        vector,
        value,
        interleaved(results, PER_WORD),
        is_real,
        dim,
        WHOLE_WORDS,
        WORDS * PER_WORD,
    )


# As of `bag_starts`: addresses, of whose values Triton must not compile variants.
@kernel
def lookup(
    jobs: tl.int64,
    job_of_program: tl.int64,
    inputs: tl.int64,
    scratch: tl.int64,
    outputs: tl.int64,
    flags: tl.int64,
    locations: tl.int64,
    staging: tl.int64,
    FORMATS: tl.constexpr,
    POOLED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INDIRECT: tl.constexpr,
    WHOLE_WORDS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    TIGHT: tl.constexpr,
):
    """Runs every job of a launch. FORMATS: a bit for each row format that is compiled.
    jobs            address of int64 [jobs, FIELDS], written by `quant.gpu.batch.placed`
    job_of_program  address of int32 [programs], written there too
    scratch         address of int32, written by `bag_starts`; jobs with verdict 1 are skipped
    flags           address of int32 [jobs], zeros; 1 is written for an id out of range
    inputs, outputs, locations, staging: as for `pool`
    """
    number = tl.load(job_of_program.to(tl.pointer_type(tl.int32)) + tl.program_id(0)).to(tl.int64)
    job = jobs.to(tl.pointer_type(tl.int64)) + number * JOB_SIZE
    starts = scratch.to(tl.pointer_type(tl.int32)) + tl.load(job + JOB_STARTS_AT)
    program = tl.program_id(0).to(tl.int64) - tl.load(job + JOB_FIRST_PROGRAM)
    verdict = 0
    if POOLED:
        if tl.load(job + JOB_LENGTHS_AT) >= 0:
            verdict = tl.load(starts)
    if verdict == 0:
        row_format = tl.load(job + JOB_FORMAT)
        for FORMAT in tl.static_range(FORMAT_SIZE):
            if (FORMATS >> FORMAT) & 1:
                if row_format == FORMAT:
                    pool(
                        job,
                        inputs,
                        starts + 1,
                        inputs,
                        outputs,
                        flags.to(tl.pointer_type(tl.int32)) + number,
                        locations,
                        staging,
                        program,
                        0,
                        0,
                        FORMAT,
                        POOLED,
                        WEIGHTED,
                        INDIRECT,
                        WHOLE_WORDS,
                        UNROLL,
                        COLUMNS,
                        LANES,
                        TIGHT,
                        False,
                    )
