"""Threads on which requests wait for rows that are not in memory."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tableside.quant.rows.turns import turn
from tableside.serving.executors.admission import overloaded

READERS = 32  # threads of a process
MOST_READING = 48  # that wait, or run: the others' slots are for requests that need not

_Result = TypeVar("_Result")


class Readers:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="tableside-rows")
        self._reading, self._lock = 0, threading.Lock()

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Calls what may wait. ApiError: MOST_READING do so already."""
        if self._reading >= MOST_READING:
            raise overloaded(f"{MOST_READING} requests wait for rows, the limit")
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, work)
        finally:
            self._reading -= 1

    def _call(self, work: Callable[[], _Result]) -> _Result:
        with turn(self._lock):
            return work()

    def close(self) -> None:
        """Waits for nobody: the process's end does not hang with a disk."""
        self._threads.shutdown(wait=False)
