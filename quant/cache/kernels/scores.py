"""How soon a row goes: LFU's scores and ghosts, and the eviction priority of slots.

A row's score is log2 of the sum of 2 ** (t / half life) over the tickets t that used it, in SCORE_UNITs
(LRFU). The *tick* is the score of one use now; a score is told apart from it by how far it is *ahead*, so
that both may wrap.
"""

import triton
import triton.language as tl

from tableside.quant.cache.kernels import state as s
from tableside.quant.cache.kernels.nodes import NODE_USED, hash_of, i32, i64, node_at, score_at
from tableside.quant.cache.kernels.state import ROOT_GHOST_MASK, ROOT_GHOSTS, ROOT_RATE

SCORE_UNIT, MOST_AHEAD = tl.constexpr(s.SCORE_UNIT), tl.constexpr(s.MOST_AHEAD * s.SCORE_UNIT)
PRIORITY_LIMIT, LEAST_PRIORITY = tl.constexpr(s.PRIORITY_LIMIT), tl.constexpr(-s.PRIORITY_LIMIT)
FREE_PRIORITY, LOCKED_PRIORITY = tl.constexpr(s.FREE_PRIORITY), tl.constexpr(s.LOCKED_PRIORITY)


@triton.jit
def tick_of(root, now):
    """The score of one use by ticket `now`, int32; it wraps."""
    return (now * tl.load(root + ROOT_RATE)).to(tl.int32)


@triton.jit
def ahead_of(score, tick):
    """By how much scores are ahead of the tick. One that seems ahead by MOST_AHEAD is so old that it wrapped:
    far behind.
    """
    ahead = score - tick
    return tl.where(ahead > MOST_AHEAD, LEAST_PRIORITY, ahead)


@triton.jit
def used_once_more(ahead):
    """How far ahead of the tick scores are that were `ahead` of it, after a use now: log2(2 ** ahead + 1), in
    SCORE_UNITs.
    """
    apart = tl.abs(ahead).to(tl.float32) / SCORE_UNIT
    return tl.maximum(ahead, 0) + (tl.log2(1.0 + tl.exp2(-apart)) * SCORE_UNIT).to(tl.int32)


@triton.jit
def touch(root, number, used, hit, now, LFU: tl.constexpr):
    """Notes that nodes were used by ticket `now`; once a ticket, however often they are hit."""
    address = i32(node_at(root, number) + NODE_USED)
    now32 = now.to(tl.int32)
    is_first = hit & (used != now32)
    if LFU:
        was = tl.atomic_xchg(address, tl.zeros_like(number) + now32, is_first, sem="relaxed")
        is_first = is_first & (was != now32)
        at = i32(score_at(root, number))
        tick = tick_of(root, now)
        ahead = ahead_of(tl.load(at, is_first, 0), tick)
        tl.store(at, tick + used_once_more(ahead), is_first)
    else:
        tl.store(address, tl.zeros_like(number) + now32, is_first)


@triton.jit
def ghost_score(root, key, mask, tick):
    """The scores of missed keys, int32: of all their misses that are remembered, this one included.

    A ghost remembers one of the keys that share it: the one whose score is the highest, which falls when
    another is missed.
    """
    mixed = hash_of(key)
    ghost = i32(tl.load(root + ROOT_GHOSTS)) + (mixed & tl.load(root + ROOT_GHOST_MASK)) * 2
    tag = (key ^ (mixed >> 7)).to(tl.int32)
    ahead = ahead_of(tl.load(ghost + 1, mask, 0), tick)
    is_it = tl.load(ghost, mask, 0) == tag
    more = tl.where(is_it, used_once_more(ahead), 0)
    is_kept = (is_it == 0) & (ahead > 0)
    tl.store(ghost, tag, mask & (is_kept == 0))
    tl.store(ghost + 1, tick + tl.where(is_kept, ahead - SCORE_UNIT, more), mask)
    return tick + more


@triton.jit
def within_limits(priority):
    """Eviction priorities of rows, between those of locked and of free slots."""
    return tl.minimum(tl.maximum(priority, LEAST_PRIORITY), PRIORITY_LIMIT)


@triton.jit
def eviction_priority(root, number, mask, now, done, LFU: tl.constexpr):
    """Eviction priorities of nodes, int32, those with the highest go first; and their keys.

    With LRU the tickets since the last use, with LFU how far the score is behind the tick. A free slot has
    the highest one, a slot that was used by a ticket after `done` the lowest one, since a batch in flight may
    read it.
    """
    at = node_at(root, number)
    key = tl.load(i64(at), mask, 0)
    used = tl.load(i32(at + NODE_USED), mask, 0)
    if LFU:
        priority = -ahead_of(tl.load(i32(score_at(root, number)), mask, 0), tick_of(root, now))
    else:
        priority = now.to(tl.int32) - used
    priority = within_limits(priority)
    priority = tl.where(key < 0, FREE_PRIORITY, priority)
    # Ticket numbers wrap: what counts is how long ago each was.
    is_locked = (now.to(tl.int32) - used).to(tl.uint32) < (now - done).to(tl.int32).to(tl.uint32)
    return tl.where(is_locked | (mask == 0), LOCKED_PRIORITY, priority), key
