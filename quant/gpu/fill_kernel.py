"""The kernel that fills matrices with parts of many requests, in Triton: vectors where lookups wrote them, and staged tensors.

What follows lookups on the device takes fp32 [rows, width] for each of its inputs, the rows of one request behind those of
another (`quant.gpu.follower`). One launch puts all of them there; fp16 becomes fp32. A job's fields are those of
`quant.gpu.job.FillField`.
"""

import triton
import triton.language as tl

from tableside.quant.gpu.kernel_constants import (
    FILL_FIRST_PROGRAM,
    FILL_IS_HALF,
    FILL_SIZE,
    FILL_SOURCE,
    FILL_STEP,
    FILL_TARGET,
    FILL_VALUES,
    FILL_WIDTH,
)


@triton.jit(do_not_specialize=["jobs", "job_of_program"])
def fill(jobs: tl.int64, job_of_program: tl.int64, BLOCK: tl.constexpr):
    """Copies BLOCK values of a job, or the rest of them.

    jobs            address of int64 [jobs, FILL_SIZE], written by `quant.gpu.follower.Fills`
    job_of_program  address of int32 [programs], written there too
    SOURCE          fp32 or fp16 [VALUES / WIDTH, WIDTH], STEP values from row to row; written by the lookup kernel or the host
    TARGET          fp32 [VALUES], which this kernel writes
    """
    number = tl.load(job_of_program.to(tl.pointer_type(tl.int32)) + tl.program_id(0)).to(tl.int64)
    job = jobs.to(tl.pointer_type(tl.int64)) + number * FILL_SIZE
    source = tl.load(job + FILL_SOURCE)
    target = tl.load(job + FILL_TARGET).to(tl.pointer_type(tl.float32))
    first = (tl.program_id(0).to(tl.int64) - tl.load(job + FILL_FIRST_PROGRAM)) * BLOCK
    at = first + tl.arange(0, BLOCK)
    values = tl.load(job + FILL_VALUES)
    is_value = at < values
    is_read = at < tl.where(source == 0, 0, values)
    width = tl.load(job + FILL_WIDTH).to(tl.int32)
    row = at.to(tl.int32) // width
    from_at = row.to(tl.int64) * tl.load(job + FILL_STEP) + (at.to(tl.int32) - row * width)
    if tl.load(job + FILL_IS_HALF) != 0:
        halves = tl.load(source.to(tl.pointer_type(tl.float16)) + from_at, is_read, 0.0)
        tl.store(target + at, halves.to(tl.float32), is_value)
    else:
        tl.store(target + at, tl.load(source.to(tl.pointer_type(tl.float32)) + from_at, is_read, 0.0), is_value)
