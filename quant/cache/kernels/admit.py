"""Kernels that choose admitted misses and give them slots. `root`: address of the cache's record, int64
[ROOT_SIZE + ARRAY_SIZE], written by the host."""

import triton
import triton.language as tl

from tableside.quant.cache.kernels.nodes import (
    ID_BITS,
    NODE_USE,
    class_at,
    class_state_at,
    hash_of,
    i32,
    i64,
    link,
    miss_count,
    node_at,
    slot_of,
    table_at,
)
from tableside.quant.cache.kernels.scores import (
    FREE_PRIORITY,
    USED_MASK,
    eviction_priority,
    marked,
    tick_of,
    within_limits,
)
from tableside.quant.cache.kernels.state import (
    ARRAY_LOCATIONS,
    ARRAY_MISSES,
    ARRAY_NODES,
    ARRAY_RANKS,
    ARRAY_SCORES,
    ARRAY_VICTIMS,
    CLASS_PAGE_LIST,
    CLASS_PAGES,
    CLASS_SLOTS,
    CLASS_STATE_ADMITTED,
    CLASS_STATE_FIRST_VICTIM,
    CLASS_STATE_MISSES,
    CLASS_STATE_THRESHOLD,
    CLASS_STATE_VICTIM_PRIORITY,
    CLASS_STATE_VICTIMS,
    ROOT_NODE_BITS,
    ROOT_STATE,
    STATE_DONE,
    STATE_INSERTED,
    STATE_LOCKED_OUT,
    STATE_NOW,
    STATE_STAGED,
    STATE_UNREAD,
    TABLE_CLASS,
)
from tableside.quant.device.launch import kernel

LEAST, MOST = (
    tl.constexpr(-(2**31) + 1),
    tl.constexpr(2**31 - 1),
)  # between these priorities a threshold is looked for
WINDOW = tl.constexpr(
    1 << 20
)  # slots that `evict` looks through, or SLOTS_PER_VICTIM a victim, whichever are more
SLOTS_PER_VICTIM = tl.constexpr(8)
MARGIN, MARGIN_OF = (
    tl.constexpr(5),
    tl.constexpr(4),
)  # a quarter more victims than needed, against the samples' error
FEW_FREE = tl.constexpr(16)  # free slots in a sample that say little
NO_CLASS = tl.constexpr(2**30)


