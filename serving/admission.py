"""What a worker takes on: whose turn it is on its one core, and how many bytes requests and responses may hold.

A worker that is asked for more than it can do should go on doing as much as it can, soon, and refuse the rest at little cost.

*Turns.* The event loop works on requests for at most `SLICE_S` before it reads its sockets again, so a health check waits for
that long and no longer. Requests that come in beyond that wait. They are taken in order while the oldest has waited for less than
`NEWEST_FIRST_AFTER_S`; from then on the newest is taken first, since those that have waited longest are the likeliest to be
given up by their clients: what is answered is answered soon. Who has waited `max_wait_s` is refused, and so is the oldest where
more than `max_waiting` wait. Both are answered 503 with Retry-After. Waiting costs nothing, and a client that waits for its
refusal sends nothing new meanwhile: so refusing late is cheaper than refusing at once.

*Bytes.* A request holds its body from the first byte received and its response until the last byte is sent (`Hold`). Where all
requests of a worker together would hold more than `max_in_flight_bytes`, the one that asks is refused.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from serving.errors import ApiError, Kind

SLICE_S = 1e-3
NEWEST_FIRST_AFTER_S = 0.02
RETRY_AFTER_S = 1
JSON_GROWTH = 4  # bytes of JSON for each byte of fp32 that it says


def overloaded(why: str) -> ApiError:
    """503: this worker does not take the request on now."""
    return ApiError(503, Kind.OVERLOADED, f"{why}; try again later, or start more workers")


class Waiting:
    """Requests that wait for something, which `wake` gives to one of them. Belongs to one event loop."""

    def __init__(self, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting, self._max_wait_s = max_waiting, max_wait_s
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()  # oldest first
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self) -> None:
        """Returns when it is this request's turn. ApiError 503: that takes too long, or too many wait."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append((time.perf_counter(), mine))
        if len(self._waiting) > self._max_waiting:
            self._refuse_oldest()
        if self._timer is None:
            self._timer = loop.call_later(self._max_wait_s, self._refuse_late)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it was given the turn as its client left
                self.wake()
            raise

    def wake(self) -> bool:
        """Gives the turn to one that waits: the oldest, or, where that has waited for long, the newest. False: nobody waits."""
        while self._waiting:
            is_late = time.perf_counter() - self._waiting[0][0] > NEWEST_FIRST_AFTER_S
            _, chosen = self._waiting.pop() if is_late else self._waiting.popleft()
            if not chosen.done():
                chosen.set_result(None)
                return True
        return False

    def _refuse_oldest(self) -> None:
        _, oldest = self._waiting.popleft()
        if not oldest.done():
            oldest.set_exception(overloaded(f"{self._max_waiting} requests wait for this worker, its limit (max_waiting)"))

    def _refuse_late(self) -> None:
        """Refuses who has waited for too long, and looks again when the next one will have."""
        self._timer = None
        while self._waiting:
            since, oldest = self._waiting[0]
            left = since + self._max_wait_s - time.perf_counter()
            if left > 0 and not oldest.done():
                self._timer = asyncio.get_running_loop().call_later(left, self._refuse_late)
                return
            self._waiting.popleft()
            if not oldest.done():
                oldest.set_exception(overloaded(f"the request waited {self._max_wait_s:g} s for its turn (max_wait_s)"))


class Turns:
    """Turns on the event loop, a slice of its time after another, and turns on the one thread beside it."""

    def __init__(self, max_waiting: int, max_wait_s: float) -> None:
        self._inline, self._beside = Waiting(max_waiting, max_wait_s), Waiting(max_waiting, max_wait_s)
        self._slice_began: float | None = None
        self._is_busy_beside = False

    async def take(self) -> None:
        """Returns when the request may be worked on, on the event loop. ApiError 503: it was not taken on."""
        now = time.perf_counter()
        if self._slice_began is None:
            self._begin_slice(now)
        elif now - self._slice_began >= SLICE_S:
            await self._inline.wait()

    def _begin_slice(self, now: float) -> None:
        self._slice_began = now
        asyncio.get_running_loop().call_soon(self._end_slice)  # after the sockets were read again

    def _end_slice(self) -> None:
        self._slice_began = None
        if self._inline.wake():
            self._begin_slice(time.perf_counter())

    async def take_beside(self) -> None:
        """Returns when the thread beside the event loop is free for this request, which then calls `leave_beside`."""
        if self._is_busy_beside:
            await self._beside.wait()
        self._is_busy_beside = True

    def leave_beside(self) -> None:
        """Gives the thread to the next one."""
        self._is_busy_beside = self._beside.wake()


class Bytes:
    """The bytes that all requests of a worker hold together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0

    @contextmanager
    def holding(self) -> Iterator["Hold"]:
        """A hold for the length of a block, where no connection keeps one."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            hold.release()


class Hold:
    """What one request holds: grows with its body and by its response, and goes when the response is sent."""

    def __init__(self, total: Bytes) -> None:
        self._total, self._bytes, self._is_released = total, 0, False

    def grow(self, count: int) -> None:
        """Takes `count` more bytes, unless the connection is gone, so that nothing is kept for it.

        ApiError 503: all requests together would hold too many; nothing is taken.
        """
        if self._is_released:
            return
        if self._total.held + count > self._total.limit:
            raise overloaded(
                f"requests hold {self._total.held:,} bytes of this worker, this one needs {count:,} more; the limit is "
                f"{self._total.limit:,} (max_in_flight_bytes)"
            )
        self._total.held += count
        self._bytes += count

    def release(self) -> None:
        """Gives everything back, for good. Safe to call twice."""
        self._is_released = True
        self._total.held -= self._bytes
        self._bytes = 0
