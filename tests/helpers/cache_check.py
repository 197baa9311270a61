"""Walks all that a cache holds, and says where it is not what it should be.

Every key lies in one slot, every node with a key is reached from the bucket of its key once, counts agree, no
map names a miss of a batch that is over, and, where the caller knows the rows, each slot holds its row.
"""

from collections.abc import Callable

import numpy as np
from cache_contents import Bytes, bucket_of

from tableside.quant.cache.cache import Cache
from tableside.quant.cache.kernels.state import ID_BITS, NODE_BYTES, NODE_NEXT, occupied_at
from tableside.quant.cache.pages import Pages

RowOf = Callable[[int, int], bytes]  # a table's number and an id -> the row


def check(cache: Cache, row_of: RowOf | None = None) -> None:
    """AssertionError, with numbers: the cache is not what it should be. Waits for the device.

    row_of: (table's number, id) -> its bytes, to compare with what its slot holds.
    """
    with cache._working():
        memory, pages = cache._memory, cache._pages
        arena, heads = memory.arena.cpu().numpy(), memory.heads.cpu().numpy()
        keys = _keys_of_nodes(arena, pages)
        _check_counts(keys, pages, memory.state.cpu().numpy())
        _check_chains(keys, arena, heads, pages)
        for table in cache._tables._tables.values():
            is_over = not table.misses[:, 0].any() and not table.dirty.any()
            _require(is_over, "a map still names misses of a batch that is over")
        if row_of is not None:
            _check_rows(keys, arena, pages, row_of)


def _require(is_so: bool, message: str) -> None:
    if not is_so:
        raise AssertionError(message)


def _keys_of_nodes(arena: Bytes, pages: Pages) -> dict[int, int]:
    """Number of each node that holds a key -> the key."""
    keys = {}
    for c in pages.classes:
        for page in c.pages:
            of_page = arena[page * pages.page_bytes :][: NODE_BYTES * c.slots].view(np.int64)[::2]
            for place in np.flatnonzero(of_page >= 0):
                keys[page << pages.node_bits | int(place)] = int(of_page[place])
    return keys


def _check_counts(keys: dict[int, int], pages: Pages, state: np.ndarray) -> None:
    for n, c in enumerate(pages.classes):
        own = set(c.pages)
        counted, found = int(state[occupied_at(n)]), sum(node >> pages.node_bits in own for node in keys)
        _require(counted == found, f"class {n}: {found} keys in its slots, {counted} counted")
    twice = len(keys) - len(set(keys.values()))
    _require(twice == 0, f"{twice} keys lie in two slots")


def _check_chains(keys: dict[int, int], arena: Bytes, heads: np.ndarray, pages: Pages) -> None:
    in_page = (1 << pages.node_bits) - 1
    reached = set()
    for bucket in np.flatnonzero(heads != -1):
        node = int(heads[bucket])
        while node != -1:
            _require(node in keys, f"bucket {bucket} leads to node {node}, which has no key (or is busy)")
            _require(node not in reached, f"node {node} is reached twice, again from bucket {bucket}")
            reached.add(node)
            _require(bucket_of(keys[node], heads.size) == bucket, f"key {keys[node]} lies in bucket {bucket}")
            at = (node >> pages.node_bits) * pages.page_bytes + (node & in_page) * NODE_BYTES + NODE_NEXT
            node = int(arena[at : at + 4].view(np.int32)[0])
    _require(
        len(reached) == len(keys), f"{len(keys)} keys in slots, {len(reached)} in chains: a conflict miss"
    )


def _check_rows(keys: dict[int, int], arena: Bytes, pages: Pages, row_of: RowOf) -> None:
    for node, key in keys.items():
        row_class, first_row = pages.of_page[node >> pages.node_bits]
        size = pages.classes[row_class].row_bytes
        slot = int(first_row + (node & ((1 << pages.node_bits) - 1)))
        number, id = key >> ID_BITS, key & ((1 << ID_BITS) - 1)
        held = arena[slot * size :][:size].tobytes()
        _require(held == row_of(number, id), f"the slot of row {id} of table {number} holds other bytes")
