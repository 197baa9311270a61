"""Where the time of a batch goes."""

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Times:
    """Where the time of a batch went, in seconds: staging on the host, the copy in, kernels, the copy out."""

    staging: float
    copy_in: float
    kernels: float
    copy_out: float


class Clock:
    """Marks between the parts of a batch: events on a stream, or the host's clock where there is no stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._began = time.perf_counter()
        self._staged = 0.0
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Notes the end of a part; the first mark is the end of staging."""
        if not self._marks:
            self._staged = time.perf_counter() - self._began
        if self._stream is None:
            self._marks.append(time.perf_counter())
        else:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._marks.append(event)

    def times(self) -> Times:
        """After four marks, once the stream was waited for."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        parts = [b - a if self._stream is None else a.elapsed_time(b) / 1e3 for a, b in pairs]
        return Times(self._staged, *parts)
