"""Kernels that find a batch's rows: hits, misses, and each miss's destination. `root`: address of the cache's
record, int64 [ROOT_SIZE + ARRAY_SIZE]; `ticket`: of a batch's, int64 [TICKET_SIZE], with its jobs, ids and
locations."""

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
    padded,
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
    TABLE_ADDRESS,
    TABLE_CLASS,
    TABLE_DIRTY,
    TABLE_MISSES,
    TABLE_ROW_BYTES,
    TABLE_ROWS,
    TICKET_BLOCKS,
    TICKET_INPUTS,
    TICKET_JOB_OF_BLOCK,
    TICKET_JOBS,
    TICKET_LOCATIONS,
    TICKET_STAGING_UNITS,
)
from tableside.quant.device.launch import kernel

WORD_BITS, GROUP_WORDS, ROWS_PER_FLAG = (
    tl.constexpr(s.WORD_BITS),
    tl.constexpr(s.GROUP_WORDS),
    tl.constexpr(s.ROWS_PER_FLAG),
)
UNRESOLVED, IN_TABLE = tl.constexpr(s.UNRESOLVED), tl.constexpr(s.IN_TABLE)
UNIT_BYTES = tl.constexpr(s.UNIT_BYTES)


@triton.jit
def miss_word(table, id):
    """Pointers (int32) to the miss bits of the ids' rows in the table's map; the rank of the first bit
    follows."""
    return i32(tl.load(table + TABLE_MISSES)) + 2 * (id >> 5)


