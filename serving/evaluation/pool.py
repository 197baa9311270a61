"""A pool of processes on this machine, each scoring shard after shard. A dead one is replaced, its shards
repeated.

A GPU's process has several shards at a time: it decodes the next ones and writes on its own thread. Processes
are forked from one with all imports (multiprocessing's forkserver); they die with it, and end with the pool.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tableside.serving.errors import UNUSABLE, ServingError
from tableside.serving.evaluation.batches import WRITING, Spent
from tableside.serving.evaluation.data import Shard
from tableside.serving.evaluation.parts import remove_partials, write_part
from tableside.serving.evaluation.work import Evaluator, Job, shards_at_once
from tableside.serving.kept_memory import keep_freed_memory
from tableside.serving.model.scorers import TORCH_MODULES
from tableside.serving.supervised import signals_kept_off

logger = logging.getLogger("tableside")

_TRIES = 3  # of a shard, before its data is held to be what kills processes; of a start
_PAUSE_S = 0.5  # before a start is tried again: a process that was killed is there for a moment yet
_START = -1  # in the place of a shard's number
_PR_SET_PDEATHSIG = 1
_SWITCH_S = (
    1e-4  # after which the thread that scores gets Python's lock from those that decode; 5 ms by default
)


class _WorkerReport(NamedTuple):
    """A message of a process: ready, rows written, or an error. spent: seconds by stage on a GPU."""

    rows: int = 0
    error: str | None = None
    spent: dict[str, float] | None = None


def _work(job: Job, connection: Connection) -> None:
    """Runs a process of the pool: takes shards, sends `_WorkerReport`s, until the pool closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's, which ends this process
    _end_with_the_pool()
    try:
        if job.settings.devices:
            keep_freed_memory()  # several threads make buffers of some MB for each batch
            sys.setswitchinterval(_SWITCH_S)
        evaluator = Evaluator(job)
        connection.send(_WorkerReport())
        with _Writer(job, connection, evaluator.spent) as writer:
            for shard, table in evaluator.tables(iter(connection.recv, None)):
                writer.write(shard, table)
    except (*UNUSABLE, ValueError, LookupError, RuntimeError) as error:
        with contextlib.suppress(OSError):  # where nobody listens any more
            connection.send(_WorkerReport(error=str(error) or repr(error)))
    except EOFError:
        return


class _Writer:
    """Writes the tables of shards in turn and tells the pool; on a GPU by its own thread."""

    def __init__(self, job: Job, connection: Connection, spent: Spent | None) -> None:
        self._job, self._connection, self._spent = job, connection, spent
        self._thread = None if spent is None else ThreadPoolExecutor(1, "tableside-write")
        self._last: Future[None] | None = None

    def write(self, shard: Shard, table: Any) -> None:
        """ServingError, OSError: it, or the one before it, could not be written."""
        if self._thread is None or self._spent is None:
            self._write(shard, table)
            return
        with self._spent.on(WRITING):
            self._wait()
        self._last = self._thread.submit(self._write, shard, table)

    def _write(self, shard: Shard, table: Any) -> None:
        write_part(self._job, shard, table)
        self._connection.send(
            _WorkerReport(shard.rows, spent=None if self._spent is None else dict(self._spent.seconds))
        )

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: object, *details: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if kind is None:
            self._wait()


