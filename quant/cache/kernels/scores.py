"""LFU's scores and ghosts, and the eviction priority of slots.
A row's score is log2 of the sum of 2 ** (t / half life) over the tickets t that used it, in SCORE_UNITs
(LRFU). The *tick* is the score of one use now; scores are compared by how far they are *ahead* of it, so both
may wrap. The low bits of a node's score are USED_BITS of its last ticket, those of a ghost TAG_BITS of its
key. So one word holds a node's whole use."""

import triton
import triton.language as tl

from tableside.quant.cache.kernels import state as s
from tableside.quant.cache.kernels.nodes import NODE_USE, hash_of, i32, i64, node_at, place_of
from tableside.quant.cache.kernels.state import ROOT_GHOST_PAIRS, ROOT_GHOSTS, ROOT_RATE

SCORE_UNIT, MOST_AHEAD = tl.constexpr(s.SCORE_UNIT), tl.constexpr(s.MOST_AHEAD * s.SCORE_UNIT)
PRIORITY_LIMIT, LEAST_PRIORITY = tl.constexpr(s.PRIORITY_LIMIT), tl.constexpr(-s.PRIORITY_LIMIT)
USED_MASK, USED_TICKETS = tl.constexpr((1 << s.USED_BITS) - 1), tl.constexpr(1 << s.USED_BITS)
TAG_MASK = tl.constexpr((1 << s.TAG_BITS) - 1)
FREE_PRIORITY, LOCKED_PRIORITY = tl.constexpr(s.FREE_PRIORITY), tl.constexpr(s.LOCKED_PRIORITY)


@triton.jit
def tick_of(root, now):
    """The score of one use by ticket `now`, int32; it wraps."""
    return (now * tl.load(root + ROOT_RATE)).to(tl.int32)


@triton.jit
def marked(score, mark, MASK: tl.constexpr):
    """Scores with what their lowest bits hold, int32."""
    return (score & ~MASK) | (mark & MASK)


@triton.jit
def ahead_of(score, tick):
    """Distance of scores ahead of the tick; MOST_AHEAD or more has wrapped: far behind."""
    ahead = score - tick
    return tl.where(ahead > MOST_AHEAD, LEAST_PRIORITY, ahead)


@triton.jit
def used_once_more(ahead):
    """Returns `ahead` after a use now: log2(2 ** ahead + 1), in SCORE_UNITs."""
    apart = tl.abs(ahead).to(tl.float32) / SCORE_UNIT
    return tl.maximum(ahead, 0) + (tl.log2(1.0 + tl.exp2(-apart)) * SCORE_UNIT).to(tl.int32)


@triton.jit
def touch(root, number, use, hit, now, LFU: tl.constexpr):
    """Marks nodes as used by ticket `now`, once a ticket. The word follows from the old use and the ticket
    alone, so concurrent hits write the same word."""
    now32 = tl.zeros_like(number) + now.to(tl.int32)
    if LFU:
        tick = tick_of(root, now)
        is_first = hit & ((use ^ now32) & USED_MASK != 0)
        used = marked(tick + used_once_more(ahead_of(use & ~USED_MASK, tick)), now32, USED_MASK)
    else:
        is_first = hit & (use != now32)
        used = now32
    tl.store(i32(node_at(root, number) + NODE_USE), used, is_first)


@triton.jit
def ghost_score(root, key, mask, tick):
    """Returns the scores of missed keys, int32: of all remembered misses, this one included. Two ghosts
    remember the two keys with the highest scores among those that share them. The lower score falls when
    another key is missed."""
    ghost = i32(tl.load(root + ROOT_GHOSTS)) + 2 * place_of(key, tl.load(root + ROOT_GHOST_PAIRS))
    tag = (key ^ (hash_of(key) >> 7)).to(tl.int32)
    one, other = tl.load(ghost, mask, 0), tl.load(ghost + 1, mask, 0)
    is_lower = ahead_of(other & ~TAG_MASK, tick) < ahead_of(one & ~TAG_MASK, tick)
    takes_other = ((one ^ tag) & TAG_MASK != 0) & (is_lower | ((other ^ tag) & TAG_MASK == 0))
    ghost += takes_other.to(tl.int32)
    known = tl.where(takes_other, other, one)
    ahead = ahead_of(known & ~TAG_MASK, tick)
    is_it = (known ^ tag) & TAG_MASK == 0
    more = tl.where(is_it, used_once_more(ahead), 0)
    is_kept = (is_it == 0) & (ahead > 0)
    kept = marked(tick + ahead - SCORE_UNIT, known, TAG_MASK)
    tl.store(ghost, tl.where(is_kept, kept, marked(tick + more, tag, TAG_MASK)), mask)
    return tick + more


@triton.jit
def within_limits(priority):
    """Eviction priorities of rows, between those of locked and of free slots."""
    return tl.minimum(tl.maximum(priority, LEAST_PRIORITY), PRIORITY_LIMIT)


@triton.jit
def eviction_priority(root, number, mask, now, done, LFU: tl.constexpr):
    """Returns eviction priorities of nodes, int32 (highest first), and their keys. LRU: tickets since the
    last use; LFU: the score's distance behind the tick. Free slots have the highest; slots used after ticket
    `done` the lowest, since a batch in flight may read them."""
    at = node_at(root, number)
    key = tl.load(i64(at), mask, 0)
    use = tl.load(i32(at + NODE_USE), mask, 0)
    # Ticket numbers wrap: what counts is how long ago each was.
    ago = now.to(tl.int32) - use
    in_flight = (now - done).to(tl.int32)
    if LFU:
        priority = -ahead_of(use & ~USED_MASK, tick_of(root, now))
        is_locked = (ago & USED_MASK) < tl.minimum(in_flight, USED_TICKETS)
    else:
        priority = ago
        is_locked = ago.to(tl.uint32) < in_flight.to(tl.uint32)
    priority = tl.where(key < 0, FREE_PRIORITY, within_limits(priority))
    return tl.where(is_locked | (mask == 0), LOCKED_PRIORITY, priority), key
