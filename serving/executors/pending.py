"""What an executor gives for a request: its answer, or a `Pending` where that comes later."""

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from tableside.serving.model.request import Answer
from tableside.serving.shm.regions import PartlyOnDevice

Found = Answer | Exception  # what was looked up, or why it was not
Done = Callable[[Found], None]


class Pending:
    """A request under way. `then` names who gets its answer or error; or it is awaited. Belongs to one event
    loop."""

    __slots__ = ("_done", "_found", "is_told")

    def __init__(self) -> None:
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
