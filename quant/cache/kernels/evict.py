"""Kernels that free slots: victims of a batch, their chain links, and all rows of a table. `root`: address of
the cache's record, int64 [ROOT_SIZE + ARRAY_SIZE], written by the host."""

import triton.language as tl

from tableside.quant.cache.kernels import state as s
from tableside.quant.cache.kernels.nodes import (
    ID_BITS,
    NODE_NEXT,
    NODE_USE,
    bucket_of,
    class_at,
    class_state_at,
    i32,
    i64,
    link,
    miss_count,
    node_at,
)
from tableside.quant.cache.kernels.scores import LOCKED_PRIORITY, eviction_priority
from tableside.quant.cache.kernels.state import (
    ARRAY_VICTIM_BUCKETS,
    ARRAY_VICTIMS,
    CLASS_SLOTS,
    CLASS_STATE_ADMITTED,
    CLASS_STATE_FIRST_VICTIM,
    CLASS_STATE_OCCUPIED,
    CLASS_STATE_VICTIM_PRIORITY,
    CLASS_STATE_VICTIMS,
    ROOT_HEADS,
    ROOT_MOST_SLOTS,
    ROOT_NODE_BITS,
    ROOT_PAGE_COUNT,
    ROOT_PAGES,
    ROOT_STATE,
    STATE_DONE,
    STATE_FREED,
    STATE_NOW,
)
from tableside.quant.device.launch import kernel

BUSY = tl.constexpr(s.BUSY)
PAGE_STRIDE = tl.constexpr(s.PAGE_STRIDE)


