"""A supervised process: it reports readiness, ends with its supervisor, and takes no signals while it
starts."""

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Protocol

_OF_GROUPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_kept_off(*which: signal.Signals) -> Iterator[None]:
    """Blocks signals (none named: those of process groups) in processes started in the block, for good, and
    delays this process's."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, which or _OF_GROUPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_signals() -> None:
    """Unblocks a forked process's signals, except SIGINT and SIGHUP, which the supervisor handles."""
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUPS)


class SupervisedProcess(Protocol):
    """The child's side. started: it takes requests. is_ending: it was asked to end."""

    started: bool
    is_ending: bool


def answer(process: SupervisedProcess, pipe: Connection) -> None:
    """Answers the supervisor's questions from now on, on a thread of its own."""
    threading.Thread(target=_answer, args=(process, pipe), daemon=True).start()


def _answer(process: SupervisedProcess, pipe: Connection) -> None:
    try:
        while True:
            pipe.recv()
            pipe.send(process.started)
    except (EOFError, OSError, pickle.UnpicklingError):
        # The pipe is closed where the supervisor asked for the end, which is then under way, or where it
        # died.
        if not process.is_ending:
            os.kill(os.getpid(), signal.SIGTERM)
