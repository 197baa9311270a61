"""Lookups of a caller's tensors on the device, in Triton: the lookup kernel over several buffers, and jobs
for the kernels before it. Ids, offsets and weights stay in place. In a packed call only the offsets, which
the host does not read, say where a feature's ids begin. `quant.gpu.tensors.tensors` launches both kernels."""

import triton.language as tl

from tableside.quant.device.launch import kernel
from tableside.quant.gpu.kernels.constants import (
    FORMAT_SIZE,
    JOB_FIRST_PROGRAM,
    JOB_FORMAT,
    JOB_SIZE,
    TENSOR_SIZE,
)
from tableside.quant.gpu.kernels.lookup import pool
from tableside.quant.gpu.kernels.tensor_bags import offset_at

_ENTRIES = tl.constexpr(1024)  # of `job_of_program`, that are written at once


@kernel
def look_up(
    jobs: tl.int64,
    job_of_program: tl.int64,
    inputs: tl.int64,
    asked: tl.int64,
    offsets: tl.int64,
    weights: tl.int64,
    outputs: tl.int64,
    locations: tl.int64,
    staging: tl.int64,
    ids_count: tl.int64,
    target: tl.int64,
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
    """Runs every job of a call. FORMATS: a bit for each row format among the tables; only those are compiled.
    jobs            address of int64 [jobs, TENSOR_JOB_FIELDS], written by `quant.gpu.tensors.tensors`
    job_of_program  address of int32 [programs], written there too
    inputs          base address of IDS_AT: row numbers
    asked           base address of ASKED_AT: the original ids
    offsets         base address of OFFSETS_AT; weights: of WEIGHTS_AT
    ids_count       ids of jobs with IDS -1
    target          address of a report (`quant.gpu.kernels.tensor_bags.report`)
    outputs, locations, staging: as for `quant.gpu.kernels.lookup.pool`
    """
    number = tl.load(job_of_program.to(tl.pointer_type(tl.int32)) + tl.program_id(0)).to(tl.int64)
    job = jobs.to(tl.pointer_type(tl.int64)) + number * (JOB_SIZE + TENSOR_SIZE)
    program = tl.program_id(0).to(tl.int64) - tl.load(job + JOB_FIRST_PROGRAM)
    row_format = tl.load(job + JOB_FORMAT)
    for FORMAT in tl.static_range(FORMAT_SIZE):
        if (FORMATS >> FORMAT) & 1:
            if row_format == FORMAT:
                pool(
                    job,
                    inputs,
                    offsets,
                    weights,
                    outputs,
                    target,
                    locations,
                    staging,
                    program,
                    ids_count,
                    asked,
                    FORMAT,
                    POOLED,
                    WEIGHTED,
                    INDIRECT,
                    WHOLE_WORDS,
                    UNROLL,
                    COLUMNS,
                    LANES,
                    TIGHT,
                    True,
                )


@kernel
def spread(
    template: tl.int64,
    places: tl.int64,
    offsets: tl.int64,
    offset_bytes: tl.int64,
    bags: tl.int64,
    ids: tl.int64,
    jobs: tl.int64,
    job_of_program: tl.int64,
    programs: tl.int64,
    count: tl.int64,
    LANES: tl.constexpr,
    SIZE: tl.constexpr,
    IDS_AT: tl.constexpr,
    OTHER_AT: tl.constexpr,
    OTHER_BYTES: tl.constexpr,
    IDS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the jobs of a kernel over features whose ids lie one after another. One program a job.
    template        address of int64 [count + 1, SIZE]: common to all calls; the last is for idle programs
    places          address of int64 [count]: each job's feature among those of the offsets
    offsets         address of int32 or int64 (`offset_bytes`) [features * bags + 1] into `ids` ids
    jobs            address of int64 [count + 1, SIZE], written here: IDS_AT (int64 bytes), OTHER_AT (ids of
                OTHER_BYTES), IDS, and FIRST, the first program of BLOCK ids each
    job_of_program  address of int32 [programs], written here too
    LANES           a power of 2, count or more
    """
    mine = tl.program_id(0)
    lane = tl.arange(0, LANES)
    is_job = lane < count
    place = tl.load(places.to(tl.pointer_type(tl.int64)) + lane, is_job, 0)
    start = offset_at(offsets, place * bags, is_job, 0, offset_bytes)
    end = offset_at(offsets, (place + 1) * bags, is_job, 0, offset_bytes)
    is_right = is_job & (start >= 0) & (end >= start) & (end <= ids)  # the lookup says what is wrong
    start = tl.where(is_right, start, 0)
    ids_of_job = tl.where(is_right, end - start, 0)
    blocks = (ids_of_job + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(lane < mine, blocks, 0), 0)
    own_start = tl.sum(tl.where(lane == mine, start, 0), 0)
    own_count = tl.sum(tl.where(lane == mine, ids_of_job, 0), 0)
    last = first + tl.sum(tl.where(lane == mine, blocks, 0), 0)
    if mine == count:
        last = programs
    source = template.to(tl.pointer_type(tl.int64)) + mine * SIZE
    target = jobs.to(tl.pointer_type(tl.int64)) + mine * SIZE
    for field in tl.static_range(SIZE):
        value = tl.load(source + field)
        if field == IDS_AT:
            value = own_start * 8
        elif field == OTHER_AT:
            value = own_start * OTHER_BYTES
        elif field == IDS:
            value = own_count
        elif field == FIRST:
            value = first
        tl.store(target + field, value)
    for at in range(first, last, _ENTRIES):
        entry = at + tl.arange(0, _ENTRIES)
        tl.store(job_of_program.to(tl.pointer_type(tl.int32)) + entry, mine, entry < last)
