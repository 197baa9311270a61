"""The lookup kernel, in Triton: gather, dequantize and pool many tables of different formats and widths in
one launch.

A *column* is one chunk of a row, 16 bytes (8 of int2), in one output vector. It holds 16 values of int8 and
fp8, 32 of int4 and int2, 8 of fp16, 4 of fp32; the first chunk of a quantized row begins with the row's scale
and bias. A *job* is one feature of one request. A program takes COLUMNS neighbouring columns of one job and
walks down their bags, UNROLL ids at a time, so that UNROLL rows are in flight at once. A thread reads a chunk
in one instruction, and neighbouring threads read neighbouring chunks. Where few bags are long, LANES threads
share each of them, and their sums are added at the end.

Addresses are int64 throughout. An id out of range is not read: its job's flag is raised, and the caller finds
out which id it is.

A job's fields are those of `quant.gpu.kernels.job.JobField`, written by `quant.gpu.batch.layout`. Every
buffer that a kernel takes is named there. Where a row lies is decided in `_row_address` alone: that is the
place for a new kind of residence.

tests/helpers/kernel_steps.py has each step in plain Python; tests/quant/gpu/test_lookup.py holds the kernels
to it.
"""

import triton
import triton.language as tl

from tableside.quant.gpu.kernels.constants import (
    FORMAT_FP8,
    FORMAT_FP16,
    FORMAT_INT2,
    FORMAT_INT4,
    FORMAT_INT8,
    FORMAT_SIZE,
    JOB_BAG_LENGTH,
    JOB_DIM,
    JOB_FIRST_PROGRAM,
    JOB_FORMAT,
    JOB_HBM_ROWS,
    JOB_HBM_SHARE,
    JOB_IDS,
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
    store,
    values_of,
)
from tableside.quant.gpu.kernels.tensor_bags import bags_of_offsets, report

_SPLIT_BLOCK = tl.constexpr(SPLIT_BLOCK)
_STAGING_UNIT = tl.constexpr(16)  # bytes, in which locations count places in the staging buffer
_MINUS_ZERO = tl.constexpr(-2147483648)  # the bits of -0 in fp32, of which no compiler makes +0
_IN_TABLE = tl.constexpr(-1)  # a location: the row is read where the table lies


# Arguments that are not constants are int64 addresses. Triton must not compile variants for particular values
# of them.
@triton.jit(do_not_specialize=["jobs", "inputs", "scratch", "flags"])
def bag_starts(jobs: tl.int64, inputs: tl.int64, scratch: tl.int64, flags: tl.int64, BLOCK: tl.constexpr):
    """Where each bag starts, for jobs whose bags have lengths of their own. One program a job, BLOCK bags at
    once.

    jobs     address of int64 [jobs, FIELDS], written by `quant.gpu.batch.merge.merge`
    inputs   address of the batch's inputs, bytes; int32 lengths [bags] lie at LENGTHS_AT; written by the request's sender
    scratch  address of int32; from STARTS_AT on this kernel writes a verdict (1: the lengths are wrong), then [bags + 1] starts
    flags    address of int32 [jobs]; this kernel writes 1 where a length is negative or their sum is not the number of ids
    """
    number = tl.program_id(0).to(tl.int64)
    job = jobs.to(tl.pointer_type(tl.int64)) + number * JOB_SIZE
    lengths_at = tl.load(job + JOB_LENGTHS_AT)
    if lengths_at >= 0:
        lengths = (inputs + lengths_at).to(tl.pointer_type(tl.int32))
        verdict = scratch.to(tl.pointer_type(tl.int32)) + tl.load(job + JOB_STARTS_AT)
        starts = verdict + 1
        bags = tl.load(job + JOB_VECTORS)
        total = tl.zeros((), tl.int64)
        negative = tl.zeros((), tl.int32)
        tl.store(starts, 0)
        for first in range(0, bags, BLOCK):
            at = first + tl.arange(0, BLOCK)
            length = tl.load(lengths + at, at < bags, 0).to(tl.int64)
            tl.store(starts + 1 + at, (total + tl.cumsum(length, 0)).to(tl.int32), at < bags)
            total += tl.sum(length, 0)
            negative += tl.sum((length < 0).to(tl.int32), 0)
        wrong = (negative > 0) | (total != tl.load(job + JOB_IDS))
        tl.store(verdict, wrong.to(tl.int32))
        if wrong:
            tl.store(flags.to(tl.pointer_type(tl.int32)) + number, 1)


