"""Admission: how many requests a worker works on, and how many bytes they hold. An overloaded worker answers
as many requests as it can, each soon, and refuses the rest cheaply.

*Slots.* A worker works on `slots` requests, from the body's first byte to the response's last. Others wait
after their headers; their bodies stay in the kernel. The oldest goes first until it has waited
NEWEST_FIRST_AFTER_S, then the newest: clients that waited longest have probably given up. A request is
refused (503, Retry-After) after `max_wait_s`, and the oldest if more than `max_waiting` wait: a client that
waits for its refusal sends nothing new. A slow body loses its slot after PROMPT_S.

*Slices.* The event loop works on requests for SLICE_S, then reads sockets, so that new connections wait for
one slice, not for all requests. Those of connections whose last request waited for rows stand behind all
others, one in each round of the loop: one whose rows are in memory waits for one of them, not for a slice.

*Bytes.* A `Hold` counts a request's body and response until the last byte is sent. Requests beyond
`max_in_flight_bytes` are refused.
"""

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tableside.serving.errors import ApiError, ErrorKind

CPU_SLOTS = 64  # requests that are read and looked up within the same tens of milliseconds
NEWEST_FIRST_AFTER_S = 0.1
PROMPT_S = 0.05
SLICE_S = 5e-3
RETRY_AFTER_S = 1
JSON_GROWTH = 4  # bytes of JSON for each byte of fp32 values


def overloaded(why: str) -> ApiError:
    """Returns a 503 that asks the client to try again."""
    return ApiError(503, ErrorKind.OVERLOADED, f"{why}; try again later, or start more workers")


class Turn:
    """A request's turn: it waits, then holds a slot. since: start of the wait, later of the slot. `start` is
    called with a slot, `refuse` with a 503. is_whole: whether the body is complete; a late one loses the
    slot."""

    def __init__(
        self,
        slots: "Slots",
        start: Callable[[], None],
        refuse: Callable[[ApiError], None],
        is_whole: Callable[[], bool],
    ) -> None:
        self.start, self.refuse, self.is_whole, self.since = start, refuse, is_whole, time.perf_counter()
        self._slots = slots

    def end(self) -> None:
        """Gives the slot back, or stops waiting. Safe to call twice."""
        self._slots.give_back(self)


class WholeTurn:
    """The turn of a complete request while `Slots.is_full` is false."""

    __slots__ = ("_slots", "since")

    def __init__(self, slots: "Slots") -> None:
        self._slots, self.since = slots, 0.0  # it holds its slot, however long it takes
        slots.hold(self)

    def is_whole(self) -> bool:
        return True

    def end(self) -> None:
        self._slots.give_back(self)


class Slots:
    """A worker's slots and the requests that wait for one. Belongs to one event loop."""

    def __init__(self, slots: int, max_waiting: int, max_wait_s: float) -> None:
        self.slots, self._max_waiting, self._max_wait_s = slots, max_waiting, max_wait_s
        self._held: dict[Turn | WholeTurn, None] = {}  # in the order in which they began
        self._waiting: deque[Turn] = deque()  # oldest first
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether a new request has to wait."""
        return len(self._held) >= self.slots

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, turn: Turn) -> None:
        """Begins a turn now or later. It may be over on return."""
        if self.is_full:
            self._take_from_slow()
        if not self.is_full:
            self._held[turn] = None
            turn.start()
            return
        self._waiting.append(turn)
        if len(self._waiting) > self._max_waiting:
            why = f"{self._max_waiting} requests wait for this worker, its limit (max_waiting)"
            self._waiting.popleft().refuse(overloaded(why))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._refuse_late)

    def hold(self, turn: WholeTurn) -> None:
        self._held[turn] = None

    def give_back(self, turn: Turn | WholeTurn) -> None:
        """Ends a turn and begins waiting ones."""
        if turn in self._held:
            del self._held[turn]
            if self._waiting:
                self._begin_next()
        elif isinstance(turn, Turn) and turn in self._waiting:
            self._waiting.remove(turn)

    def _begin_next(self) -> None:
        while self._waiting and not self.is_full:
            now = time.perf_counter()
            is_late = now - self._waiting[0].since > NEWEST_FIRST_AFTER_S
            if (
                is_late
                and now - self._waiting[-1].since > NEWEST_FIRST_AFTER_S
                and 2 * len(self._held) > self.slots
            ):
                return  # a newer one is about to come, and finds a free slot
            turn = self._waiting.pop() if is_late else self._waiting.popleft()
            self._held[turn] = None
            turn.since = now
            turn.start()

    def _take_from_slow(self) -> None:
        """Takes the slots of requests with late bodies; those go on without."""
        now = time.perf_counter()
        for turn in [t for t in self._held if not t.is_whole() and now - t.since > PROMPT_S]:
            del self._held[turn]

    def _refuse_late(self) -> None:
        """Refuses requests that waited too long, frees slow ones' slots, and looks again later."""
        self._timer = None
        self._take_from_slow()
        self._begin_next()
        while self._waiting:
            left = self._waiting[0].since + self._max_wait_s - time.perf_counter()
            if left > 0:
                self._timer = asyncio.get_running_loop().call_later(min(left, PROMPT_S), self._refuse_late)
                return
            self._waiting.popleft().refuse(
                overloaded(f"the request waited {self._max_wait_s:g} s for its turn (max_wait_s)")
            )


