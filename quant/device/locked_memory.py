"""Parts of this process's memory that a device copies from by itself."""

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant.device.device import Device


class LockedMemory:
    """Memory that is page-locked as long as it is mapped."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parts: dict[int, int] = {}  # where each begins and ends

    def add(self, memory: NDArray[np.uint8]) -> None:
        """Takes a part, until the last view of it goes. QuantError: CUDA does not lock it."""
        address = int(memory.ctypes.data)
        self._device.page_lock(address, memory.size)
        self._parts[address] = address + memory.size
        # The array's memory is an argument so that it cannot be unmapped before.
        weakref.finalize(memory, _let_go, self._parts, address, memory.base, self._device).atexit = False

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Returns (begin, end) of each part."""
        return list(self._parts.items())


def _let_go(parts: dict[int, int], address: int, owner: Any, device: Device) -> None:
    del parts[address]
    device.page_unlock(address, owner)
