"""The three streams of a cache, and the order between them. In Triton's interpreter there are none:
everything is done at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch


class Streams:
    """`main`, which the caller gives, a `side` stream and one for `copies`; each None in the interpreter.

    filled: an event, after which the last batch's admitted rows are in their slots and its maps are empty.
    """

    def __init__(self, device: torch.device, main: Any) -> None:
        self.device, self.main = device, main
        self.side, self.copies = (
            None if main is None else torch.cuda.Stream(device, main.priority)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self.filled: Any = None if main is None else torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def on_main(self) -> Iterator[None]:
        """Makes the main stream the current one, behind all that the last batch does."""
        if self.main is None:
            with np.errstate(all="ignore"):  # a GPU does not warn either
                yield
        else:
            here = torch.cuda.current_device() == self.device.index
            with nullcontext() if here else torch.cuda.device(self.device), torch.cuda.stream(self.main):
                wait(self.filled, self.main)
                yield

    def on_copies(self) -> Any:
        """Makes the stream for copies the current one."""
        return nullcontext() if self.copies is None else torch.cuda.stream(self.copies)

    def note(self, event: Any, stream: Any) -> None:
        """Notes in an event what is on a stream so far. While a graph is captured, what comes next in it
        waits instead.
        """
        if event is None:
            return
        if not is_capturing():
            event.record(stream)
        elif event is not self.filled:
            order(self.main, stream)

    def follow_current(self, current: Any = None) -> None:
        """What the main stream does next comes after what is on the current stream."""
        if self.main is not None:
            self.main.wait_stream(torch.cuda.current_stream(self.device.index) if current is None else current)

    def join(self) -> None:
        """What comes next on the main stream comes after what is on the side stream."""
        order(self.main, self.side)

    def join_all(self) -> None:
        """As `join`, and after copies too."""
        order(self.main, self.copies)
        self.join()


def order(later: Any, earlier: Any) -> None:
    """What comes next on one stream comes after what is on the other so far."""
    if later is not None:
        later.wait_stream(earlier)


def handle(stream: Any) -> int | None:
    """What a launch takes for a stream."""
    return None if stream is None else int(stream.cuda_stream)


def wait(event: Any, stream: Any = None) -> None:
    """What comes next on a stream comes after `event`; None: on the current one, which takes torch longer to find.

    Not where a graph is captured: it may not wait for what came before it, and whoever replays it orders it.
    """
    if event is not None and not is_capturing():
        event.wait(stream)


def is_capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return _has_cuda() and torch.cuda.is_current_stream_capturing()


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()