@triton.jit
def sampled(n, total, spread, SAMPLE: tl.constexpr):
    """Sample n of `total` elements: one of each SAMPLEth part, or all. spread: random, int64 [SAMPLE]."""
    return tl.where(total > SAMPLE, (n * total) // SAMPLE + spread % tl.maximum(total // SAMPLE, 1), n)


@triton.jit
def how_many(mask):
    """Number of set elements, int64."""
    return tl.sum(mask.to(tl.int64), 0)


@triton.jit
def admission_threshold(miss_priority, is_miss, slot_priority, misses_each, slots_each):
    """Returns the largest t such that at most as many misses have a priority below t as slots have one of t
    or above. Both are samples: each sampled miss stands for `misses_each`, each slot for `slots_each`."""
    low = tl.full((), LEAST, tl.int64)
    high = tl.full((), MOST, tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        admitted = how_many(is_miss & (miss_priority < middle))
        evicted = how_many(slot_priority.to(tl.int64) >= middle)
        if admitted * misses_each <= evicted * slots_each:
            low = middle
        else:
            high = middle - 1
    return high


@triton.jit
def priority_of_victims(slot_priority, wanted):
    """The largest p such that `wanted` of the slots have an eviction priority of p or above."""
    low = tl.full((), LEAST, tl.int64)
    high = tl.full((), MOST, tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        if how_many(slot_priority.to(tl.int64) >= middle) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def wanted_victims(slot_priority, need, slots_sampled, total, SAMPLE: tl.constexpr):
    """Number of sampled slots to become victims if `need` of all `total` slots must."""
    # `evict` looks through all slots of a small cache, and through SLOTS_PER_VICTIM slots a victim of a large
    # one.
    window = tl.minimum(tl.maximum(need * SLOTS_PER_VICTIM, WINDOW), total)
    wanted = tl.where(total > SAMPLE, (need * slots_sampled * MARGIN) // (window * MARGIN_OF) + 1, need)
    wanted = tl.minimum(wanted, slots_sampled)
    free = how_many(slot_priority == FREE_PRIORITY)
    # If there are enough free slots, only those are victims. Fewer than FEW_FREE in the sample are no
    # reliable estimate.
    return tl.where(
        (free >= FEW_FREE) & (free * total * MARGIN_OF > need * slots_sampled * MARGIN), 1, wanted
    )


@kernel
def choose_threshold(
    root: tl.int64, admit_all: tl.int64, LFU: tl.constexpr, SAMPLE: tl.constexpr, CLASS_LANES: tl.constexpr
):
    """Finds the admission threshold and victim priority of a class from SAMPLE slots and SAMPLE misses.
    THRESHOLD t: as many misses have a priority below t as slots have one of t or above, or are free.
    VICTIM_PRIORITY: enough slots for the admitted have this or more. admit_all 1 (always with LRU): admit
    every miss. One program a class. Reads MISSES and SCORES, nodes and scores of slots, MISSES of the
    classes. Writes THRESHOLD, VICTIM_PRIORITY and FIRST_VICTIM of its class. CLASS_LANES: classes, a power of
    2."""
    root = i64(root)
    number = tl.program_id(0).to(tl.int64)
    of_class = class_state_at(root, number)
    lanes = tl.arange(0, CLASS_LANES)
    before = tl.load(class_state_at(root, lanes) + CLASS_STATE_MISSES, lanes < number, 0)
    tl.store(of_class + CLASS_STATE_FIRST_VICTIM, tl.sum(before, 0))
    misses = tl.load(of_class + CLASS_STATE_MISSES)
    if misses > 0:
        the_class = class_at(root, number)
        state = i64(tl.load(root + ROOT_STATE))
        now = tl.load(state + STATE_NOW)
        slots = tl.load(the_class + CLASS_SLOTS)
        total = slots * tl.load(the_class + CLASS_PAGES)
        n = tl.arange(0, SAMPLE).to(tl.int64)
        spread = hash_of(n + now * SAMPLE)
        at = sampled(n, total, spread, SAMPLE)
        is_in = n < total
        page = tl.load(i32(tl.load(the_class + CLASS_PAGE_LIST)) + at // slots, is_in, 0)
        node = (page << tl.load(root + ROOT_NODE_BITS).to(tl.int32)) + (at % slots).to(tl.int32)
        priority, _ = eviction_priority(root, node, is_in, now, tl.load(state + STATE_DONE), LFU)
        slots_sampled = tl.minimum(total, SAMPLE)
        need = misses
        threshold = tl.full((), MOST, tl.int64)
        if LFU:
            of_all = miss_count(state)
            which = sampled(n, of_all, spread, SAMPLE)
            is_miss = n < of_all
            key = tl.load(i64(tl.load(root + ARRAY_MISSES)) + which, is_miss, 0)
            is_miss = is_miss & (tl.load(table_at(root, key >> ID_BITS) + TABLE_CLASS, is_miss, -1) == number)
            score = tl.load(i32(tl.load(root + ARRAY_SCORES)) + which, is_miss, 0)
            miss_priority = within_limits(tick_of(root, now) - score)
            misses_sampled = tl.maximum(how_many(is_miss), 1)
            if admit_all == 0:
                parts = misses * slots_sampled
                threshold = admission_threshold(
                    miss_priority, is_miss, priority, parts, total * misses_sampled
                )
                admitted = how_many(is_miss & (miss_priority < threshold))
                need = (admitted * misses + misses_sampled - 1) // misses_sampled
        wanted = wanted_victims(priority, need, slots_sampled, total, SAMPLE)
        tl.store(of_class + CLASS_STATE_THRESHOLD, threshold)
        tl.store(of_class + CLASS_STATE_VICTIM_PRIORITY, priority_of_victims(priority, wanted))


@kernel
def rank_admitted(root: tl.int64, LFU: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers the admitted misses, those below their class's threshold (all with LRU), class by class. A
    program takes BLOCK misses a turn. Rows at UNREAD are not admitted. Reads MISSES, LOCATIONS, SCORES and
    THRESHOLD; writes RANKS, and ADMITTED of the classes."""
    root = i64(root)
    state = i64(tl.load(root + ROOT_STATE))
    count = miss_count(state)
    tick = tick_of(root, tl.load(state + STATE_NOW))
    unread = tl.load(state + STATE_UNREAD)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        is_key = at < count
        key = tl.load(i64(tl.load(root + ARRAY_MISSES)) + at, is_key, 0)
        row_class = tl.load(table_at(root, key >> ID_BITS) + TABLE_CLASS, is_key, -1).to(tl.int32)
        is_admitted = is_key & (tl.load(i32(tl.load(root + ARRAY_LOCATIONS)) + at, is_key, 0) != unread)
        if LFU:
            priority = tick - tl.load(i32(tl.load(root + ARRAY_SCORES)) + at, is_key, 0)
            threshold = tl.load(
                class_state_at(root, row_class.to(tl.int64)) + CLASS_STATE_THRESHOLD, is_key, 0
            )
            is_admitted = is_admitted & (within_limits(priority) < threshold)
        rank = tl.full((BLOCK,), -1, tl.int32)
        for number in range(tl.min(tl.where(is_key, row_class, NO_CLASS), 0), tl.max(row_class, 0) + 1):
            mine = is_admitted & (row_class == number)
            ones = mine.to(tl.int32)
            of_class = class_state_at(root, tl.zeros((), tl.int64) + number)
            first = tl.atomic_add(
                of_class + CLASS_STATE_ADMITTED, tl.sum(ones, 0).to(tl.int64), sem="relaxed"
            )
            rank = tl.where(mine, first.to(tl.int32) + tl.cumsum(ones, 0) - ones, rank)
        tl.store(i32(tl.load(root + ARRAY_RANKS)) + at, rank, is_key)


@kernel
def insert(root: tl.int64, LFU: tl.constexpr, BLOCK: tl.constexpr):
    """Gives each admitted row a victim's node, while there are victims, and links it into its key's chain.
    A program takes BLOCK misses a turn. Reads MISSES, RANKS, VICTIMS and SCORES. Writes keys, scores (LFU)
    and chains of nodes; INSERTED, STAGED and LOCKED_OUT of the state. A staged row keeps its location and
    gets its node in NODES, for `fetch.fill_slots`; otherwise LOCATIONS becomes the slot."""
    root = i64(root)
    state = i64(tl.load(root + ROOT_STATE))
    count = miss_count(state)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        is_row = at < count
        key = tl.load(i64(tl.load(root + ARRAY_MISSES)) + at, is_row, 0)
        of_class = class_state_at(root, tl.load(table_at(root, key >> ID_BITS) + TABLE_CLASS, is_row, 0))
        rank = tl.load(i32(tl.load(root + ARRAY_RANKS)) + at, is_row, -1)
        found = tl.minimum(
            tl.load(of_class + CLASS_STATE_VICTIMS, is_row, 0),
            tl.load(of_class + CLASS_STATE_ADMITTED, is_row, 0),
        )
        is_inserted = (rank >= 0) & (rank < found)
        victim = (
            i32(tl.load(root + ARRAY_VICTIMS))
            + tl.load(of_class + CLASS_STATE_FIRST_VICTIM, is_row, 0)
            + rank
        )
        node = tl.load(victim, is_inserted, 0)
        tl.store(i64(node_at(root, node)), key, is_inserted)
        link(root, node, key, is_inserted)
        if LFU:
            score = tl.load(i32(tl.load(root + ARRAY_SCORES)) + at, is_inserted, 0)
            used = marked(score, tl.load(state + STATE_NOW).to(tl.int32), USED_MASK)
            tl.store(i32(node_at(root, node) + NODE_USE), used, is_inserted)
        locations = i32(tl.load(root + ARRAY_LOCATIONS)) + at
        is_staged = tl.load(locations, is_row, -1) < -1
        tl.store(locations, slot_of(root, node, is_inserted), is_inserted & (is_staged == 0))
        tl.store(i32(tl.load(root + ARRAY_NODES)) + at, tl.where(is_inserted & is_staged, node, -1), is_row)
        staged_alone = is_row & is_staged & (is_inserted == 0)
        locked_out = (rank >= 0) & (is_inserted == 0)
        tl.atomic_add(state + STATE_INSERTED, tl.sum(is_inserted.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(state + STATE_STAGED, tl.sum(staged_alone.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(state + STATE_LOCKED_OUT, tl.sum(locked_out.to(tl.int64), 0), sem="relaxed")
