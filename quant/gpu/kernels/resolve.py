"""The Triton kernel that turns ids into row numbers; everything after it reads row numbers.
`quant.rows.ids` and `quant.rows.overlay` specify it; tests compare it with `RowMap.find`. A refused id
becomes row -1, which the lookup kernel refuses; the host then finds the id. Jobs:
`quant.gpu.kernels.job.ResolveField`. Row maps and layers: `quant.rows.ids.NativeRowMap`,
`quant.rows.overlay.NativeLayer`, with device addresses (`quant.gpu.residence`)."""

import triton
import triton.language as tl

from tableside.quant.device.launch import kernel
from tableside.quant.gpu.kernels.constants import (
    FILTER_BIT_0,
    FILTER_BIT_1,
    FILTER_BIT_2,
    FILTER_FACTOR,
    HASH_MIX,
    HASH_PILOT,
    HASH_SEED,
    HASH_SLOT,
    HASH_SPREAD,
    LAYER_BUCKETS,
    LAYER_DELETED,
    LAYER_ENTRIES,
    LAYER_FILTER,
    LAYER_FILTER_WORDS,
    LAYER_FIRST_ROW,
    LAYER_ID_STEP,
    LAYER_IDS,
    LAYER_PILOTS,
    LAYER_SIZE,
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
    MAP_LAYER_COUNT,
    MAP_LAYERS,
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

_NO_ROW = tl.constexpr(-1)


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
def _kept(ids, id_step, row, is_read):
    """The id that is kept for each row. ids: address of the first; id_step: bytes to the next."""
    return tl.load((ids + row * id_step).to(tl.pointer_type(tl.int64)), is_read, 0)


@triton.jit
def _entry(entries, bucket, is_here):
    """Returns each bucket's first row (int64), slots and seed (uint32), in one 16-byte read; zeros
    outside."""
    at = (
        tl.multiple_of(entries.to(tl.pointer_type(tl.int64)) + 2 * bucket, 16)[:, None]
        + tl.arange(0, 2)[None, :]
    )
    first, packed = tl.split(tl.load(at, is_here[:, None], 0))
    return first, packed.to(tl.uint32), (packed.to(tl.uint64) >> 32).to(tl.uint32)


@triton.jit
def _bit(bits, at, is_read):
    """Mask of set bits. bits: address of uint8."""
    byte = tl.load(bits.to(tl.pointer_type(tl.uint8)) + (at >> 3), is_read, 0).to(tl.int64)
    return is_read & (((byte >> (at & 7)) & 1) != 0)


@triton.jit
def _place(entries, pilots, hashed, bucket, is_here):
    """Returns the row where each id would lie, and whether its bucket has any. entries, pilots: an index's
    addresses."""
    first, slots, seed = _entry(entries, bucket, is_here)
    is_here = is_here & (slots > 0)
    g = (hashed ^ (seed.to(tl.uint64) * HASH_SEED)) * HASH_SPREAD
    g = (g ^ (g >> 32)) * HASH_MIX
    pilot_at = (first * 5 >> 4) + bucket + _reduce(g, ((slots.to(tl.uint64) * 5) >> 4).to(tl.uint32) + 1)
    pilot = tl.load(pilots.to(tl.pointer_type(tl.uint8)) + pilot_at, is_here, 0).to(tl.uint64)
    return first + _reduce((g ^ ((pilot + 1) * HASH_PILOT)) * HASH_SLOT, slots), is_here


@triton.jit
def _find_indexed(row_map, id, is_id):
    """Returns the row of each raw id and whether it is there. row_map: int64 pointer to a NativeRowMap; id:
    int64."""
    hashed = mix(id)
    bucket, is_here = _bucket_of(row_map, id, hashed, is_id)
    row, is_here = _place(
        tl.load(row_map + MAP_ENTRIES), tl.load(row_map + MAP_PILOTS), hashed, bucket, is_here
    )
    kept = _kept(tl.load(row_map + MAP_IDS), tl.load(row_map + MAP_ID_STEP), row, is_here)
    return row, is_here & (kept == id)


@triton.jit
def _may_have(layer, id, is_asked):
    """Mask of wanted ids that a layer's filter passes: one read of 8 bytes each."""
    h = id.to(tl.uint64) * FILTER_FACTOR
    at = _reduce(h, tl.load(layer + LAYER_FILTER_WORDS).to(tl.uint32))
    word = tl.load(tl.load(layer + LAYER_FILTER).to(tl.pointer_type(tl.int64)) + at, is_asked, 0).to(
        tl.uint64
    )
    one = tl.full(id.shape, 1, tl.uint64)
    bits = (
        (one << ((h >> FILTER_BIT_0) & 63))
        | (one << ((h >> FILTER_BIT_1) & 63))
        | (one << ((h >> FILTER_BIT_2) & 63))
    )
    return is_asked & ((word & bits) == bits)


@triton.jit
def _find_in_layer(layer, id, hashed, is_asked):
    """Mask of wanted ids that a layer has, and their row numbers, NO_ROW if deleted. layer: int64 pointer to
    a NativeLayer; id: int64; hashed: its hash."""
    may_have = _may_have(layer, id, is_asked)
    bucket = (hashed & (tl.load(layer + LAYER_BUCKETS) - 1).to(tl.uint64)).to(tl.int64)
    slot, is_there = _place(
        tl.load(layer + LAYER_ENTRIES), tl.load(layer + LAYER_PILOTS), hashed, bucket, may_have
    )
    is_there = is_there & (
        _kept(tl.load(layer + LAYER_IDS), tl.load(layer + LAYER_ID_STEP), slot, is_there) == id
    )
    number = tl.load(layer + LAYER_FIRST_ROW) + slot
    deleted = tl.load(layer + LAYER_DELETED)
    if deleted != 0:
        number = tl.where(_bit(deleted, slot, is_there), _NO_ROW, number)
    return is_there, number


@triton.jit
def _override(row_map, id, row, is_id):
    """Returns each id's row from the newest layer that has it; otherwise `row`."""
    count = tl.load(row_map + MAP_LAYER_COUNT)
    if count > 0:
        hashed = mix(id)
        newest = tl.load(row_map + MAP_LAYERS).to(tl.pointer_type(tl.int64))
        has, number = _find_in_layer(newest, id, hashed, is_id)
        row = tl.where(has, number, row)
        if count > 1:
            has, number = _find_in_layer(newest + LAYER_SIZE, id, hashed, is_id & (has == 0))
            row = tl.where(has, number, row)
    return row


@triton.jit
def _is_backfilled(row_map, row, is_found):
    """Mask of rows, all the table's own, that came from an older version."""
    bits = tl.load(row_map + MAP_BACKFILLED)
    result = is_found & (row >= tl.load(row_map + MAP_OWN))
    if bits != 0:
        result = _bit(bits, row, is_found)
    return result


@triton.jit
def _resolve(
    row_map, source, target, found, count, first, ids, has_found, OVERLAID: tl.constexpr, BLOCK: tl.constexpr
):
    """Resolves a program's ids of one lookup.
    row_map  pointer to the table's NativeRowMap, int64
    source   int64 [ids], the lookup's ids; target: int64 [ids], for row numbers, -1 for refused ids
    found    uint8 [ids]; this writes 1 if the table has the id, if `has_found`
    count    int64 [2] of the lookup; this adds its ids without a row, and with a row from an older version
    first    number of its first id
    """
    at = first + tl.arange(0, BLOCK)
    is_id = at < ids
    id = tl.load(source + at, is_id, 0)
    row = id - tl.load(row_map + MAP_FIRST)
    is_found = is_id & (
        row.to(tl.uint64) < tl.load(row_map + MAP_ID_COUNT).to(tl.uint64)
    )  # negative numbers are large ones
    if tl.load(row_map + MAP_ENTRIES) != 0:
        row, is_found = _find_indexed(row_map, id, is_id)
    is_own = is_found
    if OVERLAID:
        row = _override(row_map, id, tl.where(is_found, row, _NO_ROW), is_id)
        is_found = is_id & (row != _NO_ROW)
        is_own = is_found & (row >= 0)  # an overlay's rows have negative numbers
    tl.store(target + at, tl.where(is_found, row, tl.load(row_map + MAP_DEFAULT_ROW)), is_id)
    if has_found:
        tl.store(found + at, is_found.to(tl.uint8), is_id)
    # One sum of both, of 16 bits each, costs half.
    unfound = (is_id & (is_found == 0)).to(tl.int32) + (
        _is_backfilled(row_map, row, is_own).to(tl.int32) << 16
    )
    counted = tl.sum(unfound, 0)
    if counted > 0:
        tl.atomic_add(count, (counted & 0xFFFF).to(tl.int64), sem="relaxed")
        tl.atomic_add(count + 1, (counted >> 16).to(tl.int64), sem="relaxed")


@kernel
def resolve(
    jobs: tl.int64,
    job_of_program: tl.int64,
    source: tl.int64,
    inputs: tl.int64,
    outputs: tl.int64,
    counts: tl.int64,
    OVERLAID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Resolves every lookup of a batch with mapped ids, BLOCK ids a program. OVERLAID: a table may have an
    overlay.
    jobs            address of int64 [jobs, RESOLVE_SIZE], as `ResolveField`; written for
                    requests by `_native_batch_write.c`, for tensors by `quant.gpu.tensors.jobs`
    job_of_program  address of int32 [programs], written there too
    source          address of the batch's inputs as sent, bytes: int64 ids [ids] at IDS_AT
    inputs          address of the inputs for later kernels; row numbers go to TARGET_AT; may be `source`
    outputs         address of the batch's outputs, bytes: found masks go to FOUND_AT
    counts          address of int64 [jobs, 2], to which this kernel adds (see `_resolve`)
    """
    program = tl.program_id(0).to(tl.int64)
    number = tl.load(job_of_program.to(tl.pointer_type(tl.int32)) + program).to(tl.int64)
    job = jobs.to(tl.pointer_type(tl.int64)) + number * RESOLVE_SIZE
    ids_at, target_at = tl.load(job + RESOLVE_IDS_AT), tl.load(job + RESOLVE_TARGET_AT)
    found_at = tl.load(job + RESOLVE_FOUND_AT)
    _resolve(
        tl.load(job + RESOLVE_ROW_MAP).to(tl.pointer_type(tl.int64)),
        (source + ids_at).to(tl.pointer_type(tl.int64)),
        (inputs + target_at).to(tl.pointer_type(tl.int64)),
        (outputs + tl.maximum(found_at, 0)).to(tl.pointer_type(tl.uint8)),
        counts.to(tl.pointer_type(tl.int64)) + 2 * number,
        (program - tl.load(job + RESOLVE_FIRST_PROGRAM)) * BLOCK,
        tl.load(job + RESOLVE_IDS),
        found_at >= 0,
        OVERLAID,
        BLOCK,
    )