class Slices:
    """Shares the event loop's time between requests and sockets. Belongs to one event loop."""

    def __init__(self) -> None:
        self._began: float | None = None  # the slice that runs
        self._taken = 0  # requests of that slice
        self._is_working = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._behind: deque[Callable[[], None]] = deque()

    async def take(self) -> None:
        """Returns in the current slice, or in a later one after sockets were read."""
        if self._waiting or not self._is_on():
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(functools.partial(_wake, mine))
            await mine
        else:
            self._taken += 1

    def run(self, work: Callable[[], None], is_patient: bool = False) -> None:
        """Calls `work`, which raises nothing, now or in a later slice; never inside other work. is_patient:
        behind all others, and one such in each round of the loop."""
        if is_patient:
            self._behind.append(work)
            self._is_on()
        elif self._is_working or self._waiting or not self._is_on():
            self._waiting.append(work)
        else:
            self._work(work)

    def _work(self, work: Callable[[], None]) -> None:
        self._taken += 1
        self._is_working = True
        work()
        self._is_working = False

    def _is_on(self) -> bool:
        """Returns whether the slice still lasts; begins one if none runs."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
            asyncio.get_running_loop().call_soon(self._end)  # in the next round of the loop
        return now - self._began < SLICE_S

    def _end(self) -> None:
        """Gives the next slice to as many waiting requests as this one ran."""
        count, self._taken, self._began = max(1, self._taken), 0, None
        while self._waiting and count and self._is_on():
            self._work(self._waiting.popleft())
            count -= 1
        if self._behind:
            self._is_on()
            self._work(self._behind.popleft())
        if self._waiting or self._behind:
            self._is_on()


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Bytes:
    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0


class Hold:
    """One request's bytes: its body's and response's, until it is sent. model: that it names, once it was
    understood. waits_for_rows: these were not in memory."""

    def __init__(self, total: Bytes) -> None:
        self.model, self.waits_for_rows = "", False
        self._total, self._bytes, self._is_released = total, 0, False

    def grow(self, count: int) -> None:
        """Takes `count` more bytes; nothing after `release`. ApiError 503: over the limit."""
        if self._is_released:
            return
        if self._total.held + count > self._total.limit:
            what = f"requests hold {self._total.held:,} bytes of this worker, this one needs {count:,} more"
            raise overloaded(f"{what}; the limit is {self._total.limit:,} (max_in_flight_bytes)")
        self._total.held += count
        self._bytes += count

    @contextmanager
    def growing(self, count: int) -> Iterator[None]:
        """Takes `count` more bytes for the block. ApiError 503: over the limit."""
        self.grow(count)
        try:
            yield
        finally:
            if not self._is_released:
                self._total.held -= count
                self._bytes -= count

    def release(self) -> None:
        """Gives all bytes back for good. Safe to call twice."""
        self._is_released = True
        self._total.held -= self._bytes
        self._bytes = 0
