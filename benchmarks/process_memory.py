"""What processes take together that hold the same: their memory by PSS, in which shared pages count once."""

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tableside.loader.segment.memory import pss_bytes


def memory_together(
    make: Callable[..., object],
    arguments: tuple[Any, ...],
    processes: int,
    measure: Callable[[], dict[str, int]] = pss_bytes,
) -> list[dict[str, int]]:
    """Memory of so many new processes, as `measure` of each says, while all of them hold what
    `make(*arguments)` gave there.

    The processes are spawned, so `make` and `measure` are functions that can be imported. RuntimeError: one
    ended before it was measured.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(processes)]
    started = [
        context.Process(target=_hold, args=(make, arguments, measure, theirs), daemon=True)
        for _, theirs in pipes
    ]
    try:
        for process, (_, theirs) in zip(started, pipes, strict=True):
            process.start()
            theirs.close()
        for ours, _ in pipes:
            ours.recv()  # it holds it
        for ours, _ in pipes:
            ours.send(None)
        return [ours.recv() for ours, _ in pipes]
    except (EOFError, ConnectionError):
        raise RuntimeError(
            f"a process of {make.__name__} ended before its memory was measured; it wrote why"
        ) from None
    finally:
        for ours, _ in pipes:
            ours.close()  # which ends those that wait
        for process in started:
            if process.pid is not None:
                process.join()


def _hold(
    make: Callable[..., object],
    arguments: tuple[Any, ...],
    measure: Callable[[], dict[str, int]],
    pipe: Connection,
) -> None:
    held = make(*arguments)
    with suppress(EOFError, ConnectionError):  # another one ended, and nobody is measured
        pipe.send(None)
        pipe.recv()
        pipe.send(measure())
        pipe.recv()
    del held
