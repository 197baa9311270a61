"""The kernel that turns ids into row numbers, in Triton. Everything after it reads row numbers and knows of no ids.

What it computes is specified by `quant.ids`, whose plain form, `RowMap.find`, tests hold it to. An id that is refused becomes row
-1, which the lookup kernel refuses as it refuses any number outside a table; the host then finds out which id it was.

A job's fields are those of `quant.gpu.job.ResolveField`, those of a row map are `quant.ids.NativeRowMap`'s, with addresses that
the device reads (`quant.gpu.row_map`).
"""

import triton
import triton.language as tl

from tableside.quant.gpu.kernel_constants import (
    HASH_MIX,
    HASH_PILOT,
    HASH_SEED,
    HASH_SLOT,
    HASH_SPREAD,
    MAP_BACKFILLED,
    MAP_BUCKET_IDS,
    MAP_BUCKETS,
    MAP_BUCKETS_HERE,
    MAP_DEFAULT_ROW,
    MAP_ENTRIES,
    MAP_FIRST,
    MAP_FIRST_BUCKET,
    MAP_ID_COUNT,
    MAP_ID_STEP,
    MAP_IDS,
    MAP_OWN,
    MAP_PILOTS,
    RESOLVE_FIRST_PROGRAM,
    RESOLVE_FOUND_AT,
    RESOLVE_IDS,
    RESOLVE_IDS_AT,
    RESOLVE_ROW_MAP,
    RESOLVE_SIZE,
    RESOLVE_TARGET_AT,
)


@triton.jit
def mix(id):
    """The hash of ids, uint64."""
    x = id.to(tl.uint64)
    x = (x ^ (x >> 32)) * HASH_MIX
    x = (x ^ (x >> 32)) * HASH_MIX
    return x ^ (x >> 32)


@triton.jit
def _reduce(x, count):
    """The high half of `x`, uint64, as a number below `count`, uint32."""
    return tl.umulhi((x >> 32).to(tl.uint32), count).to(tl.int64)


@triton.jit
def _bucket_of(row_map, id, hashed, is_id):
    """The bucket of each id, counted from the first one that is here, and whether it is here."""
    buckets = tl.load(row_map + MAP_BUCKETS)
    bucket_ids = tl.load(row_map + MAP_BUCKET_IDS)
    bucket = (hashed & (buckets - 1).to(tl.uint64)).to(tl.int64)
    is_here = is_id
    if bucket_ids > 0:
        bucket = tl.maximum(id, 0) // bucket_ids
        is_here = is_here & (id >= 0) & (bucket < buckets)
    bucket = bucket - tl.load(row_map + MAP_FIRST_BUCKET)
    return bucket, is_here & (bucket >= 0) & (bucket < tl.load(row_map + MAP_BUCKETS_HERE))


@triton.jit
def _kept(row_map, row, is_read):
    """The id that is kept for each row."""
    at = tl.load(row_map + MAP_IDS) + row * tl.load(row_map + MAP_ID_STEP)
    return tl.load(at.to(tl.pointer_type(tl.int64)), is_read, 0)


@triton.jit
def _entry(row_map, bucket, is_here):
    """The first row of each bucket, int64, its slots and its seed, uint32; zeros where there is none. One read of 16 bytes."""
    entries = tl.load(row_map + MAP_ENTRIES).to(tl.pointer_type(tl.int64))
    at = tl.multiple_of(entries + 2 * bucket, 16)[:, None] + tl.arange(0, 2)[None, :]
    first, packed = tl.split(tl.load(at, is_here[:, None], 0))
    return first, packed.to(tl.uint32), (packed.to(tl.uint64) >> 32).to(tl.uint32)


@triton.jit
def _find_indexed(row_map, id, is_id):
    """The row of each id in a table of raw ids, and whether it is there. row_map: int64 pointer to a NativeRowMap; id: int64."""
    hashed = mix(id)
    bucket, is_here = _bucket_of(row_map, id, hashed, is_id)
    first, slots, seed = _entry(row_map, bucket, is_here)
    is_here = is_here & (slots > 0)
    g = (hashed ^ (seed.to(tl.uint64) * HASH_SEED)) * HASH_SPREAD
    g = (g ^ (g >> 32)) * HASH_MIX
    pilot_at = (first * 5 >> 4) + bucket + _reduce(g, ((slots.to(tl.uint64) * 5) >> 4).to(tl.uint32) + 1)
    pilot = tl.load(tl.load(row_map + MAP_PILOTS).to(tl.pointer_type(tl.uint8)) + pilot_at, is_here, 0).to(tl.uint64)
    row = first + _reduce((g ^ ((pilot + 1) * HASH_PILOT)) * HASH_SLOT, slots)
    return row, is_here & (_kept(row_map, row, is_here) == id)


