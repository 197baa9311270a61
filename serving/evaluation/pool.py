"""A pool of processes on this machine: each takes shard after shard; one that dies is replaced, and its shard done again.

They are forked from a process that has imported what they need (multiprocessing's forkserver). Where that one dies they die with
it, and it is started again. Where the pool's own process dies, they end at once.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from tableside.loader.errors import LoaderError
from tableside.quant import QuantError
from tableside.serving.errors import ServingError
from tableside.serving.evaluation.data import Shard
from tableside.serving.evaluation.parts import remove_partials, write_part
from tableside.serving.evaluation.work import Evaluator, Job

logger = logging.getLogger("tableside")

_TRIES = 3  # of a shard, before its data is held to be what kills processes; of a start
_PAUSE_S = 0.5  # before a start is tried again: a process that was killed is there for a moment yet
_START = -1  # in the place of a shard's number
_PR_SET_PDEATHSIG = 1


def _work(job: Job, connection: Connection) -> None:
    """A process of the pool: shards come in, (number of rows, error) go out, until the pool closes its end or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's, which ends this process
    _end_with_the_pool()
    try:
        evaluator = Evaluator(job)
        connection.send((0, None))
        while (shard := connection.recv()) is not None:
            write_part(job, shard, evaluator.score(shard))
            connection.send((shard.rows, None))
    except (LoaderError, QuantError, ServingError, OSError, ValueError, LookupError, RuntimeError) as error:
        with contextlib.suppress(OSError):  # where nobody listens any more
            connection.send((0, str(error) or repr(error)))
    except EOFError:
        return


def _end_with_the_pool() -> None:
    """Ends this process, in the middle of a shard too, when the pool's process or the one that it was forked from is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pool = multiprocessing.parent_process()
    assert pool is not None

    def watch() -> None:
        pool.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="tableside-pool", daemon=True).start()


@contextlib.contextmanager
def _sigint_held() -> Iterator[None]:
    """Holds Ctrl-C back, for this process until the end of the block, for those that it starts for ever: it is the pool's."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Process:
    process: Any
    connection: Connection
    device: str
    shard: Shard | None = None
    is_ready: bool = field(default=False)


class Pool:
    """`workers` processes for one job. on_done(rows): called in this process for each shard that was scored."""

    def __init__(self, job: Job, workers: int, on_done: Callable[[int], None]) -> None:
        self._job, self._workers, self._on_done = job, workers, on_done
        self._context = multiprocessing.get_context("forkserver")
        programs = ["tableside.serving.program"] if job.needs_torch else []
        self._context.set_forkserver_preload(["tableside.serving.evaluation.work", *programs])
        self._tries: dict[int, int] = {}

    def run(self, shards: Sequence[Shard]) -> None:
        """Scores every shard. ServingError: the data or a version is at fault, or a shard ends every process that takes it."""
        waiting = deque(shards)
        running: list[_Process] = []
        try:
            devices = self._job.settings.devices
            for n in range(min(self._workers, len(shards))):
                running.append(self._start(devices[n % len(devices)] if devices else ""))
            while waiting or any(p.shard for p in running):
                for p in running:
                    if p.is_ready and p.shard is None and waiting:
                        p.shard = waiting.popleft()
                        self._send(p)
                for ready in wait([p.connection for p in running]):
                    p = next(p for p in running if p.connection is ready)
                    if not self._receive(p):
                        running.remove(p)
                        if p.shard is not None:
                            waiting.appendleft(p.shard)
                        running.append(self._start(p.device))
            for p in running:
                self._send(p)
        finally:
            for p in running:
                p.connection.close()
                if p.process.is_alive() and (waiting or p.shard):
                    p.process.terminate()
                p.process.join()

    def _start(self, device: str) -> _Process:
        sharing = -(-self._workers // max(1, len(self._job.settings.devices)))
        changed = {"devices": (device,) if device else (), "sharing": sharing}
        job = replace(self._job, settings=self._job.settings.model_copy(update=changed))
        failed: Exception | None = None
        for _ in range(_TRIES):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(job, theirs), name="tableside-eval")
            try:
                with _sigint_held():
                    forkserver.ensure_running()
                process.start()
                return _Process(process, ours, device)
            except (OSError, EOFError) as error:
                failed = error
                ours.close()
                logger.warning("a process of the pool did not start (%s)", error)
                time.sleep(_PAUSE_S)
            finally:
                theirs.close()
        raise ServingError(
            f"a process of the pool did not start, {_TRIES} times over (the last time: {failed}); is there enough memory, and is "
            f"the folder of temporary files, TMPDIR ({tempfile.gettempdir()}), writable and its name shorter than 75 bytes?"
        ) from failed

    def _send(self, p: _Process) -> None:
        try:
            p.connection.send(p.shard)
        except OSError:
            logger.debug("process %s ended before it took a shard", p.process.pid)  # `_receive` sees it too

    def _receive(self, p: _Process) -> bool:
        """Takes what a process says; False: it died. ServingError: it could not go on."""
        try:
            rows, error = p.connection.recv()
        except (EOFError, OSError):
            p.process.join()
            remove_partials(self._job.parts, p.process.pid)
            self._died(p)
            return False
        if error is not None:
            raise ServingError(error)
        if p.shard is not None:
            self._on_done(rows)
            p.shard = None
        elif not p.is_ready:
            self._tries.pop(_START, None)
        p.is_ready = True
        return True

    def _died(self, p: _Process) -> None:
        number = _START if p.shard is None else p.shard.number
        self._tries[number] = self._tries.get(number, 0) + 1
        what = "before it was ready" if p.shard is None else f"over {p.shard.file}, rows from {p.shard.start}"
        logger.warning("process %s ended with %s %s; it is replaced", p.process.pid, p.process.exitcode, what)
        if self._tries[number] >= _TRIES:
            raise ServingError(
                f"{_TRIES} processes ended {what} (the last with exit code {p.process.exitcode}); is there enough memory?"
            )
