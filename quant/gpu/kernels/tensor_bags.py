"""Bags named by a caller's offsets on the device, and error reports, in Triton.
Nobody waits for the device, and the tensors may be gone when the host looks. So the first program that finds
an error writes all the host needs to page-locked memory; later errors are dropped.
`quant.gpu.tensors.tensors` writes the jobs: JobField, then `quant.gpu.kernels.job.TensorField`."""

import triton
import triton.language as tl

from tableside.quant.gpu.kernels.constants import (
    JOB_BAG_LENGTH,
    JOB_IDS,
    JOB_ROWS,
    JOB_VECTORS,
    REPORT_BAG,
    REPORT_END,
    REPORT_IDS,
    REPORT_IS_THERE,
    REPORT_NAME,
    REPORT_POSITION,
    REPORT_SIZE,
    REPORT_VALUE,
    TENSOR_ASKED_AT,
    TENSOR_IS_FIRST,
    TENSOR_IS_LAST,
    TENSOR_NAME,
    TENSOR_OFFSET_BYTES,
    TENSOR_OFFSETS,
    TENSOR_OFFSETS_AT,
)

_NONE = tl.constexpr(2**31 - 1)  # above every number of an id or a bag


@triton.jit
def offset_at(offsets, number, is_read, other, offset_bytes):
    """Returns offsets by number, int64. offsets: address of the first; offset_bytes: 4 or 8; other: value
    where not read."""
    if offset_bytes == 8:
        value = tl.load(offsets.to(tl.pointer_type(tl.int64)) + number, is_read, other)
    else:
        value = tl.load(offsets.to(tl.pointer_type(tl.int32)) + number, is_read, other).to(tl.int64)
    return value


@triton.jit
def _bounds(job, offsets, ids, vector, is_real):
    """Returns the begin and end of each vector's bag, int64. ids: of the job."""
    offset_bytes = tl.load(job + TENSOR_OFFSET_BYTES)
    first = offsets + tl.load(job + TENSOR_OFFSETS_AT)
    count = tl.load(job + TENSOR_OFFSETS)
    start = offset_at(first, vector, is_real, 0, offset_bytes)
    end = offset_at(first, vector + 1, is_real & (vector + 1 < count), 0, offset_bytes)
    return start, tl.where(is_real & (vector + 1 >= count), ids, end)


@triton.jit
def ids_of(job, ids_count):
    """Number of a job's ids. ids_count: for jobs without a number."""
    ids = tl.load(job + JOB_IDS)
    return tl.where(ids < 0, ids_count, ids)


@triton.jit
def bags_of_offsets(job, offsets, ids_count, vector, is_real, POOLED: tl.constexpr):
    """Returns each vector's first id and bag length, int32; the longest length; and whether its offsets are
    wrong, which empties the bag. An unpooled vector is a bag of one. offsets: base address of OFFSETS_AT.
    vector: int32; is_real: mask of existing vectors."""
    start = vector
    length = is_real.to(tl.int32)
    longest = 1
    is_bad = is_real & (vector < 0)
    if POOLED:
        if tl.load(job + TENSOR_OFFSETS_AT) >= 0:
            ids = ids_of(job, ids_count)
            begin, end = _bounds(job, offsets, ids, vector, is_real)
            is_bad = (begin < 0) | (end < begin) | (end > ids)
            is_bad = is_bad | ((vector == 0) & (begin != 0) & (tl.load(job + TENSOR_IS_FIRST) != 0))
            is_last = (vector + 1 == tl.load(job + JOB_VECTORS)) & (tl.load(job + TENSOR_IS_LAST) != 0)
            is_bad = is_real & (is_bad | (is_last & (end != ids)))
            start = tl.where(is_bad, 0, begin).to(tl.int32)
            length = tl.where(is_bad, 0, end - begin).to(tl.int32)
            longest = tl.max(length, 0)
        else:
            longest = tl.load(job + JOB_BAG_LENGTH).to(tl.int32)
            start = vector * longest
            length = tl.where(is_real, longest, 0)
    return start, length, longest, is_bad


@triton.jit
def report(
    job,
    target,
    ids,
    asked,
    offsets,
    ids_count,
    vector,
    is_bad,
    start,
    length,
    longest,
    lane,
    LANES: tl.constexpr,
):
    """Reports an error in a program's bags or ids, unless one was reported before.
    target   address of int64 [REPORT_SIZE], page-locked, written here, then an int64 address: int32 on the
         device, which says whether there is a report. The host clears both
    ids      int64 [ids], row numbers of the job. asked: base address of ASKED_AT, the original ids
    others   as for `bags_of_offsets`, and its results
    """
    bag = tl.min(tl.where(is_bad, vector, _NONE), 0)
    rows = tl.load(job + JOB_ROWS).to(tl.uint64)
    first_wrong = tl.full(vector.shape, _NONE, tl.int32)
    for step in range(0, longest, LANES):
        at = start + step + lane
        in_bag = step + lane < length
        id = tl.load(ids + at, in_bag, 0)
        first_wrong = tl.minimum(first_wrong, tl.where(in_bag & (id.to(tl.uint64) >= rows), at, _NONE))
    position = tl.min(first_wrong, 0)
    told = target.to(tl.pointer_type(tl.int64))
    claim = tl.load(told + REPORT_SIZE).to(tl.pointer_type(tl.int32))
    if tl.atomic_cas(claim, 0, 1) == 0:
        base = tl.zeros((), tl.int64)
        value = tl.zeros((), tl.int64)
        end = tl.zeros((), tl.int64)
        has_offsets = tl.load(job + TENSOR_OFFSETS_AT) >= 0
        count = ids_of(job, ids_count)
        if bag < _NONE:
            value, end = _bounds(job, offsets, count, bag, bag >= 0)
        else:
            if has_offsets:
                base, end = _bounds(job, offsets, count, tl.zeros((), tl.int32), bag >= 0)
            value = tl.load((asked + tl.load(job + TENSOR_ASKED_AT)).to(tl.pointer_type(tl.int64)) + position)
        tl.store(told + REPORT_NAME, tl.load(job + TENSOR_NAME))
        tl.store(told + REPORT_BAG, tl.where(bag < _NONE, bag, -1).to(tl.int64))
        tl.store(told + REPORT_POSITION, position.to(tl.int64) - base)
        tl.store(told + REPORT_VALUE, value)
        tl.store(told + REPORT_END, end)
        tl.store(told + REPORT_IDS, count)
        tl.store(told + REPORT_IS_THERE, 1)