@triton.jit
def _is_backfilled(row_map, row, is_found):
    """Which of the rows that were found came from an older version."""
    bits = tl.load(row_map + MAP_BACKFILLED)
    result = is_found & (row >= tl.load(row_map + MAP_OWN))
    if bits != 0:
        byte = tl.load(bits.to(tl.pointer_type(tl.uint8)) + (row >> 3), is_found, 0).to(tl.int64)
        result = is_found & (((byte >> (row & 7)) & 1) != 0)
    return result


@triton.jit
def _resolve(row_map, source, target, found, count, first, ids, has_found, BLOCK: tl.constexpr):
    """One program's ids of one lookup.

    row_map  pointer to the table's NativeRowMap, int64
    source   int64 [ids], the lookup's ids; target: int64 [ids], where this program writes its row numbers, and -1 for refused ids
    found    uint8 [ids]; this program writes 1 where the table has the id, if `has_found`
    count    int64 [2] of the lookup, to which it adds its ids without a row, and those whose row came from an older version
    first    number of its first id
    """
    at = first + tl.arange(0, BLOCK)
    is_id = at < ids
    id = tl.load(source + at, is_id, 0)
    row = id - tl.load(row_map + MAP_FIRST)
    is_found = is_id & (row.to(tl.uint64) < tl.load(row_map + MAP_ID_COUNT).to(tl.uint64))  # negative numbers are large ones
    if tl.load(row_map + MAP_ENTRIES) != 0:
        row, is_found = _find_indexed(row_map, id, is_id)
    tl.store(target + at, tl.where(is_found, row, tl.load(row_map + MAP_DEFAULT_ROW)), is_id)
    if has_found:
        tl.store(found + at, is_found.to(tl.uint8), is_id)
    # One sum of both, of 16 bits each, costs half.
    unfound = (is_id & (is_found == 0)).to(tl.int32) + (_is_backfilled(row_map, row, is_found).to(tl.int32) << 16)
    counted = tl.sum(unfound, 0)
    if counted > 0:
        tl.atomic_add(count, (counted & 0xFFFF).to(tl.int64), sem="relaxed")
        tl.atomic_add(count + 1, (counted >> 16).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["jobs", "job_of_program", "source", "inputs", "outputs", "counts"])
def resolve(
    jobs: tl.int64,
    job_of_program: tl.int64,
    source: tl.int64,
    inputs: tl.int64,
    outputs: tl.int64,
    counts: tl.int64,
    BLOCK: tl.constexpr,
):
    """Every lookup of a batch whose ids are not row numbers, BLOCK ids a program.

    jobs            address of int64 [jobs, RESOLVE_SIZE], written by `quant.gpu.resolve.write_jobs`
    job_of_program  address of int32 [programs], written there too
    source          address of the batch's inputs as they were sent, bytes: int64 ids [ids] at IDS_AT
    inputs          address of the inputs that everything after this reads; row numbers are written at TARGET_AT; or `source`
    outputs         address of the batch's outputs, bytes: found masks are written at FOUND_AT
    counts          address of int64 [jobs, 2], to which this kernel adds (see `_resolve`)
    """
    program = tl.program_id(0).to(tl.int64)
    number = tl.load(job_of_program.to(tl.pointer_type(tl.int32)) + program).to(tl.int64)
    job = jobs.to(tl.pointer_type(tl.int64)) + number * RESOLVE_SIZE
    row_map = tl.load(job + RESOLVE_ROW_MAP)
    ids_at, target_at, ids = tl.load(job + RESOLVE_IDS_AT), tl.load(job + RESOLVE_TARGET_AT), tl.load(job + RESOLVE_IDS)
    first = (program - tl.load(job + RESOLVE_FIRST_PROGRAM)) * BLOCK
    if row_map == 0:
        at = first + tl.arange(0, BLOCK)
        words = tl.load((source + ids_at).to(tl.pointer_type(tl.int32)) + at, at < ids, 0)
        tl.store((inputs + target_at).to(tl.pointer_type(tl.int32)) + at, words, at < ids)
    else:
        found_at = tl.load(job + RESOLVE_FOUND_AT)
        _resolve(
            row_map.to(tl.pointer_type(tl.int64)),
            (source + ids_at).to(tl.pointer_type(tl.int64)),
            (inputs + target_at).to(tl.pointer_type(tl.int64)),
            (outputs + tl.maximum(found_at, 0)).to(tl.pointer_type(tl.uint8)),
            counts.to(tl.pointer_type(tl.int64)) + 2 * number,
            first,
            ids,
            found_at >= 0,
            BLOCK,
        )
