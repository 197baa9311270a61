"""The load: checkpoint -> quantized chunks -> segment -> version.

Threads take chunks of a table one after another. Each reads a piece of the checkpoint that stays in its core's cache,
quantizes it straight into the segment, and hashes the chunk when its last piece is done. So fp32 never exists whole, and the
private memory of a load is a few pieces a thread, whatever the table's size. Tables of raw ids are read as `loader.raw_ids` says.
Tables that are not to be read again are copied from the live version (`loader.reuse`).
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from tableside.loader.checkpoint import Checkpoint, Matrix, open_checkpoint
from tableside.loader.checkpoint.rows import DTYPES, fingerprint
from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.header import Header, plan_tables
from tableside.loader.model import ModelSpec
from tableside.loader.origin import spec_digest
from tableside.loader.plan import PlannedTable, Sources, plan
from tableside.loader.raw_ids import RawWriter
from tableside.loader.reuse import Piece, Reused
from tableside.loader.scorer import stored_scorer
from tableside.loader.segment import SegmentWriter
from tableside.loader.stored import StoredRows, StoredTable
from tableside.loader.verification import Verification
from tableside.loader.versions import Model
from tableside.quant import CpuBackend, choose
from tableside.quant.errors import NotRepresentable

PIECE_BYTES = 2 << 20  # smaller: more calls; larger: more memory a thread
Progress = Callable[[int, int], None]  # (done, in all), from any thread: first ids that are indexed, then rows that are written


@dataclass(frozen=True)
class Loaded:
    """What a load did. seconds: from the first byte reserved to the version visible; huge_fraction: share on pages of
    page_bytes: 2 MiB, or what a hugetlbfs has."""

    model: str
    version: int
    path: Path
    header: Header
    seconds: float
    segment_bytes: int
    source_bytes: int
    huge_fraction: float
    page_bytes: int


@dataclass(frozen=True)
class LoadSettings:
    """How to load. max_memory_bytes: the most private memory for a load's buffers (the native backend makes no others);
    threads: 0 means one a core; group: users who may read the model, beside its owner; only: the tables to load, while the others
    are taken over from the live version; empty: all.
    """

    threads: int = 0
    max_memory_bytes: int = 64 << 20
    backend: str = "native"
    activate: bool = True
    group: str | None = None
    only: tuple[str, ...] = ()


def load(spec: ModelSpec, root: Path, settings: LoadSettings = LoadSettings(), progress: Progress | None = None) -> Loaded:
    """Publishes a new version of `spec` under `root`.

    progress: counts the ids of tables of raw ids while their indexes are built, and then, from 0 on, the rows of all tables.

    LoaderError: model, checkpoint or memory are not as they should be; nothing was published, and no bytes are left behind.
    """
    backend, progress = choose(settings.backend), progress or (lambda done, total: None)
    with open_checkpoint(spec.checkpoint) as checkpoint:
        model = Model(root, spec.name)
        reused = Reused(spec, settings.only, model, backend)
        sources = Sources(reused.others, checkpoint)
        digest = spec_digest(spec)  # before the program is read, so that a change in between is found later
        scorer, program = stored_scorer(spec, sources.dims | reused.dims)
        with model.loading(settings.group) as version:
            reused.check_is_live(model)
            started = time.monotonic()
            path = model.partial_path(version)
            try:
                scratch = partial(model.create_scratch, version)
                planned = plan(reused.others, sources, model, scratch, settings.threads, progress)
                checks = Verification(checkpoint, sources.matrices)
                source = {
                    "path": str(spec.checkpoint),
                    "spec": digest,
                    "files": checkpoint.fingerprint(sources.matrices.values()) | fingerprint(sources.paths),
                    "verified": checks.describe()
                    | {name: dict(k.verification) for name, k in sources.keyed.items()}
                    | reused.verified(),
                    **reused.source(),
                }
                steps = {table: checks.step(table) for table in sources.matrices}
                header = replace(
                    _header(spec, planned, reused, version, source, steps), scorer=scorer, evaluation=spec.evaluation
                )
                writer = SegmentWriter(path, header, program, model.create_partial(version))
                try:
                    work = _Load(checkpoint, planned, reused, checks, writer, backend, settings, progress)
                    work.run()
                    huge = writer.mapping.huge_fraction()
                    header = writer.seal({"seconds": time.monotonic() - started, "source_bytes": float(sources.bytes)})
                finally:
                    writer.close()
                model.publish(version, settings.activate)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            seconds = time.monotonic() - started
    return Loaded(
        spec.name, version, model.path(version), header, seconds, writer.size, sources.bytes, huge, writer.mapping.page_bytes
    )


def _header(
    spec: ModelSpec, planned: list[PlannedTable], reused: Reused, version: int, source: dict[str, Any], steps: dict[str, int]
) -> Header:
    shapes = {p.spec.name: (p.spec.name, p.spec.key, p.spec.row_format, p.rows, p.dim) for p in planned}
    shapes |= {name: reused.shape(name) for name in reused.tables}
    ids = {p.spec.name: p.ids for p in planned if p.ids is not None} | reused.ids
    tables = plan_tables([shapes[t.name] for t in spec.tables], steps | reused.steps, ids)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Header(spec.name, version, created, tables, spec.features, source)


_Work = Callable[["_Buffers"], None]


class _Buffers(NamedTuple):
    """A thread's memory: a piece of the checkpoint, and room for column shards."""

    piece: bytearray
    scratch: bytearray


