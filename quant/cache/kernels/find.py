"""Kernels that find the rows of a batch: those in slots, the misses, and where each of these goes.

root          address of the cache's record, int64 [ROOT_SIZE + ARRAY_SIZE], written by the host
jobs          address of int64 [jobs, PROBE_SIZE], written by `quant.cache.jobs`
job_of_block  address of int32 [blocks], written there too
blocks        how many blocks: a number, not an address
inputs        address of the batch's inputs; int64 ids lie at byte IDS_AT, written before the batch begins
locations     address of a ticket's locations; int32 [ids] at byte LOCATIONS_AT, written here
ticket        address of a batch's record, int64 [TICKET_SIZE]
"""

import triton
import triton.language as tl

from tableside.quant.cache.kernels import state as s
from tableside.quant.cache.kernels.nodes import (
    ID_BITS,
    bit_count,
    class_state_at,
    find,
    i32,
    i64,
    miss_count,
    slot_of,
    table_at,
)
from tableside.quant.cache.kernels.scores import ghost_score, tick_of, touch
from tableside.quant.cache.kernels.state import (
    ARRAY_LOCATIONS,
    ARRAY_MISSES,
    ARRAY_SCORES,
    CLASS_STATE_MISSES,
    COUNTER_FETCHED,
    COUNTER_HITS,
    COUNTER_IDS,
    COUNTER_IN_PLACE,
    COUNTER_SIZE,
    PROBE_FIRST_BLOCK,
    PROBE_IDS,
    PROBE_IDS_AT,
    PROBE_LOCATIONS_AT,
    PROBE_SIZE,
    PROBE_TABLE,
    ROOT_COUNTERS,
    ROOT_GROUPS,
    ROOT_STATE,
    ROOT_WIDEST_UNITS,
    STATE_MISSES,
    STATE_NOW,
    TABLE_CLASS,
    TABLE_DIRTY,
    TABLE_FIRST_RANKS,
    TABLE_MISS_BITS,
    TABLE_ROW_BYTES,
    TABLE_ROWS,
    TICKET_STAGING_UNITS,
)

WORD_BITS, GROUP_WORDS, ROWS_PER_FLAG = tl.constexpr(s.WORD_BITS), tl.constexpr(s.GROUP_WORDS), tl.constexpr(s.ROWS_PER_FLAG)
UNRESOLVED, IN_TABLE = tl.constexpr(s.UNRESOLVED), tl.constexpr(s.IN_TABLE)
UNIT_BYTES = tl.constexpr(s.UNIT_BYTES)