@kernel
def evict(
    root: tl.int64, ANY: tl.constexpr, LFU: tl.constexpr, BLOCK: tl.constexpr, CLASS_LANES: tl.constexpr
):
    """Takes slots at VICTIM_PRIORITY or above from their rows while the class has more admitted rows than
    victims. A program takes BLOCK slots of a page a turn, beginning at another page each ticket. Reads nodes
    and scores; ADMITTED, VICTIM_PRIORITY and FIRST_VICTIM of the classes. Writes VICTIMS and VICTIM_BUCKETS;
    FREE and this ticket to nodes; VICTIMS and OCCUPIED of the classes. ANY: takes every unlocked slot, if too
    few were found. CLASS_LANES: classes, a power of 2. A program is one warp, so all its threads see the same
    concurrent writes."""
    root = i64(root)
    state = i64(tl.load(root + ROOT_STATE))
    now = tl.load(state + STATE_NOW)
    done = tl.load(state + STATE_DONE)
    pages = tl.load(root + ROOT_PAGE_COUNT)
    bits = tl.load(root + ROOT_NODE_BITS).to(tl.int32)
    parts = tl.cdiv(tl.load(root + ROOT_MOST_SLOTS), BLOCK)
    victims = i32(tl.load(root + ARRAY_VICTIMS))
    buckets = i32(tl.load(root + ARRAY_VICTIM_BUCKETS))
    classes = class_state_at(root, tl.arange(0, CLASS_LANES))
    needs_more = tl.load(classes + CLASS_STATE_VICTIMS, cache_modifier=".cg") < tl.load(
        classes + CLASS_STATE_ADMITTED
    )
    turns = tl.where(tl.max(needs_more.to(tl.int32), 0) > 0, pages * parts, 0)
    # As many turns as there are parts of pages, from another page on each time.
    for turn in range(tl.program_id(0), turns, tl.num_programs(0)):
        page = (turn // parts + now * PAGE_STRIDE) % pages
        row_class = tl.load(i32(tl.load(root + ROOT_PAGES)) + page * 2).to(tl.int64)
        of_class = class_state_at(root, tl.maximum(row_class, 0))
        need = tl.load(of_class + CLASS_STATE_ADMITTED)
        the_class = class_at(root, tl.maximum(row_class, 0))
        slots = tl.load(the_class + CLASS_SLOTS).to(tl.int32)
        first = (turn % parts).to(tl.int32) * BLOCK
        found = tl.load(of_class + CLASS_STATE_VICTIMS, cache_modifier=".cg")
        if (row_class >= 0) & (first < slots) & (found < need):
            least = tl.load(of_class + CLASS_STATE_VICTIM_PRIORITY).to(tl.int32)
            place = first + tl.arange(0, BLOCK)
            is_slot = place < slots
            node = (page.to(tl.int32) << bits) + place
            priority, key = eviction_priority(root, node, is_slot, now, done, LFU)
            is_evicted = priority > LOCKED_PRIORITY
            if not ANY:
                is_evicted = is_evicted & (priority >= least)
            ones = is_evicted.to(tl.int32)
            total = tl.sum(ones, 0)
            if total > 0:
                base = tl.atomic_add(of_class + CLASS_STATE_VICTIMS, total.to(tl.int64), sem="relaxed")
                rank = base + tl.cumsum(ones, 0) - ones
                is_victim = is_evicted & (rank < need)
                had_key = is_victim & (key >= 0)
                first_victim = tl.load(of_class + CLASS_STATE_FIRST_VICTIM)
                at = node_at(root, node)
                tl.store(victims + first_victim + rank, node, is_victim)
                bucket = bucket_of(root, tl.maximum(key, 0)).to(tl.int32)
                tl.store(buckets + first_victim + rank, tl.where(had_key, bucket, -1), is_victim)
                tl.store(i64(at), tl.full((BLOCK,), -1, tl.int64), is_victim)
                tl.store(i32(at + NODE_USE), tl.zeros_like(node) + now.to(tl.int32), is_victim)
                were_free = tl.sum((is_victim & (key < 0)).to(tl.int64), 0)
                if were_free > 0:
                    tl.atomic_add(of_class + CLASS_STATE_OCCUPIED, were_free, sem="relaxed")


@kernel
def unlink(root: tl.int64, BLOCK: tl.constexpr):
    """Removes nodes without a key from the chains that victims were in.
    A program takes BLOCK victims a turn and walks their buckets' chains. Reads VICTIM_BUCKETS and keys;
    writes HEADS and NEXT. Several victims may name a bucket: the lane that finds it not BUSY owns it, the
    others skip it."""
    root = i64(root)
    count = miss_count(i64(tl.load(root + ROOT_STATE)))
    heads = i32(tl.load(root + ROOT_HEADS))
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        bucket = tl.load(i32(tl.load(root + ARRAY_VICTIM_BUCKETS)) + at, at < count, -1)
        node = tl.atomic_xchg(heads + bucket, tl.full((BLOCK,), BUSY, tl.int32), bucket >= 0, sem="acquire")
        is_mine = (bucket >= 0) & (node != BUSY)
        walks = is_mine & (node >= 0)
        head = tl.full((BLOCK,), -1, tl.int32)
        last = tl.full((BLOCK,), -1, tl.int32)
        while tl.max(walks.to(tl.int32), 0) > 0:
            here = node_at(root, node)
            stays = walks & (tl.load(i64(here), walks, -1, cache_modifier=".cg") >= 0)
            after = tl.load(i32(here + NODE_NEXT), walks, -1, cache_modifier=".cg")
            tl.store(i32(node_at(root, last) + NODE_NEXT), node, stays & (last >= 0))
            head = tl.where(stays & (head < 0), node, head)
            last = tl.where(stays, node, last)
            walks = walks & (after >= 0)
            node = tl.where(walks, after, node)
        tl.store(i32(node_at(root, last) + NODE_NEXT), tl.full((BLOCK,), -1, tl.int32), is_mine & (last >= 0))
        tl.atomic_xchg(heads + bucket, head, is_mine, sem="release")


@kernel
def link_all(root: tl.int64, BLOCK: tl.constexpr):
    """Links every node with a key into its bucket's chain, after all chains were emptied. One program a page,
    BLOCK slots a turn. Reads keys; writes HEADS and NEXT."""
    root = i64(root)
    page = tl.program_id(0)
    row_class = tl.load(i32(tl.load(root + ROOT_PAGES)) + page * 2).to(tl.int64)
    if row_class >= 0:
        slots = tl.load(class_at(root, row_class) + CLASS_SLOTS).to(tl.int32)
        for first in range(0, slots, BLOCK):
            place = first + tl.arange(0, BLOCK)
            node = (page << tl.load(root + ROOT_NODE_BITS).to(tl.int32)) + place
            key = tl.load(i64(node_at(root, node)), place < slots, -1)
            link(root, node, key, key >= 0)


@kernel
def forget(root: tl.int64, number: tl.int64, BLOCK: tl.constexpr):
    """Frees the nodes of table `number`; they stay in their chains until `link_all`. One program a page,
    BLOCK slots a turn. Reads and writes keys; writes OCCUPIED of the classes and FREED of the state."""
    root = i64(root)
    page = tl.program_id(0)
    row_class = tl.load(i32(tl.load(root + ROOT_PAGES)) + page * 2).to(tl.int64)
    if row_class >= 0:
        slots = tl.load(class_at(root, row_class) + CLASS_SLOTS).to(tl.int32)
        freed = tl.zeros((), tl.int64)
        for first in range(0, slots, BLOCK):
            place = first + tl.arange(0, BLOCK)
            at = i64(node_at(root, (page << tl.load(root + ROOT_NODE_BITS).to(tl.int32)) + place))
            goes = (tl.load(at, place < slots, -1) >> ID_BITS) == number
            tl.store(at, tl.full((BLOCK,), -1, tl.int64), goes)
            freed += tl.sum(goes.to(tl.int64), 0)
        tl.atomic_add(class_state_at(root, row_class) + CLASS_STATE_OCCUPIED, -freed, sem="relaxed")
        tl.atomic_add(i64(tl.load(root + ROOT_STATE)) + STATE_FREED, freed, sem="relaxed")
