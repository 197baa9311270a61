"""The Triton kernel that fills a follower's matrices with vectors and staged tensors of many requests.
A follower (`quant.gpu.batch.follower`) takes [rows, width] for each input, in a precision of its own,
requests stacked. One launch writes all and rounds each value once, to nearest (to bf16 in the interpreter:
towards zero). Jobs have the fields of `quant.gpu.kernels.job.FillField`."""

import triton.language as tl

from tableside.quant.device.launch import kernel
from tableside.quant.gpu.kernels.constants import (
    AS_FP16,
    AS_FP32,
    FILL_FIRST_PROGRAM,
    FILL_IS_HALF,
    FILL_PRECISION,
    FILL_SIZE,
    FILL_SOURCE,
    FILL_STEP,
    FILL_TARGET,
    FILL_VALUES,
    FILL_WIDTH,
)


@kernel
def fill(jobs: tl.int64, job_of_program: tl.int64, BLOCK: tl.constexpr):
    """Copies BLOCK values of a job, or the rest.
    jobs            address of int64 [jobs, FILL_SIZE], written by `quant.gpu.batch.follower.Fills`
    job_of_program  address of int32 [programs], written there too
    SOURCE          fp32 or fp16 [VALUES / WIDTH, WIDTH], stride STEP; by the lookup kernel or the host
    TARGET          [VALUES] of PRECISION, written here
    """
    number = tl.load(job_of_program.to(tl.pointer_type(tl.int32)) + tl.program_id(0)).to(tl.int64)
    job = jobs.to(tl.pointer_type(tl.int64)) + number * FILL_SIZE
    source = tl.load(job + FILL_SOURCE)
    target = tl.load(job + FILL_TARGET)
    first = (tl.program_id(0).to(tl.int64) - tl.load(job + FILL_FIRST_PROGRAM)) * BLOCK
    at = first + tl.arange(0, BLOCK)
    values = tl.load(job + FILL_VALUES)
    is_value = at < values
    is_read = at < tl.where(source == 0, 0, values)
    width = tl.load(job + FILL_WIDTH).to(tl.int32)
    row = at.to(tl.int32) // width
    from_at = row.to(tl.int64) * tl.load(job + FILL_STEP) + (at.to(tl.int32) - row * width)
    if tl.load(job + FILL_IS_HALF) != 0:
        found = tl.load(source.to(tl.pointer_type(tl.float16)) + from_at, is_read, 0.0).to(tl.float32)
    else:
        found = tl.load(source.to(tl.pointer_type(tl.float32)) + from_at, is_read, 0.0)
    precision = tl.load(job + FILL_PRECISION)
    if precision == AS_FP32:
        tl.store(target.to(tl.pointer_type(tl.float32)) + at, found, is_value)
    elif precision == AS_FP16:
        tl.store(target.to(tl.pointer_type(tl.float16)) + at, found.to(tl.float16), is_value)
    else:
        tl.store(target.to(tl.pointer_type(tl.bfloat16)) + at, found.to(tl.bfloat16), is_value)
