"""A cache's counts, from copies of its kernels' numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tableside.quant.cache.kernels.state import BatchState, ClassState, TableCounter, occupied_at
from tableside.quant.cache.pages import Pages
from tableside.quant.device.device import Device


@dataclass(frozen=True)
class TableStatistics:
    """A table's counts. fetched: rows that came over the bus, each once a batch; in_place: ids read so."""

    name: str
    ids: int
    hits: int
    fetched: int
    in_place: int
    row_bytes: int

    @property
    def bus_bytes(self) -> int:
        return (self.fetched + self.in_place) * self.row_bytes


@dataclass(frozen=True)
class Statistics:
    """Counts of a cache. tables: by number. tickets: batches begun. slots, occupied: rows now. inserted,
    evicted: rows so far. padded: rows read from a staging buffer and not admitted. locked_out: rows not
    admitted because batches in flight used every slot."""

    tickets: int
    slots: int
    occupied: int
    inserted: int
    evicted: int
    padded: int
    locked_out: int
    tables: dict[int, TableStatistics]

    @classmethod
    def empty(cls, slots: int) -> "Statistics":
        """Counts of a new cache."""
        return cls(0, slots, 0, 0, 0, 0, 0, {})


def statistics_of(
    state: torch.Tensor, counters: torch.Tensor, names: Mapping[int, tuple[str, int]], pages: Pages
) -> Statistics:
    """state, counters: on the host, int64. names: number of each table -> its name, and bytes of its rows."""
    s, c = state.tolist(), counters.view(-1, len(TableCounter)).tolist()
    occupied = sum(s[occupied_at(n)] for n in range(len(pages.classes)))
    return Statistics(
        tickets=s[BatchState.NOW],
        slots=pages.slots,
        occupied=occupied,
        inserted=s[BatchState.INSERTED],
        evicted=s[BatchState.INSERTED] - occupied - s[BatchState.FREED],
        padded=s[BatchState.STAGED],
        locked_out=s[BatchState.LOCKED_OUT],
        tables={
            number: TableStatistics(
                name,
                ids=c[number][TableCounter.IDS],
                hits=c[number][TableCounter.HITS],
                fetched=c[number][TableCounter.FETCHED],
                in_place=c[number][TableCounter.IN_PLACE],
                row_bytes=row_bytes,
            )
            for number, (name, row_bytes) in names.items()
            if number < len(c)
        },
    )


@dataclass(frozen=True)
class _Snapshot:
    """Copies on the host, complete once `copied` is over."""

    state: torch.Tensor
    counters: torch.Tensor
    names: dict[int, tuple[str, int]]
    copied: Any


class Snapshots:
    """Copies of a cache's numbers made in stream order, so nobody waits. last: the statistics of the last
    that arrived, or None. The caller holds the cache's lock."""

    def __init__(self, device: Device, pages: Pages) -> None:
        self._device, self._pages = device, pages
        self._coming: _Snapshot | None = None
        self._last_state: torch.Tensor | None = None
        self.last: Statistics | None = None

    def begin(self, state: torch.Tensor, counters: torch.Tensor, names: dict[int, tuple[str, int]]) -> None:
        """Begins a copy on the current stream, unless one is on its way."""
        if self._coming is not None and not self._coming.copied.query():
            return
        self.keep()
        copies = [self._device.pinned(source.numel(), source.dtype) for source in (state, counters)]
        for copy, source in zip(copies, (state, counters), strict=True):
            copy.copy_(source, non_blocking=True)
        copied = self._device.event()
        copied.record()
        self._coming = _Snapshot(copies[0], copies[1], names, copied)

    def keep(self) -> None:
        """Makes `last` of the copy that was begun, if it has arrived."""
        if (coming := self._coming) is not None and coming.copied.query():
            self._last_state = coming.state
            self.last = statistics_of(coming.state, coming.counters, coming.names, self._pages)

    def class_states(self) -> list[list[int]] | None:
        """`ClassState` of each class in the last copy that arrived; None: none did."""
        if self._last_state is None:
            return None
        states: list[list[int]] = self._last_state[len(BatchState) :].view(-1, len(ClassState)).tolist()
        return states
