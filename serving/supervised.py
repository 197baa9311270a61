"""What a process does for the supervisor that started it: it says whether it takes requests, and ends when that one is gone."""

import os
import pickle
import signal
import threading
from multiprocessing.connection import Connection
from typing import Protocol


class Supervised(Protocol):
    """What runs in the process. started: it takes requests. is_ending: it was asked to end."""

    started: bool
    is_ending: bool


def answer(process: Supervised, pipe: Connection) -> None:
    """Answers the supervisor's questions from now on, on a thread of its own."""
    threading.Thread(target=_answer, args=(process, pipe), daemon=True).start()


def _answer(process: Supervised, pipe: Connection) -> None:
    try:
        while True:
            pipe.recv()
            pipe.send(process.started)
    except (EOFError, OSError, pickle.UnpicklingError):
        # The pipe is closed where the supervisor asked for the end, which is then under way, or where it died.
        if not process.is_ending:
            os.kill(os.getpid(), signal.SIGTERM)
