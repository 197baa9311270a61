"""Device memory at a fixed address that can be given back, to torch's allocator or other processes, and taken
again. Taken memory has undefined contents."""

from abc import ABC, abstractmethod

import torch

GRANULARITY = 2 << 20  # bytes; a GPU gives out memory of this kind in multiples of them


class DeviceMemory(ABC):
    """`size` bytes, taken at first. tensor: uint8 [size] over them; do not use it while they are given
    back."""

    size: int
    tensor: torch.Tensor
    is_taken = False

    def take(self) -> None:
        """Takes memory again. QuantError: the device has no room, not even in what torch keeps for later."""
        if not self.is_taken:
            self._map()
            self.is_taken = True

    def give_back(self) -> None:
        """Gives the memory back. Nothing on the device may be using it."""
        if self.is_taken:
            self._unmap()
            self.is_taken = False

    @abstractmethod
    def _map(self) -> None: ...

    @abstractmethod
    def _unmap(self) -> None: ...
