"""Compaction: a version and its delta become the next version, while changes go on.

1. Two live deltas are merged into one, as a state of its own.
2. A new segment is written: files of unchanged large tables are linked, other unchanged rows copied packed,
   changed ones come from the delta, and tables of raw ids get a new index. Ids that are too old, or too many,
   are left out (loader.deltas.expiry). Meanwhile applies leave this delta in place and write newer ones over
   it.
3. The newer delta is written again over the new version, and the record flips to both. Ids deleted from a
   table of row numbers stay deleted by this delta.

After an error or kill before the flip the live state is unchanged.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tableside.loader.deltas.apply import COMPACT_LOCK, DEFAULTS, ApplySettings, merge_live
from tableside.loader.deltas.compact_table import CompactTable
from tableside.loader.errors import VersionError
from tableside.loader.hot.hot import counts_of
from tableside.loader.load.settings import Progress, thread_count
from tableside.loader.segment.delta import Delta, delta_name
from tableside.loader.segment.delta_writer import DeltaEntries, delta_entries, merge, own_entries, write_delta
from tableside.loader.segment.header import Change, Header, checksum
from tableside.loader.segment.layout import plan_tables
from tableside.loader.segment.numa import chosen_nodes
from tableside.loader.segment.remote import RemoteTable
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.folder import Folder
from tableside.loader.versions.states import State, attach_state, state_of, writing
from tableside.loader.versions.versions import Model


@dataclass(frozen=True)
class CompactionResult:
    """state: the live one. rows, segment_bytes: of the new version; merged: entries of the delta; expired,
    evicted: ids that were dropped for their age, and beyond max_rows; seconds: until it was live."""

    model: str
    state: State
    rows: int
    merged: int
    expired: int
    evicted: int
    segment_bytes: int
    seconds: float


def delta_share(segment: Segment) -> float:
    """Returns the bytes of a state's deltas per byte of its version."""
    return float(sum(d.segment.size for d in segment.deltas) / segment.base.size)


def compact(
    model: Model,
    settings: ApplySettings = DEFAULTS,
    progress: Progress | None = None,
    remote: Sequence[RemoteTable] = (),
) -> CompactionResult | None:
    """Compacts the live version and its deltas; None: no delta is live, and no row is to be dropped. remote:
    tables that other hosts have from now on. VersionError: a load or compaction runs, or another version
    became live. SegmentError: the live state is damaged. NoSpace."""
    started, model = time.monotonic(), model.on(None)
    # The load lock keeps compactions apart; an apply takes the other one for a moment, to see whether one is
    # under way.
    with model.loading() as version, model.opened() as folder, folder.lock(COMPACT_LOCK):
        segment = attach_state(model, None, "header")
        if not segment.deltas and not remote and not any(t.has_times for t in segment.header.tables):
            return None
        merge_live(model, settings)
        segment = attach_state(model, None, "full")
        progress = progress or (lambda done, total: None)
        return Compaction(model, folder, version, segment, settings, progress, remote).run(started)


