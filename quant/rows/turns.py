"""Turns of threads that read rows: one of them runs Python at a time, while the others wait for rows. Python
runs one thread at a time anyway, and any that is ready may be the next one: with many readers an event loop
would hardly come to run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Held(threading.local):
    lock: Any = None  # a threading.Lock


_held = _Held()


@contextmanager
def turn(lock: Any) -> Iterator[None]:
    """Holds a threading.Lock, but for the time of `waiting`. Not within another turn."""
    assert _held.lock is None, "a thread has one turn"
    with lock:
        _held.lock = lock
        try:
            yield
        finally:
            _held.lock = None


class waiting:  # a generator would take three times as long
    """Has others take this thread's turn meanwhile, if it has one."""

    __slots__ = ("_lock",)

    def __enter__(self) -> None:
        self._lock = _held.lock
        if self._lock is not None:
            self._lock.release()

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.acquire()
