"""What an evaluation on a GPU does before it is asked for: shards are decoded, and batches begin on the
device."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pyarrow as pa

from tableside.serving.evaluation.batches import Batch, BatchReader, ShardTable
from tableside.serving.evaluation.data import DataError, Shard

if TYPE_CHECKING:
    from tableside.serving.evaluation.on_device import BegunGroup, DeviceScoring


class ShardsAhead:
    """Shards in order, each with its batches. They are taken from `shards`, by a thread, as soon as there are
    any.

    threads: decode them; the caller shuts them down. One thread calls.
    """

    def __init__(self, shards: Iterable[Shard], threads: ThreadPoolExecutor, reader: BatchReader) -> None:
        self._taken: queue.SimpleQueue[tuple[Shard, Future[list[Batch]]] | Exception | None] = (
            queue.SimpleQueue()
        )
        self._next: tuple[Shard, Future[list[Batch]]] | None = None
        self._is_over = False
        threading.Thread(
            target=self._take, args=(shards, threads, reader), name="tableside-shards", daemon=True
        ).start()

    def _take(self, shards: Iterable[Shard], threads: ThreadPoolExecutor, reader: BatchReader) -> None:
        try:
            for shard in shards:
                self._taken.put((shard, threads.submit(lambda s=shard: list(reader.batches(s)))))  # type: ignore[misc]
            self._taken.put(None)
        except (EOFError, OSError, RuntimeError) as error:  # the pool is gone, or this process ends
            self._taken.put(error)

    def get(self, wait: bool) -> tuple[Shard, list[Batch]] | None:
        """The next shard. None: there are no more, or, without `wait`, none that is decoded.

        DataError: its data cannot be read, or does not fit the models. EOFError, OSError: whoever gives
        shards is gone.
        """
        if self._next is None and not self._is_over:
            try:
                taken = self._taken.get(block=wait)
            except queue.Empty:
                return None
            if isinstance(taken, Exception):
                raise taken
            self._next, self._is_over = taken, taken is None
        if self._next is None or not (wait or self._next[1].done()):
            return None
        (shard, batches), self._next = self._next, None
        return shard, batches.result()


class BatchesUnderWay:
    """Groups of batches that have begun on a device, at most `DeviceScoring.ahead`, and the tables that they
    belong to.

    name_fault: is given a shard with rows at fault, before their error is raised; it raises one that says
    more of them.
    """

    def __init__(self, device: "DeviceScoring", name_fault: Callable[[Shard], object]) -> None:
        self._device, self._name_fault = device, name_fault
        self._begun: deque[tuple[Shard, ShardTable, BegunGroup, bool]] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    def begin(
        self, shard: Shard, batches: Iterable[Batch], table: ShardTable
    ) -> Iterator[tuple[Shard, pa.Table]]:
        """Begins a shard's batches; gives the tables that were finished meanwhile."""
        groups = list(self._device.groups(batches))
        for n, group in enumerate(groups):
            self._begun.append((shard, table, self._device.begin(group), n == len(groups) - 1))
            while len(self._begun) > self._device.ahead:
                yield from self.finish_one()

    def finish_one(self) -> Iterator[tuple[Shard, pa.Table]]:
        """Finishes the group that began first; gives its shard's table where it is the last of it."""
        shard, table, begun, is_last = self._begun.popleft()
        try:
            for scored in self._device.finish(begun):
                table.add(scored)
        except DataError:
            self._name_fault(shard)
            raise
        if is_last:
            yield shard, table.finished()

    def finish(self) -> Iterator[tuple[Shard, pa.Table]]:
        """Finishes all of them."""
        while self._begun:
            yield from self.finish_one()