@triton.jit(do_not_specialize=["root", "jobs", "job_of_block", "blocks", "inputs", "locations"])
def probe(
    root: tl.int64,
    jobs: tl.int64,
    job_of_block: tl.int64,
    blocks: tl.int64,
    inputs: tl.int64,
    locations: tl.int64,
    LFU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds each id's slot: that is its location. A miss gets UNRESOLVED and a bit in its table's map.

    A program takes BLOCK ids of one job a turn. Writes the locations, MISS_BITS and DIRTY of the tables, the
    counters IDS and HITS, and that the nodes of hits were used: USED, and with LFU their scores. An id out of
    range gets IN_TABLE; the lookup refuses it.
    """
    root = i64(root)
    now = tl.load(i64(tl.load(root + ROOT_STATE)) + STATE_NOW)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        job = i64(jobs) + tl.load(i32(job_of_block) + block).to(tl.int64) * PROBE_SIZE
        number = tl.load(job + PROBE_TABLE)
        table = table_at(root, number)
        first = (block - tl.load(job + PROBE_FIRST_BLOCK)) * BLOCK
        at = first + tl.arange(0, BLOCK)
        is_id = at < tl.load(job + PROBE_IDS)
        id = tl.load(i64(inputs + tl.load(job + PROBE_IDS_AT)) + at, is_id, -1)
        is_known = (id >= 0) & (id < tl.load(table + TABLE_ROWS))

        found, used = find(root, (number << ID_BITS) | id, is_known)
        is_hit = is_known & (found >= 0)
        touch(root, found, used, is_hit, now, LFU)
        is_missed = is_known & (found < 0)
        word = i32(tl.load(table + TABLE_MISS_BITS)) + (id >> 5)
        bit = tl.full((BLOCK,), 1, tl.int32) << (id & 31).to(tl.int32)
        is_new = is_missed & ((tl.load(word, is_missed, 0) & bit) == 0)
        tl.atomic_or(word, bit, is_new, sem="relaxed")
        tl.store(i32(tl.load(table + TABLE_DIRTY)) + (id >> 5) // GROUP_WORDS, 1, is_new)

        location = tl.where(is_hit, slot_of(root, found, is_hit), tl.where(is_missed, UNRESOLVED, IN_TABLE))
        tl.store(i32(locations + tl.load(job + PROBE_LOCATIONS_AT)) + at, location, is_id)
        counters = i64(tl.load(root + ROOT_COUNTERS)) + number * COUNTER_SIZE
        tl.atomic_add(counters + COUNTER_IDS, tl.sum(is_id.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(counters + COUNTER_HITS, tl.sum(is_hit.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["root", "ticket"])
def enumerate_misses(root: tl.int64, ticket: tl.int64, LFU: tl.constexpr, FLAGS: tl.constexpr):
    """Lists the misses that the maps name: their keys in the order of their rows, their scores, and room for
    each in the ticket's staging buffer, as far as there is any.

    A program takes FLAGS dirty flags of one table, from those that ROOT_GROUPS names: int32 [programs, 2],
    written by the host. Reads MISS_BITS. Writes MISSES, SCORES (LFU, and the ghosts with them) and LOCATIONS
    (-2 - unit of the staging buffer, or IN_TABLE) at each miss's rank, FIRST_RANKS of the words that have
    bits, zeros to DIRTY, the MISSES of state and classes, and the counter FETCHED.
    """
    root = i64(root)
    last_unit = tl.load(i64(ticket) + TICKET_STAGING_UNITS) - tl.load(root + ROOT_WIDEST_UNITS)  # behind it none has room
    mine = i32(tl.load(root + ROOT_GROUPS)) + tl.program_id(0) * 2
    number = tl.load(mine).to(tl.int64)
    first_flag = tl.load(mine + 1).to(tl.int64)
    table = table_at(root, number)
    state = i64(tl.load(root + ROOT_STATE))
    tick = tick_of(root, tl.load(state + STATE_NOW))
    misses = i64(tl.load(root + ARRAY_MISSES))
    scores = i32(tl.load(root + ARRAY_SCORES))
    locations = i32(tl.load(root + ARRAY_LOCATIONS))
    units = tl.load(table + TABLE_ROW_BYTES) // UNIT_BYTES
    flags = i32(tl.load(table + TABLE_DIRTY))
    flag_count = (tl.load(table + TABLE_ROWS) + ROWS_PER_FLAG - 1) // ROWS_PER_FLAG
    for n in range(first_flag, tl.minimum(first_flag + FLAGS, flag_count)):
        if tl.load(flags + n) != 0:
            word_at = tl.arange(0, GROUP_WORDS).to(tl.int64) + n * GROUP_WORDS
            word = tl.load(i32(tl.load(table + TABLE_MISS_BITS)) + word_at)
            count = bit_count(word)
            total = tl.sum(count, 0)
            # Ranks and units of the staging buffer are taken with one addition.
            before = tl.atomic_add(state + STATE_MISSES, total.to(tl.int64) * ((units << 32) + 1), sem="relaxed")
            base = before.to(tl.int32)
            start = before >> 32
            rank = base + tl.cumsum(count, 0) - count
            tl.store(i32(tl.load(table + TABLE_FIRST_RANKS)) + word_at, rank, word != 0)
            for _ in range(tl.max(count, 0)):
                is_one = word != 0
                bit = word & -word
                key = (number << ID_BITS) | (word_at * WORD_BITS + bit_count(bit - 1))
                tl.store(misses + rank, key, is_one)
                unit = start + (rank - base) * units
                tl.store(locations + rank, tl.where(unit <= last_unit, -2 - unit, -1).to(tl.int32), is_one)
                if LFU:
                    tl.store(scores + rank, ghost_score(root, key, is_one, tick), is_one)
                word = word ^ bit
                rank += is_one.to(tl.int32)
            tl.atomic_add(
                class_state_at(root, tl.load(table + TABLE_CLASS)) + CLASS_STATE_MISSES, total.to(tl.int64), sem="relaxed"
            )
            counters = i64(tl.load(root + ROOT_COUNTERS)) + number * COUNTER_SIZE
            tl.atomic_add(counters + COUNTER_FETCHED, total.to(tl.int64), sem="relaxed")
            tl.store(flags + n, 0)  # last: by now every warp has read it


@triton.jit(do_not_specialize=["root", "jobs", "job_of_block", "blocks", "inputs", "locations"])
def resolve(
    root: tl.int64,
    jobs: tl.int64,
    job_of_block: tl.int64,
    blocks: tl.int64,
    inputs: tl.int64,
    locations: tl.int64,
    BLOCK: tl.constexpr,
):
    """Gives each id that is UNRESOLVED its row's location, after `admit.insert`.

    A program takes BLOCK ids of one job a turn, as `probe`. Reads MISS_BITS and FIRST_RANKS, which give the
    id's rank, and LOCATIONS. Writes the locations and the counter IN_PLACE.
    """
    root = i64(root)
    blocks = tl.where(miss_count(i64(tl.load(root + ROOT_STATE))) > 0, blocks, 0)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        job = i64(jobs) + tl.load(i32(job_of_block) + block).to(tl.int64) * PROBE_SIZE
        number = tl.load(job + PROBE_TABLE)
        table = table_at(root, number)
        at = (block - tl.load(job + PROBE_FIRST_BLOCK)) * BLOCK + tl.arange(0, BLOCK)
        location_at = i32(locations + tl.load(job + PROBE_LOCATIONS_AT)) + at
        is_missed = (at < tl.load(job + PROBE_IDS)) & (tl.load(location_at, at < tl.load(job + PROBE_IDS), 0) == UNRESOLVED)
        id = tl.load(i64(inputs + tl.load(job + PROBE_IDS_AT)) + at, is_missed, 0)
        word = tl.load(i32(tl.load(table + TABLE_MISS_BITS)) + (id >> 5), is_missed, 0)
        first = tl.load(i32(tl.load(table + TABLE_FIRST_RANKS)) + (id >> 5), is_missed, 0)
        below = (tl.full((BLOCK,), 1, tl.int32) << (id & 31).to(tl.int32)) - 1
        rank = first + bit_count(word & below)
        location = tl.load(i32(tl.load(root + ARRAY_LOCATIONS)) + rank, is_missed, 0)
        tl.store(location_at, location, is_missed)
        in_place = (is_missed & (location == IN_TABLE)).to(tl.int64)
        tl.atomic_add(
            i64(tl.load(root + ROOT_COUNTERS)) + number * COUNTER_SIZE + COUNTER_IN_PLACE, tl.sum(in_place, 0), sem="relaxed"
        )
