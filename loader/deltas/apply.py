"""Applies changes: a batch becomes a delta over the live version, visible as a whole or not at all.

1. The changes are read, checked and quantized into private memory, block by block.
2. They are merged with the newest delta, or with both once it has outgrown its share of the older one, into a
   new file. So a version has at most two deltas, and a row is written some log n times.
3. A rename of the record makes the new state live. After an error or kill before it, the old state is live.

One process applies at a time; others wait. Readers take no lock.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tableside.loader.deltas.changes import ChangeBatch
from tableside.loader.deltas.hosts import next_mark
from tableside.loader.deltas.merging import Merges, UnpublishedDelta
from tableside.loader.deltas.pack import PackedChanges
from tableside.loader.errors import ChangeError, VersionError
from tableside.loader.segment.delta import Delta, delta_name
from tableside.loader.segment.delta_writer import DeltaEntries, MergedTable, merge, own_entries, write_delta
from tableside.loader.segment.header import Change
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.folder import Folder
from tableside.loader.versions.record import flip, write_next
from tableside.loader.versions.retention import ALL, Retention, forget_states
from tableside.loader.versions.retention import DEFAULT as RETENTION
from tableside.loader.versions.states import UNPUBLISHED, State, attach_state, state_of, writing
from tableside.loader.versions.versions import Model

COMPACT_LOCK = "compact.lock"
SMALL_BYTES = 4 << 20  # of a newest delta, which is not merged into the one below it, however small that is


@dataclass(frozen=True)
class ApplySettings:
    """threads: 0: one per core. keep: states to keep. merge_share: deltas are merged when the newest exceeds
    this share of the other's bytes. clock: gives the time that changes are applied at, and that compaction
    takes rows' ages by, in seconds since 1970."""

    threads: int = 0
    keep: Retention = RETENTION
    merge_share: float = 0.25
    clock: Callable[[], float] = time.time


DEFAULTS = ApplySettings()


@dataclass(frozen=True)
class ApplyResult:
    """Outcome of an apply. rows: changes. entries, delta_bytes: of all live deltas. is_merged: both deltas
    became one. seconds: from the first change read to visibility."""

    model: str
    state: State
    rows: int
    entries: int
    delta_bytes: int
    is_merged: bool
    seconds: float


def position_of(model: Model, source: str) -> str | None:
    """Returns the live state's position in a source; None: no changes of it. VersionError: no version is
    live."""
    change = attach_state(model, None, "header").change
    return None if change is None else change.positions.get(source)


def apply(
    model: Model,
    batch: ChangeBatch,
    settings: ApplySettings = DEFAULTS,
    packed: PackedChanges | None = None,
    merges: Merges | None = None,
    over: State | None = None,
) -> ApplyResult:
    """Publishes the changes of a batch as the next state. packed: earlier changes over the live version.
    merges: merges deltas beside this process's batches. over: the state that must be live. ChangeError: a
    change does not fit, or the batch does not follow the source's last. VersionError: no version is live, or
    another state became live. NoSpace. After an error the live state is unchanged."""
    started = time.monotonic()
    with model.opened() as folder, writing(model, folder):
        segment = attach_state(model, None, "header")
        packed = PackedChanges(segment) if packed is None else packed
        return _Apply(model, folder, settings, segment, merges).run(batch, packed, started, over)


def merge_live(model: Model, settings: ApplySettings = DEFAULTS) -> None:
    """Merges two live deltas into one, as a new state with the same rows; keeps all states. Errors: see
    `apply`."""
    with model.opened() as folder, writing(model, folder):
        segment = attach_state(model, None, "header")
        if len(segment.deltas) > 1:
            _Apply(model, folder, replace(settings, keep=ALL), segment).merge(segment.deltas)


