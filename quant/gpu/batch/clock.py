"""Times of a batch."""

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tableside.quant.device.device import Device


@dataclass(frozen=True)
class Times:
    """Seconds of a batch: staging on the host, copy in, kernels, copy out."""

    staging: float
    copy_in: float
    kernels: float
    copy_out: float


class Clock:
    """Marks between the parts of a batch: events on a stream."""

    def __init__(self, device: Device, stream: Any) -> None:
        self._device, self._stream = device, stream
        self._began = time.perf_counter()
        self._staged = 0.0
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Notes the end of a part; the first mark is the end of staging."""
        if not self._marks:
            self._staged = time.perf_counter() - self._began
        event = self._device.event(timed=True)
        event.record(self._stream)
        self._marks.append(event)

    def times(self) -> Times:
        """After four marks, once the stream was waited for."""
        return Times(self._staged, *(a.elapsed_time(b) / 1e3 for a, b in pairwise(self._marks)))
