"""The pool on Ray: actors of a given cluster, or of one that lasts as long as the evaluation.

Each machine reads the data at the same path, and attaches or publishes the model once (`attach_or_publish`).
This process writes the scores.
"""

import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tableside.serving.errors import UNUSABLE, ServingError
from tableside.serving.evaluation.data import Shard
from tableside.serving.evaluation.parts import write_part
from tableside.serving.evaluation.work import Evaluator, Job
from tableside.serving.with_ray import ray

logger = logging.getLogger("tableside")

_TRIES = 3


class _Actor:
    """Makes an `Evaluator` with its first shard, so that errors are answers and do not end the actor."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._evaluator: Evaluator | None = None

    def score(self, shard: Shard) -> Any:
        """Returns (table, None) or (None, error)."""
        try:
            self._evaluator = self._evaluator or Evaluator(self._job)
            return self._evaluator.score(shard), None
        except UNUSABLE as error:
            return None, str(error)


@contextmanager
def _cluster(address: str | None, workers: int) -> Iterator[None]:
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        ray.init(address=address, **quiet)
        try:
            yield
        finally:
            ray.shutdown()
        return
    folder = tempfile.mkdtemp(prefix="tableside-ray-")
    try:
        quiet |= {"include_dashboard": False, "_temp_dir": folder}
        ray.init(num_cpus=workers, object_store_memory=128 << 20, **quiet)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class RayPool:
    """`workers` actors for one job; as `serving.evaluation.pool.Pool`."""

    def __init__(self, job: Job, workers: int, on_done: Callable[[int], None], address: str | None) -> None:
        self._job, self._workers, self._on_done, self._address = job, workers, on_done, address
        self._tries: dict[int, int] = {}

    def run(self, shards: Sequence[Shard]) -> None:
        """Scores every shard. ServingError: the data or a version is at fault, or a shard ends every
        actor."""
        if not shards:
            return
        with _cluster(self._address, self._workers):
            waiting = deque(shards)
            running: dict[Any, tuple[Any, Shard]] = {}
            idle = [self._start() for _ in range(min(self._workers, len(shards)))]
            while waiting or running:
                while idle and waiting:
                    actor, shard = idle.pop(), waiting.popleft()
                    running[actor.score.remote(shard)] = (actor, shard)
                (ready,), _ = ray.wait(list(running), num_returns=1)
                actor, shard = running.pop(ready)
                try:
                    table, error = ray.get(ready)
                except ray.exceptions.RayActorError as died:
                    self._died(shard, died)
                    waiting.appendleft(shard)
                    idle.append(self._start())
                    continue
                if error is not None:
                    raise ServingError(error)
                write_part(self._job, shard, table)
                self._on_done(shard.rows)
                idle.append(actor)

    def _start(self) -> Any:
        threads, devices = self._job.settings.threads, self._job.settings.devices
        # Ray shows an actor its GPU alone, as number 0.
        settings = self._job.settings.model_copy(update={"devices": ("0",) if devices else ()})
        actor = ray.remote(_Actor).options(num_cpus=threads, num_gpus=1 if devices else 0)
        return actor.remote(replace(self._job, settings=settings))

    def _died(self, shard: Shard, died: BaseException) -> None:
        self._tries[shard.number] = self._tries.get(shard.number, 0) + 1
        where = f"{shard.file}, rows from {shard.start}"
        logger.warning("an actor ended over %s; it is replaced", where)
        if self._tries[shard.number] >= _TRIES:
            raise ServingError(f"{_TRIES} actors ended over {where}; is there enough memory?") from died
