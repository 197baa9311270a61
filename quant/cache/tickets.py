"""Batches in flight: their device memory, and the tickets to wait for and release them."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import MOST_IN_FLIGHT, UNIT_BYTES, TicketField
from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError

_LEAST_IDS = 64
Unread = dict[int, tuple[NDArray[np.int64], NDArray[np.uint8]]]
"""By table: row numbers that the host could not fetch, ascending, and the `RowState` of each."""


class InFlightBatch:
    """Device memory of a batch in flight, reused by later ones.
    place: its number; record: int64 [TICKET_SIZE] on the device; staging: its staging buffer, uint8, of
    which `device_bytes` are for rows that the device fetches; locations: int32 [ids or more]; ready: event
    when rows can be read; released: event when nobody reads them. unread: rows that the host could not
    fetch."""

    def __init__(self, device: Device, place: int, staging: torch.Tensor) -> None:
        fields = dict.fromkeys(TicketField, 0) | {
            TicketField.STAGING: staging.data_ptr(),
            TicketField.STAGING_UNITS: staging.numel() // UNIT_BYTES,
            TicketField.PLACE: place,
        }
        self.record = torch.tensor(
            [fields[f] for f in TicketField], dtype=torch.int64, device=device.torch_device
        )
        self.device, self.place = device, place
        self.staging, self.device_bytes = staging, staging.numel()
        self.unread: Unread = {}
        self.locations = torch.empty(0, dtype=torch.int32, device=device.torch_device)
        self.ready, self.released = device.event(), device.event()

    def fit(self, ids: int) -> None:
        """Makes room for the locations of so many ids."""
        if self.locations.numel() < ids:
            self.locations = torch.empty(rounded_up(ids), dtype=torch.int32, device=self.device.torch_device)

    def fit_staging(self, size: int) -> None:
        """Makes the staging buffer larger, where it must be, with what lies in it. What the device fetches
        still takes as much of it as before."""
        if self.staging.numel() < size:
            before = self.staging
            self.staging = torch.empty(rounded_up(size), dtype=torch.uint8, device=self.device.torch_device)
            self.staging[: before.numel()].copy_(before)
            self.record[TicketField.STAGING] = self.staging.data_ptr()


class Ticket:
    """A batch whose rows are on their way to the device.
    locations: int32 [ids]; >= 0: a slot, times the row's bytes from the cache's `slots_address`; -1: the
    table itself; else 16 * (-2 - location) bytes from `staging`, the address of the staging buffer. unread:
    rows that are zeros there. release, abandon: called with the batch on release (with the stream too) or
    when dropped before."""

    def __init__(
        self,
        batch: InFlightBatch,
        release: Callable[[InFlightBatch, Any], None],
        abandon: Callable[[InFlightBatch], None],
    ) -> None:
        self._batch: InFlightBatch | None = batch
        self._release, self._abandon = release, abandon
        self._ready, self._device = batch.ready, batch.device
        self.locations, self.unread = batch.locations, batch.unread
        self.staging = batch.staging.data_ptr()

    def wait(self, stream: Any = None) -> None:
        """Makes the current stream, which may be given, wait for the rows. The caller does not wait."""
        self._device.wait(self._ready, stream)

    def release(self, stream: Any = None) -> None:
        """Lets its rows be evicted after the work on the current stream, which may be given. Once."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._release(batch, stream)

    def __del__(self) -> None:
        if (batch := getattr(self, "_batch", None)) is not None:
            self._abandon(batch)


class BatchesInFlight:
    """All batches that may be in flight; those with a staging buffer exist from the start. staging: of each
    of these. The caller holds the cache's lock."""

    def __init__(self, device: Device, staging: Sequence[torch.Tensor]) -> None:
        self._device = device
        self.all = [InFlightBatch(device, n, buffer) for n, buffer in enumerate(staging)]
        self.free = deque(self.all)
        self.count = 0  # that are in flight

    def reserve(self, ids: int) -> None:
        """Makes room for the locations of so many ids in the free ones; what others use they keep."""
        for batch in self.free:
            self._device.wait(batch.released)
            batch.fit(ids)

    def taken(self, ids: int, arena: torch.Tensor, stream: Any) -> InFlightBatch:
        """Takes a batch, free or new, with room for so many ids. QuantError: too many are out."""
        if not self.free:
            if len(self.all) >= MOST_IN_FLIGHT:
                raise QuantError(
                    f"{len(self.all)} tickets are out; release them, in any order, after their lookups"
                )
            self.all.append(InFlightBatch(self._device, len(self.all), arena[:0]))
            self.free.append(self.all[-1])
        # the one with a staging buffer that is free for longest; where there is none, one without
        batch = next((b for b in self.free if b.device_bytes), self.free[0])
        self.free.remove(batch)
        self._device.wait(batch.released, stream)  # the lookup that read its locations and its staging buffer
        batch.fit(ids)
        batch.unread = {}
        return batch

    @property
    def grown_bytes(self) -> int:
        """What staging buffers have become larger by."""
        return sum(b.staging.numel() for b in self.all if b.staging.numel() > b.device_bytes)

    def wait_for_released(self) -> None:
        """Makes the current stream wait for all lookups of released batches."""
        for batch in self.all:
            self._device.wait(batch.released)


def rounded_up(ids: int) -> int:
    """Room for so many ids or up to an eighth more, so that it need not grow with every batch."""
    step = 1 << max(0, (ids - 1).bit_length() - 4)
    return max(_LEAST_IDS, -(-ids // step) * step)