class _Load:
    """One load's work, shared by its threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        planned: list[PlannedTable],
        reused: Reused,
        checks: Verification,
        writer: SegmentWriter,
        backend: CpuBackend,
        settings: LoadSettings,
        progress: Progress,
    ) -> None:
        self.checkpoint, self.checks, self.writer, self.backend = checkpoint, checks, writer, backend
        tables = {t.name: t for t in writer.header.tables}
        self.planned, self.reused = [(p, tables[p.spec.name]) for p in planned], reused
        self.progress = progress
        self.total_rows = sum(p.matrix.rows if p.matrix else p.raw.source.rows if p.raw else 0 for p in planned) + reused.rows
        self.done_rows = 0
        row_bytes = max(4 * p.dim for p in planned)
        self.buffer_bytes = max(PIECE_BYTES, row_bytes)
        self.threads = self._threads(settings)
        self._lock = Lock()
        self._stop = False

    def _threads(self, settings: LoadSettings) -> int:
        wanted = settings.threads or len(os.sched_getaffinity(0))
        each = 3 * self.buffer_bytes  # the chunk that is read, room for column shards, the kernel's scratch
        each += max((p.raw.source.buffer_bytes for p, _ in self.planned if p.raw is not None), default=0)
        if settings.max_memory_bytes < each:
            raise ModelError(f"max memory is {settings.max_memory_bytes:,} bytes; a load of this model needs at least {each:,}")
        return max(1, min(wanted, settings.max_memory_bytes // each))

    def run(self) -> None:
        """Writes every row, and takes the checksums; raises an error where a thread had one."""
        self.progress(0, self.total_rows)
        raw = {p.spec.name: self._raw_writer(p, t) for p, t in self.planned if p.raw is not None}
        self._share(self._reading(raw))
        self.checks.finish()
        for p, table in self.planned:
            if p.raw is not None:
                p.raw.source.finish()
                raw[p.spec.name].write_older()
                raw[p.spec.name].finish()
            elif p.matrix is not None and table.rows > p.matrix.rows:
                self._write_tail(p, p.matrix, table)
            if p.default_row.is_used:
                p.default_row.write(self.writer.rows(table, table.rows - 1, table.rows)[0], self.backend)
        self._share(self._finishing())

    def _share(self, items: Iterator[_Work]) -> None:
        """Does work on all threads."""
        with ThreadPoolExecutor(self.threads, thread_name_prefix="tableside-load") as pool:
            futures = [pool.submit(self._work, items) for _ in range(self.threads)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop = True
        for future in futures:
            future.result()
        self._stop = False

    def _work(self, items: Iterator[_Work]) -> None:
        buffers = _Buffers(bytearray(self.buffer_bytes), bytearray(self.buffer_bytes))
        while not self._stop:
            with self._lock:
                item = next(items, None)
            if item is None:
                return
            item(buffers)

    def _reading(self, raw: dict[str, RawWriter]) -> Iterator[_Work]:
        """All that reads the checkpoint or the live version. Chunks whose rows are all there then get their checksums too."""
        for p, table in self.planned:
            if p.matrix is not None:
                for chunk in range(table.chunks):
                    yield partial(self._quantize_chunk, p, p.matrix, table, chunk)
            elif p.raw is not None:
                for piece in range(p.raw.source.pieces):
                    yield partial(self._read_piece, p, raw[p.spec.name], piece)
        for copied in self.reused.pieces(self.writer.header.tables):
            yield partial(self._copy_piece, copied)

    def _finishing(self) -> Iterator[_Work]:
        """The checksums that wait for rows which are written last."""
        for p, table in self.planned:
            first = 0 if p.matrix is None else p.matrix.rows // table.chunk_rows
            for chunk in range(first, table.chunks):
                if p.raw is not None or table.chunk_range(chunk)[1] > (p.matrix.rows if p.matrix else 0):
                    yield partial(self._finish_chunk, table, chunk)
        for copied in self.reused.unfinished(self.writer.header.tables):
            for chunk in range(copied.chunks):
                yield partial(self._finish_chunk, copied, chunk)
        for index in self.writer.header.indexes:
            for chunk in range(index.chunks):
                yield partial(self._finish_chunk, index, chunk)

    def _finish_chunk(self, stored: StoredRows, chunk: int, buffers: _Buffers) -> None:
        self.writer.finish_chunk(stored, chunk)

    def _raw_writer(self, p: PlannedTable, table: StoredTable) -> RawWriter:
        assert p.raw is not None and table.ids is not None and table.ids.index is not None
        index = table.ids.index
        return RawWriter(p.raw, self.writer.rows(table, 0, table.rows), self.writer.rows(index, 0, index.rows), self.backend)

    def _read_piece(self, p: PlannedTable, raw: RawWriter, piece: int, buffers: _Buffers) -> None:
        assert p.raw is not None
        for block in p.raw.source.blocks(piece):
            if self._stop:
                return
            written = raw.write(block)
            p.default_row.add(block.values if written is None else block.values[written], p.raw.source.source)
            self._done(len(block.ids))

    def _copy_piece(self, piece: Piece, buffers: _Buffers) -> None:
        self._done(self.reused.copy(piece, self.writer))

    def _write_tail(self, p: PlannedTable, matrix: Matrix, table: StoredTable) -> None:
        """The rows that an older version has beyond those of the checkpoint."""
        if p.backfill is not None:
            end = table.rows - p.default_row.is_used
            self.writer.rows(table, matrix.rows, end)[:] = p.backfill.table.packed[matrix.rows : end]

    def _done(self, rows: int) -> None:
        with self._lock:
            self.done_rows += rows
            self.progress(self.done_rows, self.total_rows)

    def _quantize_chunk(self, p: PlannedTable, matrix: Matrix, table: StoredTable, chunk: int, buffers: _Buffers) -> None:
        start, end = table.chunk_range(chunk)
        stop = min(end, matrix.rows)
        if start < stop:
            self._quantize(p, matrix, table, start, stop, buffers)
            self._done(stop - start)
        if stop == end:
            self.writer.finish_chunk(table, chunk)

    def _quantize(self, p: PlannedTable, matrix: Matrix, table: StoredTable, start: int, stop: int, buffers: _Buffers) -> None:
        step = self.checks.step(table.name)  # reads are whole steps: some rows at a chunk's ends are read for both neighbours
        read_rows = max(1, len(buffers.piece) // (matrix.dim * matrix.source.bytes) // step) * step
        end = min(-(-stop // step) * step, matrix.rows)
        for first in range(start // step * step, end, read_rows):
            last = min(first + read_rows, end)
            count = (last - first) * matrix.dim
            values = np.frombuffer(buffers.piece, DTYPES[matrix.source], count).reshape(-1, matrix.dim)
            self.checks.read(table.name, first, last, values, buffers.scratch)
            begin, last = max(first, start), min(last, stop)
            rows = values[begin - first : last - first]
            try:
                self.backend.quantize(rows, matrix.source, p.spec.row_format, self.writer.rows(table, begin, last))
            except NotRepresentable as error:
                raise CheckpointError(f"{self.checkpoint.path}: {matrix.key!r}: {error.describe(begin + error.row)}") from error
            p.default_row.add(rows, matrix.source)
