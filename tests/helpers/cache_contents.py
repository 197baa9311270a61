"""All that a cache holds, as plain lists: what tests compare, and what `cache_reference` changes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import (
    ID_BITS,
    NODE_BYTES,
    NODE_NEXT,
    NODE_USE,
    UNIT_BYTES,
    BatchArray,
    BatchState,
    ClassState,
    TableCounter,
)
from tableside.quant.cache.memory import CacheMemory
from tableside.quant.cache.pages import Pages
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.cache.tables import Tables
from tableside.quant.row_format import device_row_bytes

Bytes = NDArray[np.uint8]


@dataclass
class Node:
    """A slot: its key (FREE: none), its use, and its row."""

    key: int
    use: int
    row: bytes


@dataclass
class Table:
    """A table, the ids that the batch misses, its dirty flags, and its counters as `TableCounter` says."""

    rows: int
    row_class: int
    row_bytes: int  # of a slot
    missed: set[int]
    dirty: set[int]
    counters: list[int]


@dataclass
class Contents:
    """All that a cache holds. Two of them are equal where every kernel would find the same.

    pages: class and first row of each. chains: the nodes of each bucket, in their order. ghosts: their
    words.
    """

    is_lfu: bool
    rate: int
    node_bits: int
    pages: list[tuple[int, int]]
    widest_units: int
    state: list[int]
    classes: list[list[int]]
    in_flight: list[int]
    tables: dict[int, Table]
    nodes: dict[int, Node]
    chains: list[list[int]]
    ghosts: list[int]
    arrays: dict[BatchArray, list[int]]

    @property
    def now(self) -> int:
        return self.state[BatchState.NOW]

    @property
    def misses(self) -> int:
        """How many rows the batch misses."""
        return self.state[BatchState.MISSES] & 0xFFFFFFFF

    def table_of(self, key: int) -> Table:
        return self.tables[key >> ID_BITS]

    def slot(self, node: int) -> int:
        """A node's slot, in rows of its class from the arena's start."""
        return self.pages[node >> self.node_bits][1] + (node & ((1 << self.node_bits) - 1))

    def chain_of(self, key: int) -> list[int]:
        return self.chains[bucket_of(key, len(self.chains))]

    def nodes_of(self, row_class: int) -> list[int]:
        return [number for number in self.nodes if self.pages[number >> self.node_bits][0] == row_class]


def read(memory: CacheMemory, pages: Pages, tables: Tables, settings: CacheSettings) -> Contents:
    """What a cache holds now. Waits for the device; the caller holds the cache's lock."""
    state, counters = memory.state.tolist(), tables.counters.view(-1, len(TableCounter)).tolist()
    of_classes = np.array(state[len(BatchState) :]).reshape(-1, len(ClassState)).tolist()
    arena, heads = memory.arena.cpu().numpy(), memory.heads.tolist()
    arrays = {which: memory.array(which).tolist() for which in BatchArray}
    return Contents(
        is_lfu=settings.policy.is_lfu,
        rate=settings.score_rate,
        node_bits=pages.node_bits,
        pages=[(int(row_class), int(first)) for row_class, first in pages.of_page],
        widest_units=pages.widest // UNIT_BYTES,
        state=state[: len(BatchState)],
        classes=of_classes[: len(pages.classes)],
        in_flight=memory.in_flight.tolist(),
        tables={n: _table(tables, n, counters[n]) for n in tables.names()},
        nodes=_nodes(arena, pages),
        chains=[_chain(arena, pages, head) for head in heads],
        ghosts=memory.ghosts.tolist(),
        arrays=arrays,
    )


def _table(tables: Tables, number: int, counters: list[int]) -> Table:
    table = tables[number]
    words = table.misses[:, 0].cpu().contiguous().numpy().view(np.uint8)
    missed = np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist()
    dirty = np.flatnonzero(table.dirty.cpu().numpy()).tolist()
    slot_bytes = device_row_bytes(table.row_bytes)
    return Table(table.rows, table.row_class, slot_bytes, set(missed), set(dirty), counters)


def _nodes(arena: Bytes, pages: Pages) -> dict[int, Node]:
    nodes = {}
    for c in pages.classes:
        for page in sorted(c.pages):
            of_page = arena[page * pages.page_bytes :][: pages.page_bytes]
            keys = of_page[: NODE_BYTES * c.slots].view(np.int64)[::2].tolist()
            uses = of_page[: NODE_BYTES * c.slots].view(np.int32)[NODE_USE // 4 :: NODE_BYTES // 4].tolist()
            rows = arena[int(pages.of_page[page, 1]) * c.row_bytes :][: c.slots * c.row_bytes].reshape(
                -1, c.row_bytes
            )
            for place in range(c.slots):
                nodes[page << pages.node_bits | place] = Node(keys[place], uses[place], rows[place].tobytes())
    return nodes


def _chain(arena: Bytes, pages: Pages, head: int) -> list[int]:
    chain: list[int] = []
    while head >= 0:
        chain.append(head)
        at = (
            (head >> pages.node_bits) * pages.page_bytes
            + (head & ((1 << pages.node_bits) - 1)) * NODE_BYTES
            + NODE_NEXT
        )
        head = int(arena[at : at + 4].view(np.int32)[0])
    return chain


def bucket_of(key: int, buckets: int) -> int:
    """The kernels' place of a key among so many."""
    return hash_of(key) * buckets >> 31


def hash_of(key: int) -> int:
    """The kernels' hash of a key, 31 bits."""
    mask = 2**64 - 1
    x = key ^ (key >> 29)
    x = x * 0x2545F4914F6CDD1D & mask
    x ^= x >> 32
    x = x * 0x1B03738712FAD5C9 & mask
    return x >> 33
