"""Copies of weights between GPU and host, stream waits, and totals."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from tableside.quant.stash.guard import StashError

_POLL_S = 0.0005


@dataclass
class StashCounts:
    """Totals of this process; bytes are of weights, and a share stashed twice counts twice. bytes_away,
    host_bytes: current bytes without device memory, and of page-locked host copies."""

    stashes: int = 0
    restores: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    bytes_away: int = 0
    host_bytes: int = 0
    wait_s: float = 0.0  # streams (on a CPU: callers) stood still so long for weights to come back
    _waits: list[tuple[Any, Any]] = field(
        default_factory=list, repr=False
    )  # events before and after waits of streams

    def waited(self, before: Any, after: Any) -> None:
        """Notes a wait between two events of a stream, which is counted once they have happened."""
        self._waits.append((before, after))
        self.collect()

    def collect(self) -> None:
        """Counts the waits that are over. The host does not wait."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.pop(0)
            self.wait_s += before.elapsed_time(after) / 1000


class Transfer:
    """A copy of `bytes`, "out" or "back". Make it just before the copy is enqueued, call `enqueued` just
    after. stream None: the host copies synchronously."""

    def __init__(
        self, direction: str, nbytes: int, stream: "torch.cuda.Stream | None", counts: StashCounts
    ) -> None:
        self.direction, self.bytes, self._counts = direction, nbytes, counts
        self.began_s = time.monotonic()
        self._copied_ms = 0.0
        self._stream = stream
        self._events: tuple[Any, Any] | None = None
        if stream is not None:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._events[0].record(stream)

    def enqueued(self) -> None:
        if self._events is not None:
            self._events[1].record(self._stream)
        else:
            self._copied_ms = 1000 * (time.monotonic() - self.began_s)
        if self.direction == "back":
            self._counts.restores += 1
            self._counts.bytes_back += self.bytes
            self._counts.wait_s += self._copied_ms / 1000
        else:
            self._counts.stashes += 1
            self._counts.bytes_out += self.bytes

    def is_done(self) -> bool:
        return self._events is None or bool(self._events[1].query())

    def copy_ms(self) -> float | None:
        """Duration of the copy on its stream; None: not done."""
        if self._events is None:
            return self._copied_ms
        return float(self._events[0].elapsed_time(self._events[1])) if self.is_done() else None

    def wait(self) -> None:
        """Later work on the current stream comes after the copy. The host does not wait."""
        if self._events is None or self.is_done():
            return
        stream = torch.cuda.current_stream(self._stream.device if self._stream is not None else None)
        if self.direction == "out":
            stream.wait_event(self._events[1])
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before.record(stream)
        stream.wait_event(self._events[1])
        after.record(stream)
        self._counts.waited(before, after)

    def check(self, timeout_s: float) -> None:
        """Raises StashError if the copy was enqueued over `timeout_s` ago and is not done. The host does not
        wait."""
        if not self.is_done() and (age_s := time.monotonic() - self.began_s) > timeout_s:
            raise StashError(
                f"{self.bytes:,} bytes of embedding weights were to be copied {self.direction} {age_s:.1f} s "
                "ago and still are "
                f"not; expected at most {timeout_s} s. The copy's stream, or one that it waits for, does not "
                "come to an end: "
                "find what holds it, or raise timeout_s"
            )

    def finish(self, timeout_s: float) -> None:
        """The host waits until the copy is done. StashError: it takes longer than `timeout_s` from now."""
        until = time.monotonic() + timeout_s
        while not self.is_done():
            if time.monotonic() > until:
                self.check(min(timeout_s, time.monotonic() - self.began_s - _POLL_S))
            time.sleep(_POLL_S)
