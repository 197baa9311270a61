"""The two threads that batches go through, in order: one starts a batch on the device, the other waits for its results.

So a batch is staged and sent while the device works on the one before it, and answers of the one before that go out.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any


class BatchThreads:
    """Calls `start` with each batch, then `wait` with what it returned, then `done` with what that returned, or an Exception.

    start: on the first thread; wait and done: on the second. A batch that could not be started is not waited for; it is done in
    its turn. The threads begin with the first batch.
    """

    def __init__(
        self, start: Callable[[Any], Any], wait: Callable[[Any, Any], Any], done: Callable[[Any, Any], None], name: str
    ) -> None:
        self._start, self._wait, self._done = start, wait, done
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{what}", daemon=True)
            for work, what in ((self._start_all, "start"), (self._wait_for_all, "wait"))
        ]
        self._is_begun = self._is_closed = False

    def put(self, batch: Any) -> None:
        """Has a batch run. RuntimeError: it was closed."""
        if self._is_closed:
            raise RuntimeError("no batch runs any more: this worker is closing")
        if not self._is_begun:
            self._is_begun = True
            for thread in self._threads:
                thread.start()
        self._asked.put(batch)

    def close(self) -> None:
        """Takes no more batches, and waits until those that were put are done."""
        self._is_closed = True
        if self._is_begun:
            self._asked.put(None)
            for thread in self._threads:
                thread.join()

    def _start_all(self) -> None:
        while (batch := self._asked.get()) is not None:
            try:
                started, error = self._start(batch), None
            except Exception as raised:  # noqa: BLE001  # it is told in the batch's turn
                started, error = None, raised
            self._started.put((batch, started, error))
            del batch, started, error  # which would live until the next batch comes
        self._started.put(None)

    def _wait_for_all(self) -> None:
        while (taken := self._started.get()) is not None:
            batch, started, error = taken
            try:
                found = error or self._wait(batch, started)
            except Exception as raised:  # noqa: BLE001  # it is told as the batch's result
                found = raised
            self._done(batch, found)
            del taken, batch, started, error, found  # which would live until the next batch comes
