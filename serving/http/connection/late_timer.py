"""A connection's deadline, which moves with each request and hardly ever comes."""

import asyncio
from collections.abc import Callable
from typing import Any


class LateTimer:
    """Calls something when a deadline comes, unless another one or none is set before. Belongs to one event
    loop.

    A timer that is made and cancelled for each request costs as much as a small lookup. So a timer that is
    there stays when the deadline moves on, and looks when it ends whether the deadline has come. It never
    runs for longer than `horizon_s`, which is as near as deadlines usually are. A nearer one makes a new
    timer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, horizon_s: float) -> None:
        self._loop, self._horizon_s = loop, horizon_s
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._call: tuple[Callable[..., object], tuple[Any, ...]] | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is a deadline."""
        return self._call is not None

    def set(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> None:
        """Has `callback` called with the arguments in so many seconds."""
        self._due, self._call = self._loop.time() + seconds, (callback, arguments)
        if self._timer is None or self._timer.when() > self._due:
            self._start()

    def clear(self) -> None:
        """There is no deadline any more."""
        self._call = None

    def end(self) -> None:
        """There is none, and no timer is left."""
        self._call = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(self._due, self._loop.time() + self._horizon_s), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._call is None:
            return
        if self._due > self._loop.time():
            self._start()
            return
        (callback, arguments), self._call = self._call, None
        callback(*arguments)