class _Apply:
    """Applies one batch over one state. The caller holds the apply lock."""

    def __init__(
        self,
        model: Model,
        folder: Folder,
        settings: ApplySettings,
        segment: Segment,
        merges: Merges | None = None,
    ) -> None:
        self.model, self.folder, self.settings = model, folder, settings
        self.segment, self.merges = segment, merges
        self.before = model.record()

    def run(
        self, batch: ChangeBatch, packed: PackedChanges, started: float, over: State | None
    ) -> ApplyResult:
        if packed.version != self.before.current or over not in (None, state_of(self.before)):
            raise self._changed(state_of(self.before), over or State(packed.version))
        self._check_batch(batch)
        packed.add(batch.changes)
        live = self.segment.deltas
        if not packed.rows and batch.position in (None, batch.after):
            size, entries = sum(d.segment.size for d in live), sum(d.entries for d in live)
            seconds = time.monotonic() - started
            return ApplyResult(self.model.name, state_of(self.before), 0, entries, size, False, seconds)
        now = self.settings.clock()
        packed.set_times(now)
        merged, below = None, _Below()
        finished = None if self.merges is None else self.merges.finished(self.folder, self.segment)
        if finished is not None:
            merged, since = finished
            tables = self._planned((), since, packed.tables)
            below = _Below(self.before.latest_sequence + 1, merged.entries, merged.writer.size)
        else:
            own, above = self._split(packed)
            tables = self._planned(above, packed.tables)
            if own is not None:
                below = _Below(own.sequence, own.entries, own.segment.size)
        sequence = self.before.latest_sequence + (1 if merged is None else 2)
        change = self._change(batch, packed.rows, sequence, below.sequence, now)
        size = self._publish(tables, change, merged)
        state = State(self.before.current, sequence)
        self._merge_beside(state)
        entries = sum(int(t.rows.size) for t in tables.values()) + below.entries
        is_merged = merged is not None or (bool(live) and not below.sequence)
        seconds = time.monotonic() - started
        size += below.bytes
        return ApplyResult(self.model.name, state, packed.rows, entries, size, is_merged, seconds)

    def _change(self, batch: ChangeBatch, rows: int, sequence: int, below: int, now: float) -> Change:
        positions = dict(self.segment.change.positions) if self.segment.change is not None else {}
        mark = 0
        if batch.source is not None and batch.position is not None:
            positions[batch.source] = batch.position
            if self.segment.header.is_over_hosts and (before := self.segment.hosts_state()) is not None:
                mark = next_mark(before.mark, batch.source, batch.passed or [batch.position])
        times, after = (batch.made_at or 0.0, now), self.segment.sequence if mark else 0
        return Change(sequence, below, rows, positions, *times, mark, after)

    def merge(self, deltas: Sequence[Delta]) -> None:
        """Publishes the entries of these deltas (newest first) as one."""
        sequence = self.before.latest_sequence + 1
        self._publish(self._planned(deltas), replace(deltas[0].change, sequence=sequence, below=0, changed=0))

    def _check_batch(self, batch: ChangeBatch) -> None:
        if batch.source is None:
            if self.segment.header.is_over_hosts:
                raise ChangeError(
                    f"model {self.model.name!r} lies on several hosts, which tell by the numbers of changes "
                    "whether they have the same: give the file one on each host (tableside apply --number)"
                )
            return
        change = self.segment.change
        found = None if change is None else change.positions.get(batch.source)
        if found != batch.after:
            raise ChangeError(
                f"changes of {batch.source!r} follow {batch.after or 'none'}; model {self.model.name!r} has "
                f"them up to {found or 'none'}: another process applies this source, or the model went back; "
                "read on from there"
            )

    def _split(self, packed: PackedChanges) -> tuple[Delta | None, Sequence[Delta]]:
        """Returns the live delta that stays below, and those to merge into the new one, newest first."""
        live = self.segment.deltas
        if not live:
            return None, ()
        size = sum(part.packed.size for parts in packed.tables.values() for part in parts)
        size += sum(d.segment.size for d in live[:-1])
        if self.merges is None and self._outgrows(size, live[-1].segment.size):
            return None, live
        return live[-1], live[:-1]

    def _outgrows(self, newer_bytes: int, older_bytes: int) -> bool:
        """Returns whether the two live deltas should be merged and nobody merges or compacts them now."""
        is_large = newer_bytes > max(SMALL_BYTES, self.settings.merge_share * older_bytes)
        if not is_large or self._is_compacted():
            return False
        return not any(name.endswith(UNPUBLISHED) for name in self.folder.names())

    def _planned(
        self, deltas: Sequence[Delta], *newer: Mapping[str, list[DeltaEntries]]
    ) -> dict[str, MergedTable]:
        """Plans the tables of a delta from these deltas (newest first) and then newer entries."""
        entries = itertools.chain(own_entries(deltas), *(tables.items() for tables in newer))
        return merge(self.segment.base, entries, self.settings.threads)

    def _merge_beside(self, state: State) -> None:
        """Begins the next merge if it is due."""
        if self.merges is not None:
            segment = attach_state(self.model, state, "header", self.segment)
            if len(segment.deltas) > 1 and self._outgrows(*(d.segment.size for d in segment.deltas)):
                self.merges.begin(self.folder, state, segment)

    def _is_compacted(self) -> bool:
        """Returns whether a compaction reads the lower delta, which must stay then."""
        try:
            with self.folder.lock(COMPACT_LOCK, 0):
                return False
        except VersionError:
            return True

    def _publish(
        self, tables: Mapping[str, MergedTable], change: Change, merged: UnpublishedDelta | None = None
    ) -> int:
        """Writes the delta and flips to it; returns its bytes. merged: an unpublished delta below it."""
        version = self.before.current
        name, below = delta_name(version, change.sequence), delta_name(version, change.below)
        partial = f"{name}.partial"
        try:
            fd = self.folder.create(partial)
            size = write_delta(self.folder.path / partial, fd, self.segment.header, change, tables)
            with self.folder.lock("record.lock"):
                self._check_is_live()
                record = replace(self.before, sequence=change.sequence, latest_sequence=change.sequence)
                write_next(self.folder, record)
                try:
                    if merged is not None:
                        merged.seal(change.below)
                        self.folder.rename(merged.file, below)
                    self.folder.rename(partial, name)
                    flip(self.folder)
                except OSError:
                    for made in (name, below)[: 1 if merged is None else 2]:
                        self.folder.unlink(made)
                    raise
                forget_states(self.model, self.folder, record, self.settings.keep)
        except BaseException:
            self.folder.unlink(partial)
            if merged is not None:
                merged.drop(self.folder)
            raise
        return size

    def _check_is_live(self) -> None:
        record = self.model.record()
        if state_of(record) != state_of(self.before):
            raise self._changed(state_of(record), state_of(self.before))
        self.before = record

    def _changed(self, live: State, expected: State) -> VersionError:
        return VersionError(
            f"state {live} of model {self.model.name!r} became live while changes were applied over "
            f"{expected}; nothing was applied: apply them again"
        )


class _Below(NamedTuple):
    """The delta below the next one; sequence 0: none."""

    sequence: int = 0
    entries: int = 0
    bytes: int = 0
