"""The cache's index: pages, tables and chains together, and the records that kernels read."""

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.kernels import evict
from tableside.quant.cache.kernels.state import (
    CLASSES,
    ID_BITS,
    UNIT_BYTES,
    BatchState,
    ClassField,
    ClassState,
    Root,
    occupied_at,
)
from tableside.quant.cache.memory import CacheMemory
from tableside.quant.cache.pages import Pages
from tableside.quant.cache.pipeline import Pipeline
from tableside.quant.cache.tables import Tables
from tableside.quant.cache.tickets import BatchesInFlight
from tableside.quant.row_format import device_row_bytes

_SLOTS = 1024  # that a program of `link_all` and `forget` takes at once
_HANDED_OVER = 1 << 22  # rows at once; each takes some 40 bytes of the device for that moment
_REBALANCE_FROM = 1.25  # eviction priority of victims, one class's to another's
_REBALANCED = 100  # one of so many pages moves at a time


class Index:
    """Registers tables, gives classes pages and keeps the chains. The caller holds the cache's lock on the
    main stream."""

    def __init__(
        self, memory: CacheMemory, pages: Pages, tables: Tables, batches: BatchesInFlight, pipeline: Pipeline
    ) -> None:
        self._memory, self._pages, self._tables = memory, pages, tables
        self._batches, self._pipeline = batches, pipeline

    def register(self, address: int, rows: int, row_bytes: int, name: str) -> int:
        """Adds a table and returns its number. QuantError: its rows fit no page, or are of too many sizes."""
        row_class = self._pages.class_of(device_row_bytes(row_bytes))
        number = self._tables.add(name, address, rows, row_bytes, row_class)
        self._pipeline.fit_rows(self._pages.widest, self._tables.are_tight)
        try:
            if self._pages.assign(self._tables.rows_of_classes(len(self._pages.classes))):
                self.relink()
                self.settle()
        except BaseException:
            self._tables.remove(number)
            self.relink()
            raise
        self.describe()
        return number

    def forget(self, number: int) -> None:
        """Lets go of a table and of its rows."""
        evict.forget[(self._pages.count,)](self._memory.root, number, BLOCK=_SLOTS)
        self.relink()
        self._tables.remove(number)
        self.describe()

    def hand_over(self, number: int, successor: int, rows: NDArray[np.int64]) -> None:
        """Moves cached rows of a table to another of the same class; slots and uses stay. rows: int64 [n, 2],
        (from, to), the first column ascending. Skips rows that the successor has cached. Waits for the
        device."""
        row_class = self._tables[number].row_class
        parts = self._pages.parts(row_class)
        held = [
            keys[keys >> ID_BITS == successor]
            for keys in (self._pages.nodes(row_class, p).keys for p in parts)
        ]
        first = torch.tensor([number << ID_BITS, successor << ID_BITS], device=self._memory.arena.device)
        for block in torch.split(torch.from_numpy(rows), _HANDED_OVER) if parts else ():
            before, after = (block.to(first.device) + first).T.contiguous()
            after = torch.where(torch.isin(after, torch.cat(held)), before, after)
            for part in parts:
                keys = self._pages.nodes(row_class, part).keys.contiguous()
                at = torch.searchsorted(before, keys).clamp_(max=before.numel() - 1)
                self._pages.set_keys(row_class, part, torch.where(before[at] == keys, after[at], keys))
        self.relink()

    def settle(self) -> None:
        """Gives pages that were taken to their new class, where no batch is in flight that may read them."""
        if self._pages.moving and self._batches.count == 0:
            self._batches.wait_for_released()
            self._pages.settle()
            self.describe()

    def relink(self) -> None:
        """Builds all chains anew, for as many buckets as there are slots."""
        self.describe()
        if self._memory.fit_index(self._pages.slots):
            self.describe()
        self._memory.heads.fill_(-1)
        evict.link_all[(self._pages.count,)](self._memory.root, BLOCK=_SLOTS)

    def empty(self) -> None:
        """Drops every row, and what a batch left behind that was launched in part."""
        self._tables.clear_maps()
        self._memory.clear_arrays()
        self._pages.empty()
        for n in range(len(self._pages.classes)):  # what was counted, and broken off before it had its key
            self._memory.count_dropped(n, self._memory.state[occupied_at(n)].clone())
        self.relink()

    def rebalance(self, states: list[list[int]] | None) -> None:
        """Moves a hundredth of the pages from the class whose victims have the highest eviction priority to
        that with the lowest. So all classes evict as one cache would. states: `ClassState` of each class,
        some tickets old; None: unknown."""
        if states is None:
            return
        classes = self._pages.classes
        busy = [n for n, c in enumerate(classes) if states[n][ClassState.ADMITTED] and len(c.pages) > 1]
        if len(busy) < 2:
            return
        by_priority = sorted(busy, key=lambda n: states[n][ClassState.VICTIM_PRIORITY])
        taker, donor = by_priority[0], by_priority[-1]
        least, most = (states[n][ClassState.VICTIM_PRIORITY] for n in (taker, donor))
        if most > _REBALANCE_FROM * max(1, least):
            spare = len(classes[donor].pages) - 1
            self._pages.take(donor, min(spare, max(1, self._pages.count // _REBALANCED)), taker)
            self.relink()

    def describe(self) -> None:
        """Writes what the kernels read of tables and classes."""
        self._pipeline.forget_graphs()
        tables, groups = self._tables.records()
        page_table, lists = self._pages.device_arrays()
        classes = np.zeros((CLASSES, len(ClassField)), np.int64)
        for record, c, pages_at in zip(
            classes, self._pages.classes, self._memory.send_page_lists(lists), strict=False
        ):
            record[ClassField.ROW_BYTES], record[ClassField.SLOTS] = c.row_bytes, c.slots
            record[ClassField.PAGE_LIST], record[ClassField.PAGES] = pages_at, len(c.pages)
        self._memory.send(tables, groups, classes.reshape(-1), page_table)
        self.write_root()

    def write_root(self) -> None:
        """Writes the record by which kernels find everything."""
        pages = {
            Root.PAGE_BYTES: self._pages.page_bytes,
            Root.PAGE_COUNT: self._pages.count,
            Root.NODE_BITS: self._pages.node_bits,
            Root.MOST_SLOTS: self._pages.most_slots,
            Root.WIDEST_UNITS: self._pages.widest // UNIT_BYTES,
        }
        self._memory.write_root(self._tables.counters, pages | self._pipeline.root_fields())

    def parts(self, number: int) -> list[list[int]]:
        """The pages of a table's class, as many at once as `hot_part` should read."""
        return self._pages.parts(self._tables[number].row_class)

    def latest_use(self, rate: int) -> int:
        """Returns a node's use word for the last ticket. rate: its growth a ticket. Waits for the device."""
        return int(
            np.int64(int(self._memory.state[BatchState.NOW]) * rate).astype(np.int32)
        )  # it wraps, as uses do

    def hot_part(self, number: int, part: list[int], latest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the keys of a table in some pages, and by how much the use of each is above `latest`."""
        row_class = self._tables[number].row_class
        nodes = self._pages.nodes(row_class, [p for p in part if self._pages.of_page[p, 0] == row_class])
        mine = (nodes.keys >> ID_BITS) == number
        return nodes.keys[mine].cpu(), nodes.uses[mine].cpu() - latest


def hottest(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> NDArray[np.int64]:
    """Ids of keys, the hottest first."""
    if not parts:
        return np.zeros(0, np.int64)
    keys, heat = (torch.cat(column) for column in zip(*parts, strict=True))
    order = heat.argsort(descending=True, stable=True)
    ids: NDArray[np.int64] = (keys[order] & ((1 << ID_BITS) - 1)).numpy()
    return ids
