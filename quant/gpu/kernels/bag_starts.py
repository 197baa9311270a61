"""The kernel before a lookup of lengths, in Triton: where bags begin among a job's ids."""

import triton.language as tl

from tableside.quant.device.launch import kernel
from tableside.quant.gpu.kernels.constants import (
    JOB_IDS,
    JOB_LENGTHS_AT,
    JOB_SIZE,
    JOB_STARTS_AT,
    JOB_VECTORS,
)


# Arguments that are not constants are int64 addresses. Triton must not compile variants for particular values
# of them.
@kernel
def bag_starts(jobs: tl.int64, inputs: tl.int64, scratch: tl.int64, flags: tl.int64, BLOCK: tl.constexpr):
    """Computes bag starts for jobs with lengths. One program a job, BLOCK bags at once.
    jobs     address of int64 [jobs, FIELDS], written by `quant.gpu.batch.placed`
    inputs   address of the batch's inputs, bytes; int32 lengths [bags] at LENGTHS_AT, written by the client
    scratch  address of int32; at STARTS_AT this writes a verdict (1: lengths wrong), then starts [bags + 1]
    flags    address of int32 [jobs]; this writes 1 for a negative length or a wrong sum
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
