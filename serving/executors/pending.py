"""What an executor gives for a request: its answer, or a `Pending` where that comes later. Threads on which
requests wait for rows that are not in memory."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tableside.quant.rows.turns import turn
from tableside.serving.executors.admission import overloaded
from tableside.serving.model.request import Answer
from tableside.serving.shm.regions import PartlyOnDevice

Found = Answer | Exception  # what was looked up, or why it was not
Done = Callable[[Found], None]


class Pending:
    """A request under way. `then` names who gets its answer or error; or it is awaited. Belongs to one event
    loop."""

    __slots__ = ("_done", "_found", "is_told", "waits_for_rows")

    def __init__(self, waits_for_rows: bool = False) -> None:
        self.waits_for_rows = waits_for_rows
        self._done: Done | None = None
        self._found: Found | None = None
        self.is_told = False

    def then(self, done: Done) -> None:
        """Calls `done` with the answer or error, at once if it is there."""
        if self._found is None:
            self._done = done
        else:
            done(self._found)

    def tell(self, found: Found) -> None:
        """Passes the answer or error on; the first one counts."""
        if self.is_told:
            return
        self.is_told = True
        if self._done is None:
            self._found = found
        else:
            self._done(found)

    def __await__(self) -> Generator[Any, None, Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.then(partial(settle, answer))
        return answer.__await__()


async def answer_of(begun: Answer | Pending) -> Answer:
    """Returns the answer once it is there. ApiError: the request was refused."""
    return await begun if isinstance(begun, Pending) else begun


def settle(future: "asyncio.Future[Any]", found: Any) -> None:
    """Gives a result, or an exception, to who waits; unless that one has left."""
    if future.done():
        return
    if isinstance(found, Exception):
        future.set_exception(found)
    else:
        future.set_result(found)


def kept(inputs: Any) -> Any:
    """Returns inputs that stay when the connection's buffer is used again."""
    if isinstance(inputs, PartlyOnDevice):
        return inputs._replace(inputs=kept(inputs.inputs))
    is_lent = isinstance(inputs, memoryview) and not isinstance(inputs.obj, bytes)
    return bytes(inputs) if is_lent else inputs


READERS = 32  # threads of a process
MOST_READING = 48  # that wait, or run: the others' slots are for requests that need not

_Result = TypeVar("_Result")
_Tell = Callable[[Any], None]  # is told a result, or the exception instead


class Readers:
    """Belongs to one event loop. What the threads did is taken one by one between looks at connections, so
    that many that come at once do not keep a request waiting that needs none of them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="tableside-rows")
        self._reading, self._lock = 0, threading.Lock()
        self._ended: deque[tuple[_Tell, Future[Any]]] = deque()
        self._is_taking = False  # of the event loop

    def begin(self, work: Callable[[], Any]) -> Pending:
        """Has a thread call what may wait. ApiError: MOST_READING do so already."""
        if self._reading >= MOST_READING:
            raise overloaded(f"{MOST_READING} requests wait for rows, the limit")
        self._reading += 1
        pending = Pending(waits_for_rows=True)

        def end(found: Any) -> None:
            self._reading -= 1
            pending.tell(found)

        self._submit(work, end)
        return pending

    async def run(self, work: Callable[[], Any]) -> Any:
        """As `begin`; returns the result."""
        return await self.begin(work)

    def submit(self, work: Callable[[], _Result]) -> "asyncio.Future[_Result]":
        """Has a thread call what may wait. RuntimeError: these are closed."""
        answer: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._submit(work, partial(settle, answer))
        return answer

    def _submit(self, work: Callable[[], Any], tell: _Tell) -> None:
        loop = asyncio.get_running_loop()

        def end(running: Future[Any]) -> None:
            self._ended.append((tell, running))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._wake, loop)

        self._threads.submit(self._call, work).add_done_callback(end)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_taking:
            self._take(loop)

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        ended = self._ended.popleft() if self._ended else None
        if self._ended:
            loop.call_soon(self._take, loop)
        self._is_taking = bool(self._ended)
        if ended is not None:
            tell, running = ended
            is_late = running.cancelled()
            tell(overloaded("this worker ends") if is_late else running.exception() or running.result())

    def _call(self, work: Callable[[], _Result]) -> _Result:
        with turn(self._lock):
            return work()

    def close(self) -> None:
        """Waits for nobody: the process's end does not hang with a disk. What did not begin is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
