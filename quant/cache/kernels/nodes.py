"""Addresses of records, nodes, scores and rows, and the search along a chain. `root` is a pointer to the
cache's record, int64 [ROOT_SIZE + ARRAY_SIZE], written by the host."""

import triton
import triton.language as tl

from tableside.quant.cache.kernels import state as s
from tableside.quant.cache.kernels.state import (
    CLASS_SIZE,
    CLASS_STATE_SIZE,
    ROOT_ARENA,
    ROOT_BUCKETS,
    ROOT_CLASSES,
    ROOT_HEADS,
    ROOT_NODE_BITS,
    ROOT_PAGE_BYTES,
    ROOT_PAGES,
    ROOT_STATE,
    ROOT_TABLES,
    STATE_MISSES,
    STATE_SIZE,
    TABLE_ADDRESS,
    TABLE_ROW_BYTES,
    TABLE_SIZE,
)

NODE_BYTES, NODE_NEXT, NODE_USE = (
    tl.constexpr(s.NODE_BYTES),
    tl.constexpr(s.NODE_NEXT),
    tl.constexpr(s.NODE_USE),
)
UNIT_BYTES = tl.constexpr(s.UNIT_BYTES)
ID_BITS, ID_MASK = tl.constexpr(s.ID_BITS), tl.constexpr((1 << s.ID_BITS) - 1)
HASH_BITS = tl.constexpr(31)
COUNT_MASK = tl.constexpr(0xFFFFFFFF)  # of BatchState.MISSES: how many there are


@triton.jit
def i64(address):
    """Addresses as pointers to int64."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def i32(address):
    """Addresses as pointers to int32."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def hash_of(key):
    """int64 keys [n], not negative -> int64 of HASH_BITS bits, well mixed."""
    x = key ^ (key >> 29)
    x = x * 0x2545F4914F6CDD1D
    x = x ^ ((x >> 32) & 0xFFFFFFFF)
    x = x * 0x1B03738712FAD5C9
    return (x >> 33) & 0x7FFFFFFF


@triton.jit
def place_of(key, places):
    """The place of each key among any number of places, int64: its hash as a share of them."""
    return (hash_of(key) * places) >> HASH_BITS


@triton.jit
def bucket_of(root, key):
    """Buckets of keys, int64."""
    return place_of(key, tl.load(root + ROOT_BUCKETS))


@triton.jit
def node_at(root, number):
    """Addresses of nodes, int64, from their int32 numbers."""
    bits = tl.load(root + ROOT_NODE_BITS).to(tl.int32)
    page = (number >> bits).to(tl.int64)
    place = (number & ((1 << bits) - 1)).to(tl.int64)
    return tl.load(root + ROOT_ARENA) + page * tl.load(root + ROOT_PAGE_BYTES) + place * NODE_BYTES


@triton.jit
def slot_of(root, number, mask):
    """The slots of nodes, int32, in rows of their class from the arena's start."""
    bits = tl.load(root + ROOT_NODE_BITS).to(tl.int32)
    first = tl.load(i32(tl.load(root + ROOT_PAGES)) + (number >> bits) * 2 + 1, mask, 0)
    return first + (number & ((1 << bits) - 1))


@triton.jit
def table_at(root, number):
    """The record of a table, a pointer to int64 [TABLE_SIZE]; the host writes it."""
    return i64(tl.load(root + ROOT_TABLES)) + number * TABLE_SIZE


@triton.jit
def class_at(root, number):
    """The record of a class, a pointer to int64 [CLASS_SIZE]; the host writes it."""
    return i64(tl.load(root + ROOT_CLASSES)) + number * CLASS_SIZE


@triton.jit
def class_state_at(root, number):
    """The state of a class in this batch, a pointer to int64 [CLASS_STATE_SIZE]; kernels write it."""
    return i64(tl.load(root + ROOT_STATE)) + STATE_SIZE + number * CLASS_STATE_SIZE


@triton.jit
def miss_count(state):
    """Rows that the batch misses, int64. state: a pointer to int64 [STATE_SIZE]."""
    return tl.load(state + STATE_MISSES) & COUNT_MASK


@triton.jit
def bit_count(word):
    """Number of set bits of each int32."""
    x = word - ((word >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit
def host_row(root, key, mask):
    """Host addresses of the keys' rows, their bytes there, and those of their slots; zeros for rows that the
    host fetches."""
    table = table_at(root, key >> ID_BITS)
    first = tl.load(table + TABLE_ADDRESS, mask, 0)
    row_bytes = tl.load(table + TABLE_ROW_BYTES, mask, 0) * (first != 0).to(tl.int64)
    return first + (key & ID_MASK) * row_bytes, row_bytes, padded(row_bytes)


@triton.jit
def padded(row_bytes):
    """Bytes of a row in a slot."""
    return (row_bytes + (UNIT_BYTES - 1)) // UNIT_BYTES * UNIT_BYTES


@triton.jit
def find(root, key, wanted):
    """Nodes of the keys, int32, -1 where there is none; and their use."""
    node = tl.load(i32(tl.load(root + ROOT_HEADS)) + bucket_of(root, key), wanted, -1)
    found = tl.full(key.shape, -1, tl.int32)
    use = tl.zeros_like(found)
    looks = wanted & (node >= 0)
    while tl.max(looks.to(tl.int32), 0) > 0:
        at = node_at(root, node)
        its_key = tl.load(i64(at), looks, -1)
        after = tl.load(i32(at + NODE_NEXT), looks, -1)
        its_use = tl.load(i32(at + NODE_USE), looks, 0)
        is_it = looks & (its_key == key)
        found = tl.where(is_it, node, found)
        use = tl.where(is_it, its_use, use)
        looks = looks & (its_key != key) & (after >= 0)
        node = tl.where(looks, after, node)
    return found, use


@triton.jit
def link(root, node, key, mask):
    """Puts nodes first into the chains of their keys' buckets; nobody walks a chain meanwhile."""
    head = i32(tl.load(root + ROOT_HEADS)) + bucket_of(root, key)
    after = tl.atomic_xchg(head, node, mask, sem="relaxed")
    tl.store(i32(node_at(root, node) + NODE_NEXT), after, mask)
