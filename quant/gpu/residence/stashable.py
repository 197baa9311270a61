"""Rows in HBM whose memory can be given back. Nothing is copied then: the host keeps the rows."""

import weakref
from typing import Any

import torch

from tableside.quant.contract import Table
from tableside.quant.device.device import Device
from tableside.quant.gpu.residence.memory import array_bytes, copy_rows, device_bytes
from tableside.quant.row_format import device_row_bytes


class StashableRows:
    """A table's rows in HBM; the memory can be given back and filled again at the same address."""

    def __init__(self, table: Table, device: Device, registered: torch.Tensor | None = None) -> None:
        self._pages = device.memory(device_bytes(table))
        self._source = array_bytes(table.packed) if registered is None else registered
        self._table = table  # keeps the memory of `_source` alive
        copy_rows(self.tensor, self._source, table.row_bytes, is_pinned=registered is not None)

    @property
    def tensor(self) -> torch.Tensor:
        """Its memory, uint8 [bytes]."""
        return self._pages.tensor

    @property
    def bytes(self) -> int:
        """HBM that it takes when it is not away."""
        return self._pages.size

    @property
    def is_away(self) -> bool:
        """True if its memory is given back."""
        return not self._pages.is_taken

    def give_back(self) -> None:
        """Gives the memory back. No lookup may be under way."""
        self._pages.give_back()

    def bring_back(self) -> None:
        """Begins to copy the rows back, on the current stream. QuantError: the device has no room."""
        self._pages.take()
        try:
            size = self._table.row_bytes
            rows = self._pages.tensor.view(-1, device_row_bytes(size))
            rows[:, size:].zero_()
            rows[:, :size].copy_(self._source.view(-1, size), non_blocking=True)
        except BaseException:
            self._pages.give_back()
            raise


class StashableTables:
    """The stashable tables of one device. The caller holds the device's lock."""

    def __init__(self, device: Device) -> None:
        self.all: weakref.WeakSet[StashableRows] = weakref.WeakSet()
        self._device = device
        self._restored: Any = None  # an event behind the copies; None: nothing is copied

    def stash(self) -> int:
        """Gives back the memory of all, which no lookup reads; returns how many bytes."""
        given = [table for table in self.all if not table.is_away]
        for table in given:
            table.give_back()
        self._restored = None
        return sum(table.bytes for table in given)

    @property
    def away(self) -> list[StashableRows]:
        """Tables whose memory is given back."""
        return [table for table in self.all if table.is_away]

    def restore(self) -> None:
        """Begins to bring all back, on the current stream. QuantError: there is no room for all."""
        for table in self.away:
            table.bring_back()
            self._restored = self._device.event()
            self._restored.record()

    def wait(self) -> None:
        """Work that comes next on the current stream finds the tables in their place."""
        if self._restored is not None:
            self._device.wait(self._restored)
