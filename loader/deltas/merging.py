"""Merges the two deltas of a state on a thread, while batches are applied over them.

The merged delta goes to a file that no state names. The next batch is written as a delta over it, and one
flip publishes both. That batch's delta takes the entries of the newest live delta that differ from the merged
ones. The merge is dropped if the older delta was replaced or an id is missing in the newer one, since the
live state does not follow from the merged one then.

The process holds a lock on the file; `loader.versions.states.clear_unpublished` removes files without one.
"""

import fcntl
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from tableside.loader.segment.delta_writer import (
    DeltaEntries,
    delta_entries,
    merge,
    own_entries,
    write_unsealed,
)
from tableside.loader.segment.header import Change
from tableside.loader.segment.segment import Segment, give_way
from tableside.loader.segment.stored import Times, times_of
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.folder import Folder
from tableside.loader.versions.states import UNPUBLISHED, State
from tableside.loader.versions.versions import Model
from tableside.quant.cpu.index_builder import find_rows
from tableside.quant.rows.ids import bits_at
from tableside.quant.rows.overlay import OverlayLayer

_NICE = 5  # of the thread, so that a batch and the servers beside it come first
_BLOCK_ROWS = 1 << 14  # that are compared at once


@dataclass(frozen=True, eq=False)
class UnpublishedDelta:
    """A merged delta without header. file: its name; change: of the merged state; entries: its ids."""

    file: str
    writer: SegmentWriter
    change: Change
    entries: int

    def seal(self, sequence: int) -> None:
        """Writes the header with this sequence."""
        self.writer.header = replace(self.writer.header, delta=replace(self.change, sequence=sequence))
        self.writer.seal({})

    def drop(self, folder: Folder) -> None:
        folder.unlink(self.file)
        self.writer.close()


class Merges:
    """The merges of one process over one model, one at a time. Call `begin` and `finished` under the apply
    lock."""

    def __init__(self, model: Model, threads: int = 0) -> None:
        self._model, self._threads = model, threads
        self._pool = ThreadPoolExecutor(1, "tableside-merge", give_way, (_NICE,))
        self._running: Future[UnpublishedDelta] | None = None
        self._merged: Segment | None = None  # the state that the merge is of

    def begin(self, folder: Folder, state: State, segment: Segment) -> None:
        """Begins to merge both live deltas, unless an earlier merge is unpublished."""
        if self.is_running():
            return
        file = f"{state}{UNPUBLISHED}"
        fd = folder.create(file)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is new, so nobody else has it
        self._merged = segment
        self._running = self._pool.submit(self._merge, file, fd, segment)

    def is_running(self) -> bool:
        """Returns whether a merge is running or waits to be published."""
        return self._running is not None

    def finished(
        self, folder: Folder, live: Segment
    ) -> tuple[UnpublishedDelta, dict[str, list[DeltaEntries]]] | None:
        """Returns an ended merge, to be published or dropped, and the live state's later entries by table; or
        None. Waits for a running merge if the newest delta is the larger one, which slows batches. Raises
        NoSpace, SegmentError."""
        sizes = [delta.segment.size for delta in live.deltas]
        if self._running is None or not (self._running.done() or (len(sizes) > 1 and sizes[0] > sizes[1])):
            return None
        assert self._merged is not None
        running, merged, self._running, self._merged = self._running, self._merged, None, None
        delta = running.result()
        since = changes_since(merged, live) if folder.exists(delta.file) else None
        if since is None:
            delta.drop(folder)
            return None
        return delta, since

    def _merge(self, file: str, fd: int, segment: Segment) -> UnpublishedDelta:
        try:
            return self._write(file, fd, segment)
        except BaseException:
            with self._model.opened() as folder:
                folder.unlink(file)
            raise

    def _write(self, file: str, fd: int, segment: Segment) -> UnpublishedDelta:
        try:
            tables = merge(segment.base, own_entries(segment.deltas), self._threads)
        except BaseException:
            os.close(fd)
            raise
        change = replace(segment.deltas[0].change, below=0, changed=0)
        writer = write_unsealed(self._model.folder / file, fd, segment.header, change, tables)
        return UnpublishedDelta(file, writer, change, sum(int(t.rows.size) for t in tables.values()))

    def close(self) -> None:
        """Waits for a running merge and drops it."""
        self._pool.shutdown()
        if self._running is not None and self._running.exception() is None:
            with self._model.opened() as folder:
                self._running.result().drop(folder)
        self._running = self._merged = None

    def __enter__(self) -> "Merges":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def changes_since(merged: Segment, live: Segment) -> dict[str, list[DeltaEntries]] | None:
    """Returns entries of `live`'s newest delta that differ from `merged`'s, by table. None: the older delta
    differs, or `merged` has an id that `live` lacks."""
    if min(len(merged.deltas), len(live.deltas)) < 2 or merged.header.version != live.header.version:
        return None
    if merged.deltas[-1].sequence != live.deltas[-1].sequence:
        return None
    old, new = merged.deltas[0], live.deltas[0]
    if set(old.tables) - set(new.tables):
        return None
    since: dict[str, list[DeltaEntries]] = {}
    for name in new.tables:
        entries = delta_entries(new, name)
        if name in old.tables:
            times = times_of(old.tables[name], old.segment.mapping.bytes)
            same, shared = _same(entries, old.own_layer(name), times)
            if shared != old.tables[name].id_count:
                return None
            entries = entries.only(~same)
        since[name] = [entries]
    return since


def _same(entries: DeltaEntries, layer: OverlayLayer, times: Times | None) -> tuple[np.ndarray, int]:
    """Returns the mask [n] of entries that a layer has unchanged, and the number of its ids among them.
    times: of its slots."""
    slots = find_rows(layer.index, entries.ids)
    there = np.flatnonzero((slots >= 0) & (layer.index.ids[slots] == entries.ids))
    same = np.zeros(entries.ids.size, np.bool_)
    new, old = entries.packed.view(np.uint32), layer.packed.view(np.uint32)  # rows are multiples of 4 bytes
    for start in range(0, there.size, _BLOCK_ROWS):
        which = there[start : start + _BLOCK_ROWS]
        at = slots[which]
        is_same = (new.take(entries.rows[which], 0) == old.take(at, 0)).all(1)
        was_deleted = np.zeros(at.size, np.bool_) if layer.deleted is None else bits_at(layer.deleted, at)
        same[which] = (is_same | was_deleted) & (was_deleted == entries.deleted[which])
        if times is not None and entries.times is not None:
            same[which] &= times[at] == entries.times[which]
    return same, there.size