def _end_with_the_pool() -> None:
    """Ends this process at once when the pool's process or its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pool = multiprocessing.parent_process()
    assert pool is not None

    def watch() -> None:
        pool.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="tableside-pool", daemon=True).start()


@dataclass
class _Process:
    process: Any
    connection: Connection
    device: str
    # that it has not answered, in the order in which it got them
    shards: deque[Shard] = field(default_factory=deque)
    is_ready: bool = field(default=False)
    spent: dict[str, float] = field(default_factory=dict)  # as it last told


class EvaluationPool:
    """`workers` processes for one job. on_done(rows): called here for each scored shard. spent: seconds by
    stage on GPUs, after `run`."""

    def __init__(self, job: Job, workers: int, on_done: Callable[[int], None]) -> None:
        self._job, self._workers, self._on_done = job, workers, on_done
        self._context = multiprocessing.get_context("forkserver")
        programs = TORCH_MODULES if job.needs_torch else ()
        self._context.set_forkserver_preload(["tableside.serving.evaluation.work", *programs])
        self._tries: dict[int, int] = {}
        self.spent = Spent().seconds
        self._at_once = shards_at_once(job.settings.model_copy(update={"workers": workers}))

    def run(self, shards: Sequence[Shard]) -> None:
        """Scores every shard. ServingError: the data or a version is at fault, or a shard ends every
        process."""
        waiting = deque(shards)
        running: list[_Process] = []
        try:
            devices = self._job.settings.devices
            for n in range(min(self._workers, len(shards))):
                running.append(self._start(devices[n % len(devices)] if devices else ""))
            while waiting or any(p.shards for p in running):
                for p in running:
                    while p.is_ready and len(p.shards) < self._at_once and waiting:
                        p.shards.append(waiting.popleft())
                        self._send(p, p.shards[-1])
                for ready in wait([p.connection for p in running]):
                    p = next(p for p in running if p.connection is ready)
                    if not self._receive(p):
                        running.remove(p)
                        waiting.extendleft(reversed(p.shards))
                        running.append(self._start(p.device))
            for p in running:
                self._send(p, None)
        finally:
            for p in running:
                p.connection.close()
                if p.process.is_alive() and (waiting or p.shards):
                    p.process.terminate()
                p.process.join()

    def _start(self, device: str) -> _Process:
        sharing = -(-self._workers // max(1, len(self._job.settings.devices)))
        changed = {"devices": (device,) if device else (), "sharing": sharing}
        changed |= {"workers": self._workers, "engines": self._workers}
        job = replace(self._job, settings=self._job.settings.model_copy(update=changed))
        failed: Exception | None = None
        for _ in range(_TRIES):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(job, theirs), name="tableside-eval")
            try:
                with signals_kept_off(signal.SIGINT):
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
            f"a process of the pool did not start, {_TRIES} times over (the last time: {failed}); is there "
            f"enough memory, and is the folder of temporary files, TMPDIR ({tempfile.gettempdir()}), "
            "writable and its name shorter than 75 bytes?"
        ) from failed

    def _send(self, p: _Process, shard: Shard | None) -> None:
        try:
            p.connection.send(shard)
        except OSError:
            logger.debug("process %s ended before it took a shard", p.process.pid)  # `_receive` sees it too

    def _receive(self, p: _Process) -> bool:
        """Takes a process's message; False: it died. ServingError: it failed."""
        try:
            rows, error, spent = p.connection.recv()
        except (EOFError, OSError):
            p.process.join()
            remove_partials(self._job.parts, p.process.pid)
            self._died(p)
            return False
        if error is not None:
            raise ServingError(error)
        for stage, seconds in (spent or {}).items():
            self.spent[stage] += seconds - p.spent.get(stage, 0.0)
        p.spent = spent or {}
        if p.shards:
            self._on_done(rows)
            p.shards.popleft()
        elif not p.is_ready:
            self._tries.pop(_START, None)
        p.is_ready = True
        return True

    def _died(self, p: _Process) -> None:
        first = p.shards[0] if p.shards else None
        number = _START if first is None else first.number
        self._tries[number] = self._tries.get(number, 0) + 1
        what = "before it was ready" if first is None else f"over {first.file}, rows from {first.start}"
        logger.warning("process %s ended with %s %s; it is replaced", p.process.pid, p.process.exitcode, what)
        if self._tries[number] >= _TRIES:
            raise ServingError(
                f"{_TRIES} processes ended {what} (the last with exit code {p.process.exitcode}); is there "
                "enough memory?"
            )
