"""Merges of deltas beside a follower: both deltas of a state become one while batches are applied over them.

A merge writes every row of both deltas again, which would keep a batch that waits for it from being visible. So a thread writes
the merged delta to a file that no state names, and the entries of the batches that come meanwhile are kept in memory. The first
batch after the merge is written as a delta of these entries over the merged one, and the record flips to it: the merged delta is
published with that batch, under a sequence of its own.

What another process does to the model makes a merge void: it is dropped, and a later batch begins the next one. The file belongs
to a process that holds its lock; `loader.states.clear_unpublished` removes one that nobody holds.
"""

import fcntl
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType

from tableside.loader.delta_writer import Entries, merge, own_entries, write_unsealed
from tableside.loader.folder import Folder
from tableside.loader.header import Change
from tableside.loader.segment import Segment, SegmentWriter
from tableside.loader.states import UNPUBLISHED, State
from tableside.loader.versions import Model

_NICE = 10  # of the thread, so that a batch and the servers beside it come first
Tables = Mapping[str, list[Entries]]


@dataclass(frozen=True, eq=False)
class UnpublishedDelta:
    """A merged delta without its header. file: its name in the model's folder. entries: ids that it has. since: name of a table
    -> what was applied to it after the state that was merged."""

    file: str
    writer: SegmentWriter
    change: Change
    entries: int
    since: dict[str, list[Entries]]

    def seal(self, sequence: int) -> None:
        """Writes the header of a whole delta, with this sequence."""
        self.writer.header = replace(self.writer.header, delta=replace(self.change, sequence=sequence))
        self.writer.seal({})

    def drop(self, folder: Folder) -> None:
        """Removes its file."""
        folder.unlink(self.file)
        self.writer.close()


class Merges:
    """The merges of one process over one model, one at a time. Its methods are called by who holds the apply lock, but for
    `close`. threads: as in `ApplySettings`."""

    def __init__(self, model: Model, threads: int = 0) -> None:
        self._model, self._threads = model, threads
        self._pool = ThreadPoolExecutor(1, "tableside-merge", _yield_to_others)
        self._running: Future[UnpublishedDelta] | None = None
        self._live: State | None = None  # that the merge leads to with `_since`; None: what runs is void
        self._since: dict[str, list[Entries]] = {}

    def begin(self, folder: Folder, state: State, segment: Segment) -> None:
        """Begins to merge both deltas of the live state, unless another merge still runs."""
        if self.is_running():
            return
        file = f"{state}{UNPUBLISHED}"
        fd = folder.create(file)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is new, so nobody else has it
        self._live, self._since = state, {}
        self._running = self._pool.submit(self._merge, file, fd, segment)

    def applied(self, before: State, after: State, tables: Tables) -> None:
        """A batch made another state of the live one."""
        if self._live != before:
            self._live = None
            return
        self._live = after
        for name, entries in tables.items():
            self._since.setdefault(name, []).extend(entries)

    def is_running(self) -> bool:
        """Whether a merge has begun that no batch has published or dropped yet."""
        return self._running is not None

    def has_ended(self) -> bool:
        """Whether such a merge waits for the next batch."""
        return self._running is not None and self._running.done()

    def finished(self, folder: Folder, live: State) -> UnpublishedDelta | None:
        """The merge that has ended and leads to the live state, which the caller publishes or drops; None: there is none.

        Raises what the merge raised: NoSpace, SegmentError.
        """
        if self._running is None or not self._running.done():
            return None
        running, self._running = self._running, None
        delta = running.result()
        if live != self._live or not folder.exists(delta.file):
            delta.drop(folder)
            return None
        return replace(delta, since=self._since)

    def _merge(self, file: str, fd: int, segment: Segment) -> UnpublishedDelta:
        """An error leaves a file that nobody holds."""
        header, parts = segment.header, dict[str, list[Entries]]()
        try:
            for name, entries in own_entries(segment.deltas):
                parts.setdefault(name, []).extend(entries)
            tables = {name: merge(segment.base.tables[name], of_it, self._threads) for name, of_it in parts.items()}
        except BaseException:
            os.close(fd)
            raise
        change = replace(segment.deltas[0].change, below=0, changed=0)
        keys = {t.name: t.key for t in header.tables}
        writer = write_unsealed(self._model.folder / file, fd, header.model, header.version, change, tables, keys)
        return UnpublishedDelta(file, writer, change, sum(int(t.rows.size) for t in tables.values()), {})

    def close(self) -> None:
        """Waits for the merge that runs, and drops it."""
        self._pool.shutdown()
        if self._running is not None and self._running.exception() is None:
            with self._model.opened() as folder:
                self._running.result().drop(folder)
        self._running = None

    def __enter__(self) -> "Merges":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
