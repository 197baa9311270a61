"""Where the time of an evaluation on a GPU goes: what its process's thread that scores does, or waits for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

READING = "reading"  # waiting for rows that are not decoded yet
STAGING = "staging"  # copying batches to page-locked memory, and having them sent
SCORING = "scoring"  # launching lookups and scorers, and waiting for scores
WRITING = "writing"  # waiting for the part before to be written


class Spent:
    """Seconds of one thread by stage, added up."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((READING, STAGING, SCORING, WRITING), 0.0)

    @contextmanager
    def on(self, stage: str) -> Iterator[None]:
        """Counts what is done in the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started
