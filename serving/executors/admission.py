"""What a worker takes on: how many requests it works on at once, and how many bytes they may hold.

A worker that is asked for more than it can do should answer as many requests as it can, each soon, and refuse
the rest at little cost.

*Slots.* A worker works on at most `slots` requests at once, from the first byte of a body to the response
handed over. A request beyond that waits after its headers. Its body stays unread in the kernel, where it
costs nothing. Waiting requests get slots in order while the oldest has waited for less than
`NEWEST_FIRST_AFTER_S`. From then on the newest comes first: the clients of those that have waited longest are
the likeliest to have given up. A request that has waited `max_wait_s` is refused with a 503 and Retry-After,
and so is the oldest one where more than `max_waiting` wait. A client that waits for its refusal sends nothing
new meanwhile, so a late refusal is cheaper than one at once. A request whose body comes too slowly gives its
slot back (`PROMPT_S`), so that slow clients make no other request wait.

*Slices.* The event loop works on requests for `SLICE_S` at a time and reads its sockets in between. So a
health check or a new connection waits for one slice, not for all requests that hold a slot.

*Bytes.* A request holds its body from the first byte received, and its response until the last byte is sent
(`Hold`). A request is refused where all requests of the worker together would hold more than
`max_in_flight_bytes` with it.
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
    """503: this worker does not take the request on now. The error tells the client to try again."""
    return ApiError(503, ErrorKind.OVERLOADED, f"{why}; try again later, or start more workers")


class Turn:
    """A request's turn: it waits, then holds a slot, until it is over. since: when it began to wait or,
    later, got its slot.

    `start` is called when it has a slot, `refuse`, with a 503, where it gets none. is_whole: says whether the
    request's body is here; one whose body is late loses its slot to others.
    """

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
        """Gives the slot back, or stops waiting for one. Safe to call twice."""
        self._slots.give_back(self)


class WholeTurn:
    """The turn of a request that is whole and finds a slot at once. `Slots.is_full` says whether it does."""

    __slots__ = ("_slots", "since")

    def __init__(self, slots: "Slots") -> None:
        self._slots, self.since = slots, 0.0  # it holds its slot, however long it takes
        slots.hold(self)

    def is_whole(self) -> bool:
        """As of `Turn`."""
        return True

    def end(self) -> None:
        """Gives the slot back. Safe to call twice."""
        self._slots.give_back(self)


class Slots:
    """The slots of a worker, and the requests that wait for one. Belongs to one event loop."""

    def __init__(self, slots: int, max_waiting: int, max_wait_s: float) -> None:
        self.slots, self._max_waiting, self._max_wait_s = slots, max_waiting, max_wait_s
        self._held: dict[Turn | WholeTurn, None] = {}  # in the order in which they began
        self._waiting: deque[Turn] = deque()  # oldest first
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether a request that comes now has to wait."""
        return len(self._held) >= self.slots

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    def enter(self, turn: Turn) -> None:
        """Begins a turn now, where there is a slot, or later. The request may be over, and its turn too,
        when this returns."""
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
        """Begins a turn that has a slot."""
        self._held[turn] = None

    def give_back(self, turn: Turn | WholeTurn) -> None:
        """Ends a turn; begins those of waiting requests that find a slot now."""
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
        """Takes the slots of requests whose bodies should be here by now. Those requests go on without a
        slot."""
        now = time.perf_counter()
        for turn in [t for t in self._held if not t.is_whole() and now - t.since > PROMPT_S]:
            del self._held[turn]

    def _refuse_late(self) -> None:
        """Refuses requests that waited for too long, gives slots of slow ones to others, and looks again
        later."""
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
    """Shares the event loop's time between requests and sockets, slice by slice. Belongs to one event
    loop."""

    def __init__(self) -> None:
        self._began: float | None = None  # the slice that runs
        self._taken = 0  # requests of that slice
        self._is_working = False
        self._waiting: deque[Callable[[], None]] = deque()

    async def take(self) -> None:
        """Returns while the current slice lasts, or in a later one, after the sockets were read."""
        if self._waiting or not self._is_on():
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(functools.partial(_wake, mine))
            await mine
        else:
            self._taken += 1

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work`, which raises nothing, now or in a later slice. Work that another work asks for
        waits for that one."""
        if self._is_working or self._waiting or not self._is_on():
            self._waiting.append(work)
        else:
            self._work(work)

    def _work(self, work: Callable[[], None]) -> None:
        self._taken += 1
        self._is_working = True
        work()
        self._is_working = False

    def _is_on(self) -> bool:
        """Whether a slice runs that is not over; one begins where none runs."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
            asyncio.get_running_loop().call_soon(self._end)  # in the next round of the loop
        return now - self._began < SLICE_S

    def _end(self) -> None:
        """Gives the next slice to as many waiting requests as ran in this one."""
        count, self._taken, self._began = max(1, self._taken), 0, None
        while self._waiting and count and self._is_on():
            self._work(self._waiting.popleft())
            count -= 1
        if self._waiting:
            self._is_on()


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Bytes:
    """The bytes that all requests of a worker hold together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0

    @contextmanager
    def holding(self) -> Iterator["Hold"]:
        """A `Hold` for the length of a block, for a request whose connection has none."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            hold.release()


class Hold:
    """The bytes of one request: they grow with its body and by its response, and are released when the
    response is sent."""

    def __init__(self, total: Bytes) -> None:
        self._total, self._bytes, self._is_released = total, 0, False

    def grow(self, count: int) -> None:
        """Takes `count` more bytes; takes nothing once it was released, as the connection is gone then.

        ApiError 503: all requests together would hold too many. Nothing is taken.
        """
        if self._is_released:
            return
        if self._total.held + count > self._total.limit:
            raise overloaded(
                f"requests hold {self._total.held:,} bytes of this worker, this one needs {count:,} more; "
                "the limit is "
                f"{self._total.limit:,} (max_in_flight_bytes)"
            )
        self._total.held += count
        self._bytes += count

    @contextmanager
    def growing(self, count: int) -> Iterator[None]:
        """Takes `count` more bytes for the length of a block. ApiError 503: as of `grow`."""
        self.grow(count)
        try:
            yield
        finally:
            if not self._is_released:
                self._total.held -= count
                self._bytes -= count

    def release(self) -> None:
        """Gives all bytes back, for good. Safe to call twice."""
        self._is_released = True
        self._total.held -= self._bytes
        self._bytes = 0
