"""Settings of a load, and the threads that it takes."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from tableside.loader.errors import ModelError

PIECE_BYTES = 2 << 20  # smaller: more calls; larger: more memory a thread
# (done, in all), from any thread: rows; of a load compared rows, indexed ids, then written rows
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LoadSettings:
    """threads: 0: one per core; max_memory_bytes: limit for private buffers; group: may read the model; only:
    tables to load, others are taken over from the live version (empty: all). clock: gives the time that rows
    are loaded at, in seconds since 1970."""

    threads: int = 0
    max_memory_bytes: int = 64 << 20
    backend: str = "native"
    activate: bool = True
    group: str | None = None
    only: tuple[str, ...] = ()
    clock: Callable[[], float] = time.time


DEFAULTS = LoadSettings()


def threads_of(settings: LoadSettings, each: int) -> int:
    """Returns the threads of a load, of which each takes so many bytes. ModelError: there is none."""
    most = settings.max_memory_bytes
    if most < each:
        raise ModelError(f"max memory is {most:,} bytes; a load of this model needs at least {each:,}")
    return max(1, min(thread_count(settings.threads), most // each))


def thread_count(threads: int) -> int:
    """Returns the threads to take; of 0 one for each core."""
    return threads or len(os.sched_getaffinity(0))
