"""Two threads for batches, in order: one starts a batch on the device, the other waits for its results. So a
batch is staged while the device works and earlier answers go out."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class BatchThreads:
    """Calls start(batch) for each batch of `take` on the first thread, then wait(batch, started) and
    done(batch, result or Exception) on the second. take: blocks; None ends. A batch that fails to start is
    done in its turn."""

    def __init__(
        self,
        take: Callable[[], Any],
        start: Callable[[Any], Any],
        wait: Callable[[Any, Any], Any],
        done: Callable[[Any, Any], None],
        name: str,
    ) -> None:
        self._take, self._start, self._wait, self._done = take, start, wait, done
        self._started: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{what}", daemon=True)
            for work, what in ((self._start_all, "start"), (self._wait_for_all, "wait"))
        ]
        self._is_begun = False

    def begin(self) -> None:
        """Starts the threads. RuntimeError: no room for threads."""
        if not self._is_begun:
            for thread in self._threads:
                if thread.ident is None:
                    thread.start()
            self._is_begun = True

    def join(self) -> None:
        """Waits until `take` ended and all batches are done."""
        if self._is_begun:
            for thread in self._threads:
                thread.join()

    def _start_all(self) -> None:
        while (batch := self._take()) is not None:
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
