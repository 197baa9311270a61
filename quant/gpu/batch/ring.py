"""Page-locked memory from which small things are copied to a device, on its default stream."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.device.device import Device

Words = NDArray[np.int64]


class CopyRing:
    """Page-locked memory that is written in turns: a part of it again when the copies of it that were before
    are done. One thread at a time. It must outlive the copies."""

    PART_BYTES, PARTS = 1 << 18, 4

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._words: Words = np.zeros(0, np.int64)
        self._part, self._at = 0, 0  # and bytes within it
        self._done: list[Any] = [None] * self.PARTS  # events behind the copies of each part

    def takes(self, words: Words) -> bool:
        """Whether they are few enough."""
        return words.nbytes <= self.PART_BYTES // 4

    def copy(self, words: Words, fields: Words, values: Words, target: int) -> None:
        """Enqueues a copy of words to an address, with values in the words that `fields` numbers."""
        size = words.nbytes
        if self._memory is None:
            self._memory = self._device.pinned(self.PART_BYTES * self.PARTS)
            self._words = self._memory.numpy().view(np.int64)
        elif self._at + size > self.PART_BYTES:
            self._done[self._part] = event = self._device.event()
            event.record()
            self._part, self._at = (self._part + 1) % self.PARTS, 0
            if (before := self._done[self._part]) is not None:
                before.synchronize()
        at = self._part * self.PART_BYTES + self._at
        written = self._words[at // 8 : (at + size) // 8]
        written[:] = words
        written[fields] = values
        self._device.copy(self._device.current_handle(), target, self._memory.data_ptr() + at, size)
        self._at += size
