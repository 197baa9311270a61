"""Applies changes: a batch of them becomes a delta over the live version, visible as a whole or not at all.

1. The changes are read, checked and quantized into private memory, block by block.
2. They are merged with the newest delta where that is small beside the one below it, else with both, into a new file in shared
   memory. So there are never more than two deltas over a version, and a row is written again some log n times.
3. The record flips to the new state by one rename. A full file system, an error or a kill before it leaves the state of before.

One process applies at a time; others wait for it. Readers take no lock and wait for nothing.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tableside.loader.changes import Batch, TableChanges
from tableside.loader.delta import Delta, delta_name
from tableside.loader.delta_writer import Entries, MergedTable, entries_of, merge, write_delta
from tableside.loader.errors import ChangeError, VersionError
from tableside.loader.folder import Folder
from tableside.loader.header import Change
from tableside.loader.record import flip, reserve_room, write_next
from tableside.loader.segment import Segment
from tableside.loader.states import KEPT_STATES, State, attach_state, clear_unpublished, forget_states, state_of, writing
from tableside.loader.versions import Model
from tableside.quant import CpuBackend, Source, Table, choose
from tableside.quant.errors import NotRepresentable

COMPACT_LOCK = "compact.lock"
SMALL_BYTES = 4 << 20  # of a newest delta, which is not merged into the one below it, however small that is
_SOURCES = {np.dtype(np.float32): Source.FP32, np.dtype(np.float16): Source.FP16}


@dataclass(frozen=True)
class ApplySettings:
    """How to apply. threads: 0 means one a core. keep: states beside the live one that can be gone back to. merge_share: the
    newest delta is merged into the one below it where it has more than this share of that one's bytes. wait_s: for another
    process that applies."""

    threads: int = 0
    backend: str = "auto"
    keep: int = KEPT_STATES
    merge_share: float = 0.25
    wait_s: float = 600.0


DEFAULTS = ApplySettings()


@dataclass(frozen=True)
class Applied:
    """What an apply did. rows: changes of the batch. entries, delta_bytes: ids in all deltas that are live now, and the bytes of
    their files. is_merged: both deltas became one. seconds: from the first change read until they were visible."""

    model: str
    state: State
    rows: int
    entries: int
    delta_bytes: int
    is_merged: bool
    seconds: float


def position_of(model: Model, source: str) -> str | None:
    """How far the live state is in the changes of a source; None: it has none of them. VersionError: no version is live."""
    change = attach_state(model, None, "header").change
    return None if change is None else change.positions.get(source)


def apply(model: Model, batch: Batch, settings: ApplySettings = DEFAULTS) -> Applied:
    """Publishes the changes of a batch as the next state of `model`.

    ChangeError: a change does not fit the model, or the batch does not follow what was applied of its source. VersionError: no
    version is live, or another one became so meanwhile. NoSpace: shared memory is full. Whatever is raised, the live state is
    what it was.
    """
    started = time.monotonic()
    with model.opened() as folder, writing(folder, settings.wait_s):
        with folder.lock("record.lock"):
            clear_unpublished(folder, model.record())
            reserve_room(folder)
        return _Apply(model, folder, settings, attach_state(model, None, "header")).run(batch, started)


def merge_live(model: Model, settings: ApplySettings = DEFAULTS) -> None:
    """Makes one delta of two that are live: the next state, with the same rows. Raises as `apply`."""
    with model.opened() as folder, writing(folder, settings.wait_s):
        segment = attach_state(model, None, "header")
        if len(segment.deltas) > 1:
            _Apply(model, folder, settings, segment).merge(segment.deltas)


class _Apply:
    """One batch over one state. The caller holds the apply lock."""

    def __init__(self, model: Model, folder: Folder, settings: ApplySettings, segment: Segment) -> None:
        self.model, self.folder, self.settings, self.segment = model, folder, settings, segment
        self.before = model.record()
        self.backend = choose(settings.backend)

    def run(self, batch: Batch, started: float) -> Applied:
        """Checks, merges, writes and publishes."""
        self._check_position(batch)
        new: dict[str, list[Entries]] = {}
        rows = 0
        for block in batch.changes:
            rows += block.rows
            if block.rows:
                new.setdefault(block.table, []).append(pack_changes(self.segment, block, self.backend))
        live = self.segment.deltas
        if not new and batch.position in (None, batch.after):
            size = sum(d.segment.size for d in live)
            state = state_of(self.before)
            return Applied(self.model.name, state, 0, sum(d.entries for d in live), size, False, time.monotonic() - started)
        merged, below = self._merged(new)
        positions = dict(self.segment.change.positions) if self.segment.change is not None else {}
        if batch.source is not None and batch.position is not None:
            positions[batch.source] = batch.position
        sequence = self.before.latest_sequence + 1
        change = Change(sequence, 0 if below is None else below.sequence, rows, positions, batch.made_at or 0.0, time.time())
        size = self._publish(merged, change)
        entries = sum(int(t.rows.size) for t in merged.values()) + (0 if below is None else below.entries)
        return Applied(
            self.model.name,
            State(self.before.current, sequence),
            rows,
            entries,
            size + (0 if below is None else below.segment.size),
            bool(live) and below is None,
            time.monotonic() - started,
        )

    def merge(self, deltas: Sequence[Delta]) -> None:
        """Publishes what these deltas, the newest first, hold together as one."""
        parts: dict[str, list[Entries]] = {}
        for delta in reversed(deltas):
            for name in delta.tables:
                parts.setdefault(name, []).append(entries_of(delta.own_level(name)))
        tables = self.segment.base.tables
        merged = {name: merge(tables[name], of_it, self.settings.threads) for name, of_it in parts.items()}
        sequence = self.before.latest_sequence + 1
        self._publish(merged, replace(deltas[0].change, sequence=sequence, below=0, changed=0))

    def _check_position(self, batch: Batch) -> None:
        if batch.source is None:
            return
        change = self.segment.change
        found = None if change is None else change.positions.get(batch.source)
        if found != batch.after:
            raise ChangeError(
                f"changes of {batch.source!r} follow {batch.after or 'none'}; model {self.model.name!r} has them up to "
                f"{found or 'none'}: another process applies this source, or the model went back; read on from there"
            )

    def _merged(self, new: Mapping[str, list[Entries]]) -> tuple[dict[str, MergedTable], Delta | None]:
        """The tables of the next delta, and the delta that it lies over."""
        live = self.segment.deltas
        is_frozen = self._is_compacted()
        size = sum(part.packed.size for parts in new.values() for part in parts)
        base, above = (live[-1], live[:-1]) if live else (None, ())
        candidate = size + sum(d.segment.size for d in above)
        if base is not None and not is_frozen and candidate > max(SMALL_BYTES, self.settings.merge_share * base.segment.size):
            base, above = None, live
        parts: dict[str, list[Entries]] = {}
        for delta in reversed(above):
            for name in delta.tables:
                parts.setdefault(name, []).append(entries_of(delta.own_level(name)))
        for name, more in new.items():
            parts.setdefault(name, []).extend(more)
        tables = self.segment.base.tables
        return {name: merge(tables[name], of_it, self.settings.threads) for name, of_it in parts.items()}, base

    def _is_compacted(self) -> bool:
        """Whether a compaction reads the delta below, which stays then."""
        try:
            with self.folder.lock(COMPACT_LOCK, 0):
                return False
        except VersionError:
            return True

    def _publish(self, tables: Mapping[str, MergedTable], change: Change) -> int:
        """Writes the delta and flips to it; returns its bytes."""
        version = self.before.current
        name = delta_name(version, change.sequence)
        partial = f"{name}.partial"
        keys = {t.name: t.key for t in self.segment.header.tables}
        try:
            fd = self.folder.create(partial)
            size = write_delta(self.folder.path / partial, fd, self.model.name, version, change, tables, keys)
            with self.folder.lock("record.lock"):
                self._check_is_live()
                record = replace(self.before, sequence=change.sequence, latest_sequence=change.sequence)
                write_next(self.folder, record)
                self.folder.rename(partial, name)
                try:
                    flip(self.folder)
                except OSError:
                    self.folder.unlink(name)
                    raise
                forget_states(self.model, self.folder, record, self.settings.keep)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                self.folder.unlink(partial)
            raise
        return size

    def _check_is_live(self) -> None:
        record = self.model.record()
        if state_of(record) != state_of(self.before):
            raise VersionError(
                f"state {state_of(record)} of model {self.model.name!r} became live while changes were applied over "
                f"{state_of(self.before)}; nothing was applied: apply them again"
            )
        self.before = record


def pack_changes(segment: Segment, block: TableChanges, backend: CpuBackend) -> Entries:
    """A block as rows of its table. ChangeError: it does not fit the model."""
    table = _table(segment, block)
    deleted = np.zeros(block.rows, np.bool_) if block.deleted is None else block.deleted
    _check_ids(table, block, deleted)
    packed = np.zeros((block.rows, table.row_bytes), np.uint8)
    given = ~deleted
    values = block.vectors if given.all() else block.vectors[given]
    rows = packed if given.all() else np.zeros((len(values), table.row_bytes), np.uint8)
    if len(values):
        try:
            backend.quantize(np.ascontiguousarray(values), _SOURCES[values.dtype], table.row_format, rows)
        except NotRepresentable as error:
            at = int(np.flatnonzero(given)[error.row])
            raise ChangeError(
                f"table {block.table!r}, id {block.ids[at]}, change {at}: a value that {table.row_format.label} cannot represent "
                "(not finite, or too large); nothing of the batch was applied"
            ) from error
    if rows is not packed:
        packed[given] = rows
    return Entries(np.ascontiguousarray(block.ids), packed, np.arange(block.rows), deleted)


def _table(segment: Segment, block: TableChanges) -> Table:
    """The table of the version that a block changes, after checking its shapes."""
    if (table := segment.base.tables.get(block.table)) is None:
        raise ChangeError(
            f"model {segment.header.model!r} has no table {block.table!r}; it has: {', '.join(segment.base.tables)}"
        )
    ids, vectors, deleted = block.ids, block.vectors, block.deleted
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ChangeError(f"table {block.table!r}: ids are {ids.dtype} {list(ids.shape)}; expected int64 [n]")
    has_vectors = deleted is None or not deleted.all()
    if has_vectors and (vectors.dtype not in _SOURCES or vectors.shape != (block.rows, table.dim)):
        raise ChangeError(
            f"table {block.table!r}: vectors are {vectors.dtype} {list(vectors.shape)}; expected float32 or float16 "
            f"[{block.rows}, {table.dim}]"
        )
    if deleted is not None and (deleted.dtype != np.bool_ or deleted.shape != ids.shape):
        raise ChangeError(
            f"table {block.table!r}: deleted is {deleted.dtype} {list(deleted.shape)}; expected bool [{block.rows}]"
        )
    return table


def _check_ids(table: Table, block: TableChanges, deleted: np.ndarray) -> None:
    row_map = table.row_map
    if row_map is not None and row_map.index is not None:
        index = row_map.index
        outside = np.zeros(0, np.int64)
        if index.bucket_ids or len(index.directory) - 1 < index.buckets:
            outside = np.flatnonzero(index.bucket_of(block.ids) < 0)
        if outside.size:
            at = int(outside[0])
            raise ChangeError(f"table {block.table!r}, change {at}: id {block.ids[at]} is in no bucket of this version")
        return
    first, count = (0, table.rows) if row_map is None else (row_map.first, row_map.count)
    if (outside := np.flatnonzero((block.ids < first) | (block.ids >= first + count))).size:
        at = int(outside[0])
        raise ChangeError(
            f"table {block.table!r}, change {at}: id {block.ids[at]} is outside the table's ids [{first}, {first + count}); "
            'rows can be added to tables of raw ids (ids = "raw" in model.toml)'
        )
    if (row_map is None or row_map.default_row is None) and deleted.any():
        at = int(np.flatnonzero(deleted)[0])
        raise ChangeError(
            f"table {block.table!r}, change {at}: id {block.ids[at]} cannot be deleted, since the table refuses ids that it "
            "lacks; load it with a policy for missing ids"
        )
