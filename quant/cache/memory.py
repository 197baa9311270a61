"""Device memory of a cache: how a budget is divided, and the record by which kernels find the parts.
    arena      pages | staging buffers           the budget, with heads and ghosts
    heads      int32 [buckets], one a slot       4 bytes a slot
    ghosts     int32 [pairs, 2] with LFU         4 bytes a slot
    arrays     one element an id of the largest batch; beside the budget, 32 bytes an id
`quant.cache.kernels.state` describes pages and arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import (
    CLASSES,
    MOST_IN_FLIGHT,
    PRIORITY_LIMIT,
    UNIT_BYTES,
    BatchArray,
    BatchState,
    ClassState,
    Root,
    occupied_at,
)
from tableside.quant.cache.pages import page_bytes_of, slots_of_page
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError

_INDEX_BYTES, _INDEX_BYTES_LFU = 4, 8  # a slot: a bucket, and with LFU a ghost
_ALIGNMENT = 16
_WORDS = {array: 2 if array is BatchArray.MISSES else 1 for array in BatchArray}  # int32s of one element


@dataclass(frozen=True)
class Division:
    """A budget, divided: so many pages of page_bytes each, and staging buffers of staging_bytes each."""

    pages: int
    page_bytes: int
    staging_buffers: int
    staging_bytes: int

    @property
    def arena_bytes(self) -> int:
        return self.pages * self.page_bytes + self.staging_buffers * self.staging_bytes


def divide(budget_bytes: int, settings: CacheSettings, smallest_row_bytes: int) -> Division:
    """Divides a budget. QuantError: it holds no page."""
    page_bytes = settings.page_bytes or page_bytes_of(budget_bytes)
    buffers = settings.staging_buffers
    staging_bytes = (
        min(settings.staging_bytes, int(budget_bytes * settings.staging_fraction / buffers))
        // UNIT_BYTES
        * UNIT_BYTES
    )
    slots = slots_of_page(page_bytes, smallest_row_bytes)
    index_bytes = slots * (_INDEX_BYTES_LFU if settings.policy.is_lfu else _INDEX_BYTES)
    pages = (budget_bytes - staging_bytes * buffers) // (page_bytes + index_bytes)
    if pages < 1 or slots < 1:
        raise QuantError(
            f"a cache of {budget_bytes:,} bytes holds no page of {page_bytes:,} bytes beside {buffers} "
            "staging buffers of "
            f"{staging_bytes:,}; raise budget_bytes"
        )
    return Division(pages, page_bytes, buffers, staging_bytes)


class CacheMemory:
    """All tensors of a cache except its tables'. root: the record for kernels; pages: uint8 [pages,
    page_bytes]; staging: uint8 [buffers, bytes]; page_table: int32 [2 * pages]; state: int64, as
    `BatchState`; heads: int32 [buckets]."""

    def __init__(self, device: Device, division: Division, settings: CacheSettings) -> None:
        self._device, self._settings = device.torch_device, settings
        size, paged = division.arena_bytes, division.pages * division.page_bytes
        arena = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=device.torch_device)
        skipped = -arena.data_ptr() % _ALIGNMENT
        self.arena = arena[skipped : skipped + size]
        self.pages = self.arena[:paged].view(division.pages, division.page_bytes)
        self.staging = self.arena[paged:].view(division.staging_buffers, division.staging_bytes)
        self.page_table = self._filled(-1, 2 * division.pages)
        self.state = self._zeros(len(BatchState) + CLASSES * len(ClassState))
        self.in_flight = self._zeros(MOST_IN_FLIGHT)
        self._root = self._zeros(len(Root) + len(BatchArray))
        self.root = self._root.data_ptr()
        self.heads = self.ghosts = self._arrays = self.page_table[:0]
        self.ids = 0  # of the largest batch that arrays have room for
        self._tables = self._classes = self.state[:0]
        self._groups = self.page_table[:0]
        self._page_lists: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        """Device memory, without maps and counters of tables."""
        parts = [self.arena, self.heads, self.ghosts, self._arrays, self.state, self.page_table]
        return sum(p.numel() * p.element_size() for p in parts)

    @property
    def groups(self) -> int:
        """Programs of `enumerate_misses`."""
        return self._groups.numel() // 2

    def count_dropped(self, number: int, rows: torch.Tensor) -> None:
        """Counts rows of a class, int64 [] on the device, that left their slots for no other row."""
        self.state[occupied_at(number)] -= rows
        self.state[BatchState.FREED] += rows

    def fit_index(self, slots: int) -> bool:
        """Makes room for a bucket a slot, and for a ghost a slot (LFU). Returns whether they moved."""
        if self.heads.numel() >= max(1, slots):
            return False
        self.heads = self._filled(-1, max(1, slots))
        self.ghosts = self._filled(
            -PRIORITY_LIMIT, max(2, slots + slots % 2) if self._settings.policy.is_lfu else 2
        )
        return True

    def fit_arrays(self, ids: int) -> None:
        """Makes the arrays anew, for batches of so many ids."""
        self.ids = ids
        self._arrays = self._filled(-1, sum(_WORDS.values()) * ids)

    def clear_arrays(self) -> None:
        self._arrays.fill_(-1)

    def array(self, which: BatchArray) -> torch.Tensor:
        """An array of the batches: int32 [ids], MISSES int64 [ids]."""
        first = sum(_WORDS[a] for a in BatchArray if a < which) * self.ids
        part = self._arrays[first : first + _WORDS[which] * self.ids]
        return part.view(torch.int64) if which is BatchArray.MISSES else part

    def send(
        self, tables: NDArray[Any], groups: NDArray[Any], classes: NDArray[Any], page_table: NDArray[Any]
    ) -> None:
        """Writes the records of tables and classes, all flat, to the device."""
        self._tables, self._groups, self._classes = (
            self._sent(tables),
            self._sent(groups),
            self._sent(classes),
        )
        self.page_table.copy_(torch.from_numpy(page_table))

    def send_page_lists(self, lists: list[NDArray[Any]]) -> list[int]:
        """Writes the pages of each class to the device. Their addresses."""
        self._page_lists = [self._sent(pages) for pages in lists]
        return [pages.data_ptr() for pages in self._page_lists]

    def write_root(self, counters: torch.Tensor, more: Mapping[Root, int]) -> None:
        """Writes the record. more: what pages and the CPU's gathering add to it."""
        fields = dict.fromkeys(Root, 0) | {
            Root.ARENA: self.arena.data_ptr(),
            Root.PAGES: self.page_table.data_ptr(),
            Root.HEADS: self.heads.data_ptr(),
            Root.BUCKETS: self.heads.numel(),
            Root.TABLES: self._tables.data_ptr(),
            Root.CLASSES: self._classes.data_ptr(),
            Root.STATE: self.state.data_ptr(),
            Root.COUNTERS: counters.data_ptr(),
            Root.IN_FLIGHT: self.in_flight.data_ptr(),
            Root.GHOSTS: self.ghosts.data_ptr(),
            Root.GHOST_PAIRS: self.ghosts.numel() // 2,
            Root.RATE: self._settings.score_rate,
            Root.GROUPS: self._groups.data_ptr(),
        }
        fields |= more
        arrays = [self.array(which).data_ptr() for which in BatchArray]
        self._root.copy_(torch.tensor([*(fields[f] for f in Root), *arrays], dtype=torch.int64))

    def _filled(self, value: int, count: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self._device)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device)

    def _sent(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