@kernel
def probe(root: tl.int64, ticket: tl.int64, LFU: tl.constexpr, BLOCK: tl.constexpr):
    """Writes each id's slot as its location. A miss gets UNRESOLVED and a bit in its table's map.
    A program takes BLOCK ids of one job a turn. Writes locations, MISSES and DIRTY bits of tables, the
    counters IDS and HITS, and the use of hit nodes. An id out of range gets IN_TABLE and is not counted; the
    lookup refuses it, or it is an overlay's."""
    root = i64(root)
    ticket = i64(ticket)
    jobs, inputs = tl.load(ticket + TICKET_JOBS), tl.load(ticket + TICKET_INPUTS)
    job_of_block, locations = tl.load(ticket + TICKET_JOB_OF_BLOCK), tl.load(ticket + TICKET_LOCATIONS)
    now = tl.load(i64(tl.load(root + ROOT_STATE)) + STATE_NOW)
    for block in range(tl.program_id(0), tl.load(ticket + TICKET_BLOCKS), tl.num_programs(0)):
        job = i64(jobs) + tl.load(i32(job_of_block) + block).to(tl.int64) * PROBE_SIZE
        number = tl.load(job + PROBE_TABLE)
        table = table_at(root, number)
        first = (block - tl.load(job + PROBE_FIRST_BLOCK)) * BLOCK
        at = first + tl.arange(0, BLOCK)
        is_id = at < tl.load(job + PROBE_IDS)
        id = tl.load(i64(inputs + tl.load(job + PROBE_IDS_AT)) + at, is_id, -1)
        is_known = (id >= 0) & (id < tl.load(table + TABLE_ROWS))

        found, use = find(root, (number << ID_BITS) | id, is_known)
        is_hit = is_known & (found >= 0)
        touch(root, found, use, is_hit, now, LFU)
        is_missed = is_known & (found < 0)
        word = miss_word(table, id)
        bit = tl.full((BLOCK,), 1, tl.int32) << (id & 31).to(tl.int32)
        is_new = is_missed & ((tl.load(word, is_missed, 0) & bit) == 0)
        tl.atomic_or(word, bit, is_new, sem="relaxed")
        tl.store(i32(tl.load(table + TABLE_DIRTY)) + (id >> 5) // GROUP_WORDS, 1, is_new)

        location = tl.where(is_hit, slot_of(root, found, is_hit), tl.where(is_missed, UNRESOLVED, IN_TABLE))
        tl.store(i32(locations + tl.load(job + PROBE_LOCATIONS_AT)) + at, location, is_id)
        counters = i64(tl.load(root + ROOT_COUNTERS)) + number * COUNTER_SIZE
        tl.atomic_add(counters + COUNTER_IDS, tl.sum(is_known.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(counters + COUNTER_HITS, tl.sum(is_hit.to(tl.int64), 0), sem="relaxed")


@kernel
def enumerate_misses(root: tl.int64, ticket: tl.int64, LFU: tl.constexpr, FLAGS: tl.constexpr):
    """Lists the misses in the maps: keys in row order, scores, and their units in the ticket's staging buffer
    while there is room. A program takes FLAGS dirty flags of one table, as ROOT_GROUPS says: int32 [programs,
    2], written by the host. Reads the tables' maps. Writes MISSES, SCORES (LFU, with the ghosts) and
    LOCATIONS (-2 - unit, or IN_TABLE) at each rank, the ranks of map words with bits, zeros to DIRTY, MISSES
    of state and classes, and the counter FETCHED. Rows that the host fetches take no units; it writes their
    locations."""
    root = i64(root)
    last_unit = tl.load(i64(ticket) + TICKET_STAGING_UNITS) - tl.load(
        root + ROOT_WIDEST_UNITS
    )  # behind it none has room
    mine = i32(tl.load(root + ROOT_GROUPS)) + tl.program_id(0) * 2
    number = tl.load(mine).to(tl.int64)
    first_flag = tl.load(mine + 1).to(tl.int64)
    table = table_at(root, number)
    state = i64(tl.load(root + ROOT_STATE))
    tick = tick_of(root, tl.load(state + STATE_NOW))
    misses = i64(tl.load(root + ARRAY_MISSES))
    scores = i32(tl.load(root + ARRAY_SCORES))
    locations = i32(tl.load(root + ARRAY_LOCATIONS))
    units = padded(tl.load(table + TABLE_ROW_BYTES)) // UNIT_BYTES
    units = units * (tl.load(table + TABLE_ADDRESS) != 0).to(tl.int64)
    flags = i32(tl.load(table + TABLE_DIRTY))
    flag_count = (tl.load(table + TABLE_ROWS) + ROWS_PER_FLAG - 1) // ROWS_PER_FLAG
    for n in range(first_flag, tl.minimum(first_flag + FLAGS, flag_count)):
        if tl.load(flags + n) != 0:
            word_at = tl.arange(0, GROUP_WORDS).to(tl.int64) + n * GROUP_WORDS
            in_map = i32(tl.load(table + TABLE_MISSES)) + 2 * word_at
            word = tl.load(in_map)
            count = bit_count(word)
            total = tl.sum(count, 0)
            # Ranks and units of the staging buffer are taken with one addition.
            before = tl.atomic_add(
                state + STATE_MISSES, total.to(tl.int64) * ((units << 32) + 1), sem="relaxed"
            )
            base = before.to(tl.int32)
            start = before >> 32
            rank = base + tl.cumsum(count, 0) - count
            tl.store(in_map + 1, rank, word != 0)
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
                class_state_at(root, tl.load(table + TABLE_CLASS)) + CLASS_STATE_MISSES,
                total.to(tl.int64),
                sem="relaxed",
            )
            counters = i64(tl.load(root + ROOT_COUNTERS)) + number * COUNTER_SIZE
            tl.atomic_add(counters + COUNTER_FETCHED, total.to(tl.int64), sem="relaxed")
            tl.store(flags + n, 0)  # last: by now every warp has read it


@kernel
def resolve(root: tl.int64, ticket: tl.int64, BLOCK: tl.constexpr):
    """Gives each UNRESOLVED id its row's location, after `admit.insert`. A program takes BLOCK ids of one job
    a turn. Reads the tables' maps, for ranks, and LOCATIONS. Writes locations and the counter IN_PLACE."""
    root = i64(root)
    ticket = i64(ticket)
    jobs, inputs = tl.load(ticket + TICKET_JOBS), tl.load(ticket + TICKET_INPUTS)
    job_of_block, locations = tl.load(ticket + TICKET_JOB_OF_BLOCK), tl.load(ticket + TICKET_LOCATIONS)
    blocks = tl.where(miss_count(i64(tl.load(root + ROOT_STATE))) > 0, tl.load(ticket + TICKET_BLOCKS), 0)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        job = i64(jobs) + tl.load(i32(job_of_block) + block).to(tl.int64) * PROBE_SIZE
        number = tl.load(job + PROBE_TABLE)
        table = table_at(root, number)
        at = (block - tl.load(job + PROBE_FIRST_BLOCK)) * BLOCK + tl.arange(0, BLOCK)
        location_at = i32(locations + tl.load(job + PROBE_LOCATIONS_AT)) + at
        is_missed = (at < tl.load(job + PROBE_IDS)) & (
            tl.load(location_at, at < tl.load(job + PROBE_IDS), 0) == UNRESOLVED
        )
        id = tl.load(i64(inputs + tl.load(job + PROBE_IDS_AT)) + at, is_missed, 0)
        word = tl.load(miss_word(table, id), is_missed, 0)
        first = tl.load(miss_word(table, id) + 1, is_missed, 0)
        below = (tl.full((BLOCK,), 1, tl.int32) << (id & 31).to(tl.int32)) - 1
        rank = first + bit_count(word & below)
        location = tl.load(i32(tl.load(root + ARRAY_LOCATIONS)) + rank, is_missed, 0)
        tl.store(location_at, location, is_missed)
        in_place = (is_missed & (location == IN_TABLE)).to(tl.int64)
        tl.atomic_add(
            i64(tl.load(root + ROOT_COUNTERS)) + number * COUNTER_SIZE + COUNTER_IN_PLACE,
            tl.sum(in_place, 0),
            sem="relaxed",
        )
