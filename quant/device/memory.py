"""Memory of a device at an address that stays while the memory itself is given back and taken again.

On a GPU this is CUDA's virtual memory. On the CPU, where Triton's interpreter runs, it is an anonymous mapping. Memory that was
given back can be used by torch's allocator or by another process. Memory that is taken again holds anything.
"""

import mmap
from typing import Protocol

import torch

from tableside.quant.device.cuda import VirtualMemory, tensor_over

GRANULARITY = 2 << 20  # bytes; a GPU gives out memory of this kind in multiples of them


class _Memory(Protocol):
    def map(self) -> None: ...

    def unmap(self) -> None: ...


class DeviceMemory:
    """`size` bytes, taken. tensor: uint8 [size] over them, which must not be used while they are given back.

    QuantError: the device has no room.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.is_taken = False
        self._memory: _Memory
        if device.type == "cuda":
            self._memory = virtual = VirtualMemory(size, device)
            self.take()
            self.tensor = tensor_over(virtual.address, size, device, virtual)
        else:
            self._memory = anonymous = _AnonymousMemory(size)
            self.take()
            self.tensor = torch.frombuffer(anonymous.pages, dtype=torch.uint8)[:size]

    def take(self) -> None:
        """Takes memory again. QuantError: the device has no room, not even in what torch keeps for later."""
        if not self.is_taken:
            self._memory.map()
            self.is_taken = True

    def give_back(self) -> None:
        """Gives the memory back. Nothing on the device may be using it."""
        if self.is_taken:
            self._memory.unmap()
            self.is_taken = False


class _AnonymousMemory:
    def __init__(self, size: int) -> None:
        self.pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def map(self) -> None:
        """The kernel maps pages as they are touched."""

    def unmap(self) -> None:
        self.pages.madvise(mmap.MADV_DONTNEED)