@triton.jit
def _row_address(id, table, row_bytes, location, hbm_rows, share, staging, INDIRECT: tl.constexpr):
    """Where the rows with these ids lie: addresses, int64, of the shape of `id`.

    id        of the table's own rows, or negative: of an overlay's, numbered so that they lie there too (`quant.gpu.residence.layers`)
    table     address of row 0, in HBM or in registered host memory; or of the first row that the CPU gathered
    location  of each id, int64 (stored as int32, written by the cache): 0 or more: a slot; -1: in the table; below: -2 minus
              the place in `staging`, in units of 16 bytes. -1 where the job has no cache
    hbm_rows  address of the cache's slot 0, or of the first HBM row of a split table
    share     rows of each SPLIT_BLOCK that lie at `hbm_rows`, one after another; 0: the table is not split
    staging   address of the in-flight batch's staging buffer
    INDIRECT  whether any job of the launch has a cache or is split
    """
    address = table + id * row_bytes
    if INDIRECT:
        in_block = id % _SPLIT_BLOCK
        is_in_hbm = (in_block < share) & (id >= 0)
        slot = tl.where(is_in_hbm, id // _SPLIT_BLOCK * share + in_block, location)
        staged = staging + (_IN_TABLE - 1 - slot) * _STAGING_UNIT
        address = tl.where(
            slot >= 0, hbm_rows + slot * row_bytes, tl.where(slot < _IN_TABLE, staged, address)
        )
    return address


@triton.jit
def _bags(job, starts, vector, is_real, POOLED: tl.constexpr):
    """For each vector, the index of its bag's first id and the bag's length, int32; and the length of the
    longest bag.

    An unpooled vector is a bag of one id. vector: int32; is_real: whether there is such a vector. starts: as
    for `pool`.
    """
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
    TENSORS: tl.constexpr,
):
    """One program's COLUMNS columns of a job whose rows are in FORMAT: the weighted sums of their bags,
    written to outputs.

    job           int64 [FIELDS], written by `quant.gpu.batch.layout`; with TENSORS by `quant.gpu.tensors.tensors`, [TENSOR_JOB_FIELDS]
    inputs        address of the batch's inputs, bytes: int64 ids [ids] at IDS_AT
    starts        int32 [bags + 1], indices of the bags' first ids, written by `bag_starts`; not read where bags have one length.
                  TENSORS: the address that OFFSETS_AT counts from (`quant.gpu.kernels.tensor_bags`)
    weights_base  address of fp32 weights [ids] at WEIGHTS_AT: the batch's inputs, where these were sent together
    outputs       address of the batch's outputs, bytes: this program writes its columns of [VECTORS, DIM] at OUT_AT
    flag          int32 [1] of the job: this program writes 1 where an id is not below ROWS, both as uint64. TENSORS: address of a
                  report (`quant.gpu.kernels.tensor_bags.report`)
    ids_count     TENSORS: ids of jobs that do not say how many they have
    asked         TENSORS: the address that ASKED_AT counts from, of the ids as they came
    locations  address of the batch's locations; int32 [ids] at byte LOCATIONS_AT; written by the cache's probe and resolve
    staging    address of the in-flight batch's staging buffer, filled by the cache's fetch kernels
    program    its number among those of the job

    The tensors below are [COLUMNS * LANES] of a column and a lane each, and [COLUMNS * LANES, WORDS] of the
    int32 words of a chunk.
    """
    PER_WORD: tl.constexpr = (
        16
        if FORMAT == FORMAT_INT2
        else 8
        if FORMAT == FORMAT_INT4
        else 4
        if FORMAT <= FORMAT_FP8
        else 2
        if FORMAT == FORMAT_FP16
        else 1
    )
    HAS_SCALE: tl.constexpr = FORMAT <= FORMAT_INT8
    # What is added for a row that is not read: -0, as x + -0 is x for any x. Quantized rows have scale and
    # bias 0 there.
    NOTHING: tl.constexpr = (
        0
        if HAS_SCALE
        else -2139062144  # 0x80808080
        if FORMAT == FORMAT_FP8
        else -2147450880  # 0x80008000
        if FORMAT == FORMAT_FP16
        else _MINUS_ZERO
    )
    HEADER: tl.constexpr = 1 if HAS_SCALE else 0  # words before the values: scale and bias, fp16 each
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
        for r in tl.static_range(UNROLL):
            is_known = id[r].to(tl.uint64) < rows.to(tl.uint64)  # negative ids are large ones
            is_wrong = is_wrong | (in_bag[r] & (is_known == 0))
            is_read = is_read + (in_bag[r] & is_known,)
            location = _IN_TABLE
            if INDIRECT:
                is_located = is_read[r] & (place_in_bag[r] < located)
                location = tl.load(places + (start + place_in_bag[r]), is_located, _IN_TABLE).to(tl.int64)
            row = row + (_row_address(id[r], table, row_bytes, location, hbm_rows, share, staging, INDIRECT),)
        words = ()
        scale_bias = ()
        for r in tl.static_range(UNROLL):
            begin = tl.multiple_of((row[r] + chunk * (4 * WORDS)).to(tl.pointer_type(tl.int32)), 4 * WORDS)
            words = words + (tl.load(begin[:, None] + word, is_read[r][:, None], NOTHING),)
            if HAS_SCALE:
                scale_bias = scale_bias + (tl.load(row[r].to(tl.pointer_type(tl.int32)), is_read[r], 0),)
        for r in tl.static_range(UNROLL):
            scale = tl.full((COLUMNS * LANES,), 1.0, tl.float32)
            if WEIGHTED:
                scale = tl.load(
                    weights + (start + place_in_bag[r]), is_read[r] & (place_in_bag[r] < weighted), 1.0
                )
            if HAS_SCALE:
                biases += scale * half(scale_bias[r] >> 16)
                scale = scale * half(scale_bias[r])
            values = values_of(words[r], FORMAT, PER_WORD)
            now = ()
            for i in tl.static_range(PER_WORD):
                now = now + (sums[i] + values[i] * scale_of(scale, i, FORMAT, PER_WORD)[:, None],)
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
                not HAS_SCALE
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
        if HAS_SCALE:
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


@triton.jit(
    do_not_specialize=[
        "jobs",
        "job_of_program",
        "inputs",
        "scratch",
        "outputs",
        "flags",
        "locations",
        "staging",
    ]
)
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
):
    """Every job of a launch. FORMATS: a bit for each row format among the tables, so that only those are
    compiled.

    jobs            address of int64 [jobs, FIELDS], written by `quant.gpu.batch.merge.merge`
    job_of_program  address of int32 [programs], written there too
    scratch         address of int32, written by `bag_starts`; a job whose verdict is 1 is left out
    flags           address of int32 [jobs], zeros; 1 is written where an id is out of range
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
                        False,
                    )
