"""Walks all that a cache holds, and says where it is not what it should be."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tableside.quant.cache.kernels import ID_BITS, NODE_BYTES, occupied_at

if TYPE_CHECKING:
    from tableside.quant.cache.cache import Cache


def check(cache: "Cache", row_of: Any = None) -> None:
    """As `Cache.check_integrity`."""
    with cache._lock, cache._on_stream():
        arena, heads = cache._arena.cpu().numpy(), cache._heads.cpu().numpy()
        state = cache._state.cpu().numpy()
        pages = cache._pages
        page_bytes, in_page = pages.page_bytes, (1 << pages.node_bits) - 1
        alive: dict[int, int] = {}
        occupied = [0] * len(pages.classes)
        for n, c in enumerate(pages.classes):
            for page in c.pages:
                keys = arena[page * page_bytes :][: NODE_BYTES * c.slots].view(np.int64)[::2]
                for place in np.flatnonzero(keys >= 0):
                    alive[page << pages.node_bits | int(place)] = int(keys[place])
                    occupied[n] += 1
            told = int(state[occupied_at(n)])
            assert told == occupied[n], f"class {n}: {occupied[n]} keys in its slots, {told} counted"
        assert len(set(alive.values())) == len(alive), f"{len(alive) - len(set(alive.values()))} keys lie in two slots"
        reached = set()
        for bucket in np.flatnonzero(heads != -1):
            node = int(heads[bucket])
            while node != -1:
                assert node in alive, f"bucket {bucket} leads to node {node}, which has no key (or is busy)"
                assert node not in reached, f"node {node} is reached twice, again from bucket {bucket}"
                reached.add(node)
                assert _hash(alive[node]) % heads.size == bucket, f"key {alive[node]} lies in bucket {bucket}"
                at = (node >> pages.node_bits) * page_bytes + (node & in_page) * NODE_BYTES
                node = int(arena[at + 8 : at + 12].view(np.int32)[0])
        assert len(reached) == len(alive), f"{len(alive)} keys in slots, {len(reached)} in chains: a conflict miss"
        for t in cache._tables.values():
            assert not t.bits.any() and not t.marks.any(), "a map still names rows of a batch that is over"
        if row_of is not None:
            for node, key in alive.items():
                row_class, first_row = pages.of_page[node >> pages.node_bits]
                size = pages.classes[row_class].row_bytes
                held = arena[int(first_row + (node & in_page)) * size :][:size].tobytes()
                number, id = key >> ID_BITS, key & ((1 << ID_BITS) - 1)
                assert held == row_of(number, id), f"the slot of row {id} of table {number} holds other bytes"


def _hash(key: int) -> int:
    """The kernels' hash of a key."""
    mask = 2**64 - 1
    x = key ^ (key >> 29)
    x = x * 0x2545F4914F6CDD1D & mask
    x ^= x >> 32
    x = x * 0x1B03738712FAD5C9 & mask
    return x >> 33