class Compaction:
    """One compaction. The caller holds the load and compaction locks."""

    def __init__(
        self,
        model: Model,
        folder: Folder,
        version: int,
        segment: Segment,
        settings: ApplySettings,
        progress: Progress,
        remote: Sequence[RemoteTable] = (),
    ) -> None:
        self.model, self.folder, self.version, self.settings = model, folder, version, settings
        self.base, self.now = segment.base, settings.clock()
        self.remote = {table.name: table for table in remote}
        self.delta: Delta | None = None
        self.entries: dict[str, DeltaEntries] = {}
        if segment.deltas:
            self.delta = segment.deltas[-1]  # a newer one may have come, which stays
            self.entries = {name: delta_entries(self.delta, name) for name in self.delta.tables}
        self.counts = counts_of(model.root, segment.base)
        self._progress, self._done, self._total = progress, 0, 0

    def run(self, started: float) -> CompactionResult | None:
        tables = {t.name: CompactTable(self, t) for t in self.base.header.tables}
        if self.delta is None and not self.remote and not any(t.is_changed for t in tables.values()):
            return None
        header = self.base.header
        stored = [t.stored for t in tables.values()]
        planned = replace(
            header,
            version=self.version,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tables=plan_tables(stored),
            merged=self._merged(),
            remote=tuple(self.remote.get(table.name, table) for table in header.remote),
        )
        planned = replace(planned, origin=self._origin(planned))
        self._total = sum(t.rows for t in planned.tables)
        program = self.base.program() if header.scorer is not None else b""
        kept = {name: self.base for name, t in tables.items() if not t.is_changed}
        nodes = chosen_nodes(self.model.nodes(header.version) or None)
        with self.model.writer(self.version, planned, program, kept, nodes) as writer:
            for table in writer.header.tables:
                if table.name in writer.linked:
                    self.done(table.rows)
                else:
                    tables[table.name].write(writer, table)
            writer.finish_rest(thread_count(self.settings.threads))
            writer.seal({"seconds": time.monotonic() - started, "source_bytes": float(self.base.size)})
        state = self._publish()
        rows = sum(t.id_count for t in planned.tables)
        entries = 0 if self.delta is None else self.delta.entries
        dropped = [t.expiry for t in tables.values()]
        expired, evicted = sum(e.expired for e in dropped), sum(e.evicted for e in dropped)
        seconds = time.monotonic() - started
        counts = (rows, entries, expired, evicted, writer.size)
        return CompactionResult(self.model.name, state, *counts, seconds)

    def _merged(self) -> Change | None:
        """Returns the last change that the new version has."""
        if self.delta is None:
            return self.base.header.merged
        change = self.delta.change
        return replace(change, below=0, mark=0 if self._hides_rows() else change.mark)

    def _origin(self, planned: Header) -> int:
        """Returns the content of the loaded version; one of its own where other hosts have rows from now on,
        since states of before do not lead to the new ones."""
        header = self.base.header
        if not header.is_over_hosts or planned.merged is None:
            return 0
        origin = header.origin or self.base.content()
        return checksum(repr((origin, planned.remote)).encode()) if self.remote else origin

    def _hides_rows(self) -> bool:
        """Whether the new version alone has rows that were deleted."""
        return any(self._deleted_numbers(name) for name in self.entries)

    def _deleted_numbers(self, name: str) -> bool:
        """Whether row numbers of a table were deleted, which a delta over the new version says."""
        row_map = self.base.tables[name].row_map
        return (row_map is None or row_map.index is None) and bool(self.entries[name].deleted.any())

    def done(self, rows: int) -> None:
        """Counts written rows."""
        self._done += rows
        self._progress(self._done, self._total)

    def _publish(self) -> State:
        """Carries over newer changes and flips."""
        with writing(self.model, self.folder):
            live = attach_state(self.model, None, "header")
            sequence = 0 if self.delta is None else self.delta.sequence
            below = live.deltas[-1].sequence if live.deltas and sequence else 0
            if (live.header.version, below) != (self.base.header.version, sequence):
                raise VersionError(
                    f"state {state_of(self.model.record())} of model {self.model.name!r} is live, which does "
                    f"not follow from {State(self.base.header.version, sequence)}, which was compacted; "
                    "nothing was published: compact again"
                )
            sequence = self._carry_over(live)
            try:
                self.model.publish(self.version, sequence=sequence)
            except BaseException:
                self.folder.unlink(delta_name(self.version, sequence))
                raise
        return State(self.version, sequence)

    def _carry_over(self, live: Segment) -> int:
        """Writes newer changes as a delta over the new version; returns its sequence, 0: none."""
        parts: list[tuple[str, list[DeltaEntries]]] = []
        for name, entries in self.entries.items():
            if self._deleted_numbers(name):
                parts.append((name, [entries.only(entries.deleted)]))
        newer = live.deltas if self.delta is None else live.deltas[:-1]
        if not parts and not newer:
            return 0
        change: Change = live.deltas[0].change
        tables = merge(self.base, [*parts, *own_entries(newer)], self.settings.threads)
        header = replace(self.base.header, version=self.version)
        name = delta_name(self.version, change.sequence)
        with self.folder.replacing(name) as partial:
            path, fd = self.folder.path / partial, self.folder.create(partial)
            write_delta(path, fd, header, replace(change, below=0), tables)
        return change.sequence
