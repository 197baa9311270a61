"""Kernels that begin, end and release a batch. `root`: address of the cache's record, int64 [ROOT_SIZE +
ARRAY_SIZE]; `ticket`: of a batch's, int64 [TICKET_SIZE]. These hold all that changes between batches, so
every launch but `begin` is the same for batches of a size and can be replayed as a CUDA graph."""

import triton.language as tl

from tableside.quant.cache.kernels import state as s
from tableside.quant.cache.kernels.nodes import (
    ID_BITS,
    ID_MASK,
    class_state_at,
    i32,
    i64,
    miss_count,
    table_at,
)
from tableside.quant.cache.kernels.state import (
    ARRAY_MISSES,
    ARRAY_VICTIM_BUCKETS,
    CLASS_STATE_ADMITTED,
    CLASS_STATE_MISSES,
    CLASS_STATE_VICTIMS,
    ROOT_IN_FLIGHT,
    ROOT_STATE,
    STATE_DONE,
    STATE_MISSES,
    STATE_NOW,
    STATE_UNREAD,
    TABLE_MISSES,
    TICKET_BLOCKS,
    TICKET_INPUTS,
    TICKET_JOB_OF_BLOCK,
    TICKET_JOBS,
    TICKET_LOCATIONS,
    TICKET_NUMBER,
    TICKET_PLACE,
)
from tableside.quant.device.launch import kernel

MOST_IN_FLIGHT = tl.constexpr(s.MOST_IN_FLIGHT)


@kernel
def begin(
    root: tl.int64,
    ticket: tl.int64,
    jobs: tl.int64,
    job_of_block: tl.int64,
    blocks: tl.int64,
    inputs: tl.int64,
    locations: tl.int64,
    CLASS_LANES: tl.constexpr,
):
    """Gives the batch its ticket number, finds the last ticket up to which all are released, and zeroes the
    counts. One program. Writes NOW, DONE, MISSES and UNREAD of the state; MISSES, ADMITTED and VICTIMS of
    every class; the ticket's number, its JOBS to LOCATIONS, and the number at its place in IN_FLIGHT. Reads
    IN_FLIGHT, where `release` may concurrently write zeros. CLASS_LANES: classes, a power of 2."""
    root = i64(root)
    ticket = i64(ticket)
    state = i64(tl.load(root + ROOT_STATE))
    in_flight = i64(tl.load(root + ROOT_IN_FLIGHT))
    now = tl.load(state + STATE_NOW) + 1
    tl.store(state + STATE_NOW, now)
    tl.store(ticket + TICKET_NUMBER, now)
    tl.store(ticket + TICKET_JOBS, jobs)
    tl.store(ticket + TICKET_JOB_OF_BLOCK, job_of_block)
    tl.store(ticket + TICKET_BLOCKS, blocks)
    tl.store(ticket + TICKET_INPUTS, inputs)
    tl.store(ticket + TICKET_LOCATIONS, locations)
    others = tl.load(in_flight + tl.arange(0, MOST_IN_FLIGHT), cache_modifier=".cg")
    tl.store(state + STATE_DONE, tl.min(tl.where(others == 0, now, others), 0) - 1)
    tl.store(in_flight + tl.load(ticket + TICKET_PLACE), now)
    tl.store(state + STATE_MISSES, 0)
    tl.store(state + STATE_UNREAD, 0)
    of_class = class_state_at(root, tl.arange(0, CLASS_LANES))
    zeros = tl.zeros((CLASS_LANES,), tl.int64)
    tl.store(of_class + CLASS_STATE_MISSES, zeros)
    tl.store(of_class + CLASS_STATE_ADMITTED, zeros)
    tl.store(of_class + CLASS_STATE_VICTIMS, zeros)


@kernel
def release(root: tl.int64, ticket: tl.int64):
    """Lets the ticket's slots be evicted from the next `begin` on. One program, on the lookup's stream.
    Writes a zero at the ticket's place in IN_FLIGHT."""
    tl.store(i64(tl.load(i64(root) + ROOT_IN_FLIGHT)) + tl.load(i64(ticket) + TICKET_PLACE), 0)


@kernel
def end(root: tl.int64, BLOCK: tl.constexpr):
    """Empties the maps of misses and the buckets of victims. A program takes BLOCK misses a turn. Reads
    MISSES, zeroes their map words, and writes -1 to VICTIM_BUCKETS."""
    root = i64(root)
    count = miss_count(i64(tl.load(root + ROOT_STATE)))
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        is_miss = at < count
        key = tl.load(i64(tl.load(root + ARRAY_MISSES)) + at, is_miss, 0)
        words = tl.load(table_at(root, key >> ID_BITS) + TABLE_MISSES, is_miss, 0)
        tl.store(i32(words) + 2 * ((key & ID_MASK) >> 5), tl.zeros((BLOCK,), tl.int32), is_miss)
        nothing = tl.full((BLOCK,), -1, tl.int32)
        tl.store(i32(tl.load(root + ARRAY_VICTIM_BUCKETS)) + at, nothing, is_miss)
