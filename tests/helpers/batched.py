"""A batcher whose requests wait for futures of the event loop."""

import asyncio
import contextlib
from typing import Any

from tableside.serving.executors.batching import Asked, Batcher, Told
from tableside.serving.model.request import Answer


def batcher_of(backend: Any, max_batch: int) -> Batcher:
    return Batcher(backend, max_batch, max_wait_s=600.0, tell=_tell)


async def run_in(batcher: Batcher, request: Any, inputs: Any) -> Answer:
    """What a request gets, in some batch."""
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    batcher.submit_all([Asked(request, inputs, future)])
    return await future


def _tell(told: Told) -> None:
    for future, result in told:
        assert isinstance(future, asyncio.Future)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            future.get_loop().call_soon_threadsafe(_settle, future, result)


def _settle(future: "asyncio.Future[Any]", result: Any) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
