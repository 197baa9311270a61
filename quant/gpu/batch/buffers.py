"""Host and device buffers of batches; they serve one device and one batch at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.device.device import Device

SMALLEST = 4096  # bytes of a buffer

Buffer = NDArray[np.uint8]


class Buffers:
    """Growing memory that the batches of a device share, one at a time; page-locked on the host.
    Sizes are bytes. in: inputs and header; rows: gathered rows; out: vectors, found masks and counts;
    scratch: bag starts, int32; flags: int32 a job, on the host; the rest is on the device. *_array: the
    host's side in numpy. done: an event behind a batch."""

    def __init__(self, device: Device, answers: Callable[[int], Buffer] | None = None) -> None:
        """answers: gives page-locked room for what callers get; None: torch does."""
        self._device = device
        self._inputs(SMALLEST)
        self.host_rows, self.device_rows = self._pair(SMALLEST)
        self.device_out, self.scratch = self.on_device(SMALLEST), self.on_device(SMALLEST)
        self._flags(SMALLEST)
        self._answers = answers
        # Whoever waits sleeps: a thread that spins takes the time of those that parse and send.
        self.done: Any = device.event(blocking=True)

    def answer(self, size: int, is_copied: bool = True) -> Buffer:
        """Room for what a caller gets. is_copied: the device copies to it."""
        if self._answers is not None and size:
            return self._answers(size)
        return self._device.pinned(size).numpy() if is_copied else np.empty(size, np.uint8)

    def on_device(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)

    def fit(
        self, *, inputs: int = 0, rows: int = 0, outputs: int = 0, scratch: int = 0, flags: int = 0
    ) -> None:
        """Makes room for so many bytes of each."""
        if inputs > self.host_in.numel():
            self._inputs(_grown(inputs))
        if rows > self.host_rows.numel():
            self.host_rows, self.device_rows = self._pair(_grown(rows))
        if outputs > self.device_out.numel():
            self.device_out = self.on_device(_grown(outputs))
        if scratch > self.scratch.numel():
            self.scratch = self.on_device(_grown(scratch))
        if flags > self.flags.numel():
            self._flags(_grown(flags))

    def _inputs(self, size: int) -> None:
        self.host_in, self.device_in = self._pair(size)
        self.host_in_array: Buffer = self.host_in.numpy()  # asking for it takes microseconds

    def _flags(self, size: int) -> None:
        self.flags = self._device.pinned(size)
        self.flags_array: NDArray[np.int32] = self.flags.numpy().view(np.int32)

    def _pair(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._device.pinned(size), self.on_device(size)


def _grown(n: int) -> int:
    return 1 << (n - 1).bit_length()
