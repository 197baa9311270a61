"""The three streams of a cache, and the order between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tableside.quant.device.device import Device


class Streams:
    """`main`, given by the caller, a `side` stream and one for `copies`. filled: an event behind the last
    batch's `fill_slots` and `end`."""

    def __init__(self, device: Device, main: Any) -> None:
        self.device, self.main = device, main
        self.side, self.copies = (device.stream(main.priority) for _ in range(2))
        self.filled = device.event()

    @contextmanager
    def on_main(self) -> Iterator[None]:
        """Makes the main stream the current one, behind all that the last batch does."""
        with self.device.on(self.main):
            self.device.wait(self.filled, self.main)
            yield

    def join(self) -> None:
        """Makes the main stream wait for the side stream."""
        self.main.wait_stream(self.side)

    def join_all(self) -> None:
        """As `join`, and after copies too."""
        self.main.wait_stream(self.copies)
        self.join()
