"""The load: checkpoint -> quantized chunks -> segment -> version.

Threads take chunks of a table. Each reads a piece that fits its core's cache, quantizes it into the segment,
and hashes the chunk after its last piece. So private memory is a few pieces per thread. Indexes of raw ids
are built by `loader.load.raw_ids`; tables not to be read again are copied by `loader.load.reuse`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from tableside.loader.checkpoint import Checkpoint, Matrix, open_checkpoint
from tableside.loader.checkpoint.contents import fingerprint, sample
from tableside.loader.checkpoint.keyed.keyed import Block
from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.load.origin import spec_digest
from tableside.loader.load.plan import PlannedTable, Sources, plan
from tableside.loader.load.raw_ids import IndexedRows, RawTable
from tableside.loader.load.reuse import LiveTables, Piece
from tableside.loader.load.same import add_same
from tableside.loader.load.scorer import stored_scorer
from tableside.loader.load.settings import DEFAULTS, PIECE_BYTES, LoadSettings, Progress, threads_of
from tableside.loader.load.share import whole_name
from tableside.loader.load.verification import Verification
from tableside.loader.model.model import ModelSpec
from tableside.loader.segment.header import Header, Owner
from tableside.loader.segment.layout import plan_tables
from tableside.loader.segment.numa import chosen_nodes
from tableside.loader.segment.remote import RemoteTable
from tableside.loader.segment.stored import StoredTable
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.versions import Model
from tableside.quant import CpuBackend, choose
from tableside.quant.errors import NotRepresentable
from tableside.quant.rows.ids import set_bits


@dataclass(frozen=True)
class Loaded:
    """Outcome of a load. seconds: until visible; huge_fraction: share on pages of page_bytes (2 MiB, or a
    hugetlbfs's)."""

    model: str
    version: int
    path: Path
    header: Header
    seconds: float
    segment_bytes: int
    source_bytes: int
    huge_fraction: float
    page_bytes: int


def load(
    spec: ModelSpec,
    root: Path,
    settings: LoadSettings = DEFAULTS,
    progress: Progress | None = None,
    remote: Sequence[RemoteTable] = (),
) -> Loaded:
    """Publishes a new version under `root`. progress: counts raw ids while indexed, then rows. remote: the
    tables whose rows other hosts have, as those describe them. LoaderError: model, checkpoint or memory are
    wrong; nothing stays."""
    backend, progress = choose(settings.backend), progress or (lambda done, total: None)
    whole, spec = spec, _local(spec, remote, settings.only)
    with open_checkpoint(spec.checkpoint) as checkpoint:
        model = Model(root, spec.name)
        reused = LiveTables(spec, settings.only, model, backend)
        sources = Sources(reused.others, checkpoint)
        nodes = chosen_nodes(spec.copies)
        digest = spec_digest(whole)  # before the program is read, so that a change in between is found later
        dims = {t.name: t.dim for t in reused.tables.values()} | {t.name: t.dim for t in remote}
        scorer, program = stored_scorer(spec, sources.dims | dims)
        with model.loading(settings.group) as version:
            reused.check_live(model, settings.threads)
            started = time.monotonic()
            add_same(reused, model, checkpoint, backend, settings, progress)
            unlike = Sources(reused.others, checkpoint)
            scratch = partial(model.create_scratch, version)
            planned = plan(reused.others, unlike, model, scratch, settings.threads, progress, spec.share)
            checks = Verification(checkpoint, unlike.matrices, spec.share is None)
            source = {
                "path": str(spec.checkpoint),
                "spec": digest,
                "files": fingerprint(sources.paths),
                **({} if spec.share is None else {"sample": sample(sources.paths)}),
                "verified": checks.describe()
                | {name: dict(k.verification) for name, k in unlike.keyed.items()}
                | reused.verified(),
                **reused.source(),
            }
            steps = {table: checks.step(table) for table in unlike.matrices}
            header = replace(
                _header(spec, planned, reused, version, source, steps),
                scorer=scorer,
                evaluation=spec.evaluation,
                disk_timeout_s=spec.disk_timeout_s or 0,
                owner=None if spec.share is None else Owner(whole_name(spec), version, *spec.share),
                remote=tuple(remote),
            )
            with model.writer(version, header, program, reused.kept, nodes) as writer:
                _Load(checkpoint, checks, writer, backend, settings, progress).run(planned, reused)
                huge = writer.mapping.huge_fraction()
                header = writer.seal(
                    {"seconds": time.monotonic() - started, "source_bytes": float(sources.bytes)}
                )
            model.publish(version, settings.activate)
            seconds = time.monotonic() - started
    return Loaded(
        spec.name,
        version,
        model.path(version),
        header,
        seconds,
        writer.size,
        sources.bytes,
        huge,
        writer.mapping.page_bytes,
    )


def _local(spec: ModelSpec, remote: Sequence[RemoteTable], only: Sequence[str]) -> ModelSpec:
    """Returns the model without its remote tables. ModelError: other tables have owners than these, or one of
    them is to be loaded alone."""
    if spec.share is not None:
        return spec
    if elsewhere := [t.name for t in remote if t.name in only]:
        raise ModelError(f"--only {elsewhere[0]}: its rows lie on other hosts; load it there, with --share")
    wanted, found = {t.name for t in spec.tables if t.owners}, {t.name for t in remote}
    if lacking := sorted(wanted ^ found):
        raise ModelError(
            f"[tables.{lacking[0]}]: its rows lie on other hosts, which have not been asked about it; load "
            "the model with: tableside load"
        )
    return replace(spec, tables=tuple(t for t in spec.tables if t.name not in found))


def _header(
    spec: ModelSpec,
    planned: list[PlannedTable],
    reused: LiveTables,
    version: int,
    source: dict[str, Any],
    steps: dict[str, int],
) -> Header:
    tables = dict(reused.tables)  # their chunks stay as they are
    for p in planned:
        t = p.spec
        place = (p.rows, t.row_bytes(p.dim), 0, steps.get(t.name, 1), 0)
        tables[t.name] = StoredTable(*place, t.name, t.key, t.row_format.label, p.dim, p.ids)
    placed = plan_tables(tables[t.name] for t in spec.tables)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Header(spec.name, version, created, placed, spec.features, source)


_Work = Callable[["_Buffers"], None]


class _Buffers(NamedTuple):
    """A thread's memory: a piece of the checkpoint, and room for column shards."""

    piece: bytearray
    scratch: bytearray


class _Load:
    """One load's work, shared by threads. Per table: any thread takes work of `reading`, then one calls
    `complete`. rows: of the source; buffer_bytes: private memory per thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        checks: Verification,
        writer: SegmentWriter,
        backend: CpuBackend,
        settings: LoadSettings,
        progress: Progress,
    ) -> None:
        self.checkpoint, self.checks, self.writer, self.backend = checkpoint, checks, writer, backend
        self._settings, self._progress, self._done_rows, self._total_rows = settings, progress, 0, 0
        self.is_stopping, self._lock = False, Lock()

    def run(self, planned: list[PlannedTable], reused: LiveTables) -> None:
        """Writes every row and takes the checksums; raises a thread's error."""
        stored = {t.name: t for t in self.writer.header.tables}
        parts: list[_RawLoad | _MatrixLoad] = [
            _RawLoad(self, p, p.source, stored[p.spec.name])
            if isinstance(p.source, RawTable)
            else _MatrixLoad(self, p, p.source, stored[p.spec.name])
            for p in planned
        ]
        to_copy = [t for t in self.writer.header.tables if t.name not in self.writer.linked]
        copies = (partial(self._copy, reused, piece) for piece in reused.pieces(to_copy))
        self._plan_threads(
            max((4 * p.dim for p in planned), default=0),
            max((part.buffer_bytes for part in parts), default=0),
        )
        self._total_rows = reused.rows + sum(part.rows for part in parts)
        self.done(sum(stored[name].rows for name in self.writer.linked))
        self._share(chain(*(part.reading() for part in parts), copies))
        self.checks.finish()
        for part in parts:
            part.complete()
        self.writer.finish_rest(self._threads)

    def _plan_threads(self, row_bytes: int, more_bytes: int) -> None:
        self._buffer_bytes = max(PIECE_BYTES, row_bytes)
        # The piece that is read, room for column shards, the kernel's scratch, and what a part needs.
        self._threads = threads_of(self._settings, 3 * self._buffer_bytes + more_bytes)

    def _share(self, items: Iterator[_Work]) -> None:
        with ThreadPoolExecutor(self._threads, thread_name_prefix="tableside-load") as pool:
            futures = [pool.submit(self._work, items) for _ in range(self._threads)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self.is_stopping = True
        for future in futures:
            future.result()
        self.is_stopping = False

    def _work(self, items: Iterator[_Work]) -> None:
        buffers = _Buffers(bytearray(self._buffer_bytes), bytearray(self._buffer_bytes))
        while not self.is_stopping:
            with self._lock:
                item = next(items, None)
            if item is None:
                return
            item(buffers)

    def _copy(self, reused: LiveTables, piece: Piece, buffers: _Buffers) -> None:
        self.done(reused.copy(piece, self.writer))

    def done(self, rows: int) -> None:
        """Counts rows that were written. Any thread may call."""
        with self._lock:
            self._done_rows += rows
            self._progress(self._done_rows, self._total_rows)


class _RawLoad:
    """Fills a table of raw ids."""

    def __init__(self, load: _Load, p: PlannedTable, raw: RawTable, table: StoredTable) -> None:
        assert table.ids is not None and table.index is not None
        self.load, self.p, self.raw, self.source, self.table = load, p, raw, raw.source, table
        data = load.writer.rows(table.index, 0, table.index.rows).reshape(-1)
        self._written = IndexedRows(table.ids, raw.index, data, load.writer.rows(table, 0, table.rows))
        self.rows, self.buffer_bytes = raw.source.rows, raw.source.buffer_bytes

    def reading(self) -> Iterator[_Work]:
        return (partial(self._read_piece, piece) for piece in range(self.source.pieces))

    def _read_piece(self, piece: int, buffers: _Buffers) -> None:
        for block in self.source.blocks(piece):
            if self.load.is_stopping:
                return
            self._write(block)
            self.load.done(len(block.ids))

    def _write(self, block: Block) -> None:
        source, backend = self.source, self.load.backend
        packed = np.empty((len(block.ids), self.table.row_bytes), np.uint8)
        try:
            backend.quantize(block.values, source.source, self.p.spec.row_format, packed)
        except NotRepresentable as error:
            row = int(block.rows[error.row])
            what = f"{source.key!r}: {source.where(row)}: {error.describe(row)}"
            raise CheckpointError(what) from error
        ids, values = block.ids, block.values
        if (kept := self.raw.kept(ids, block.rows)) is not None:
            ids, values, packed = ids[kept], values[kept], packed[kept]
        self._written.put(ids, packed)
        self.p.default_row.add(values, source.source, backend)

    def _copy_older(self) -> None:
        """Copies the rows of ids that only an older version has, and notes which they are."""
        if self.p.backfill is None:
            return
        for ids, rows, packed in self.p.backfill.blocks():
            if (kept := self.raw.kept(ids, rows + self.source.rows)) is not None:
                ids, packed = ids[kept], packed[kept]
            set_bits(self._written.bits, self._written.put(ids, packed))

    def complete(self) -> None:
        self.source.finish()
        self._copy_older()
        self._written.finish()
        self.p.default_row.write(self.load.writer, self.table, self.load.backend)


class _MatrixLoad:
    """Fills a table whose ids are row numbers."""

    buffer_bytes = 0

    def __init__(self, load: _Load, p: PlannedTable, matrix: Matrix, table: StoredTable) -> None:
        self.load, self.p, self.matrix, self.table, self.rows = load, p, matrix, table, p.own

    def reading(self) -> Iterator[_Work]:
        return (partial(self._quantize_chunk, chunk) for chunk in range(self.table.chunks))

    def _quantize_chunk(self, chunk: int, buffers: _Buffers) -> None:
        start, end = self.table.chunk_range(chunk)
        stop = min(end, self.rows)
        if start < stop:
            self._quantize(start, stop, buffers)
            self.load.done(stop - start)
        if stop == end:
            self.load.writer.finish_chunk(self.table, chunk)

    def _quantize(self, start: int, stop: int, buffers: _Buffers) -> None:
        load, matrix, table, of_table = self.load, self.matrix, self.table, self.p.first
        start, stop = start + of_table, stop + of_table  # rows of the matrix from here on
        # Reads are whole steps: some rows at a chunk's ends are read for both neighbours
        step = load.checks.step(table.name)
        read_rows = max(1, len(buffers.piece) // matrix.row_bytes // step) * step
        end = min(-(-stop // step) * step, matrix.rows)
        for first in range(start // step * step, end, read_rows):
            last = min(first + read_rows, end)
            values = matrix.empty(last - first, buffers.piece)
            load.checks.read(table.name, first, last, values, buffers.scratch)
            begin, last = max(first, start), min(last, stop)
            rows = values[begin - first : last - first]
            try:
                load.backend.quantize(
                    rows,
                    matrix.source,
                    self.p.spec.row_format,
                    load.writer.rows(table, begin - of_table, last - of_table),
                )
            except NotRepresentable as error:
                what = f"{load.checkpoint.path}: {matrix.key!r}: {error.describe(begin + error.row)}"
                raise CheckpointError(what) from error
            self.p.default_row.add(rows, matrix.source, load.backend)

    def complete(self) -> None:
        default_row, older = self.p.default_row, self.p.backfill
        end = self.table.rows - default_row.is_used
        # Rows that an older version has beyond those of the checkpoint
        if older is not None and end > self.rows:
            rows, used = self.load.writer.rows(self.table, self.rows, end), older.used_bytes
            rows[:, :used] = older.table.packed[self.rows : end, :used]
        default_row.write(self.load.writer, self.table, self.load.backend)
