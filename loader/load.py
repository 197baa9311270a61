"""The load: checkpoint -> quantized chunks -> segment -> version.

Threads take chunks of a table one after another. Each reads a piece of the checkpoint that stays in its core's cache,
quantizes it straight into the segment, and hashes the chunk when its last piece is done. So fp32 never exists whole, and the
private memory of a load is a few pieces a thread, whatever the table's size.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from tableside.loader.checkpoint import Checkpoint, Matrix, open_checkpoint
from tableside.loader.checkpoint.rows import DTYPES
from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.header import Header, StoredTable, plan_tables
from tableside.loader.model import ModelSpec
from tableside.loader.scorer import stored_scorer
from tableside.loader.segment import SegmentWriter
from tableside.loader.verification import Verification
from tableside.loader.versions import Model
from tableside.quant import CpuBackend, QuantError, RowFormat, choose
from tableside.quant.errors import NotRepresentable

PIECE_BYTES = 2 << 20  # smaller: more calls; larger: more memory a thread
Progress = Callable[[int, int], None]  # (rows done, rows in all), from any thread


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
    threads: 0 means one a core; group: users who may read the model, beside its owner.
    """

    threads: int = 0
    max_memory_bytes: int = 64 << 20
    backend: str = "auto"
    activate: bool = True
    group: str | None = None


def load(spec: ModelSpec, root: Path, settings: LoadSettings = LoadSettings(), progress: Progress | None = None) -> Loaded:
    """Publishes a new version of `spec` under `root`.

    LoaderError: model, checkpoint or memory are not as they should be; nothing was published, and no bytes are left behind.
    """
    backend = choose(settings.backend)
    with open_checkpoint(spec.checkpoint) as checkpoint:
        matrices = {t.name: checkpoint.matrix(t.key) for t in spec.tables}
        for matrix in matrices.values():
            checkpoint.open_files(matrix)
        scorer, program = stored_scorer(spec, {name: matrix.dim for name, matrix in matrices.items()})
        model = Model(root, spec.name)
        with model.loading(settings.group) as version:
            started = time.monotonic()
            path = model.partial_path(version)
            try:
                checks = Verification(checkpoint, matrices)
                source = {
                    "path": str(spec.checkpoint),
                    "files": checkpoint.fingerprint(matrices.values()),
                    "verified": checks.describe(),
                }
                steps = {table: checks.step(table) for table in matrices}
                header = replace(_plan(spec, matrices, version, source, steps), scorer=scorer, evaluation=spec.evaluation)
                writer = SegmentWriter(path, header, program, model.create_partial(version))
                try:
                    job = _Load(checkpoint, matrices, checks, writer, backend, settings, progress)
                    job.run()
                    huge = writer.mapping.huge_fraction()
                    header = writer.seal({"seconds": time.monotonic() - started, "source_bytes": float(job.source_bytes)})
                finally:
                    writer.close()
                model.publish(version, settings.activate)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            seconds = time.monotonic() - started
    return Loaded(
        spec.name, version, model.path(version), header, seconds, writer.size, job.source_bytes, huge, writer.mapping.page_bytes
    )


def _plan(spec: ModelSpec, matrices: dict[str, Matrix], version: int, source: dict[str, Any], steps: dict[str, int]) -> Header:
    try:
        shapes = [(t.name, t.key, t.row_format, matrices[t.name].rows, matrices[t.name].dim) for t in spec.tables]
        tables = plan_tables(shapes, steps)
    except QuantError as error:
        raise ModelError(f"model {spec.name!r}: {error}") from error
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Header(spec.name, version, created, tables, spec.features, source)


class _Load:
    """One load's work, shared by its threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        matrices: dict[str, Matrix],
        checks: Verification,
        writer: SegmentWriter,
        backend: CpuBackend,
        settings: LoadSettings,
        progress: Progress | None,
    ) -> None:
        self.checkpoint, self.matrices, self.checks, self.writer, self.backend = checkpoint, matrices, checks, writer, backend
        self.row_formats = {t.name: RowFormat.parse(t.row_format) for t in writer.header.tables}
        self.progress = progress or (lambda done, total: None)
        self.source_bytes = sum(m.bytes for m in matrices.values())
        self.total_rows = sum(m.rows for m in matrices.values())
        self.done_rows = 0
        self.buffer_bytes = max([PIECE_BYTES, *(m.dim * m.source.bytes for m in matrices.values())])
        self.threads = self._threads(settings)
        self._lock = Lock()
        self._chunks = self._all_chunks()
        self._stop = False

    def _threads(self, settings: LoadSettings) -> int:
        wanted = settings.threads or len(os.sched_getaffinity(0))
        each = 3 * self.buffer_bytes  # the chunk that is read, room for column shards, the kernel's scratch
        if settings.max_memory_bytes < each:
            raise ModelError(f"max memory is {settings.max_memory_bytes:,} bytes; a load of this model needs at least {each:,}")
        return max(1, min(wanted, settings.max_memory_bytes // each))

    def _all_chunks(self) -> Iterator[tuple[StoredTable, int]]:
        for table in self.writer.header.tables:
            for chunk in range(table.chunks):
                yield table, chunk

    def run(self) -> None:
        """Quantizes every chunk; raises an error where a thread had one."""
        self.progress(0, self.total_rows)
        with ThreadPoolExecutor(self.threads, thread_name_prefix="tableside-load") as pool:
            futures = [pool.submit(self._work) for _ in range(self.threads)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop = True
        for future in futures:
            future.result()
        self.checks.finish()

    def _work(self) -> None:
        buffer, scratch = bytearray(self.buffer_bytes), bytearray(self.buffer_bytes)
        while not self._stop:
            with self._lock:
                item = next(self._chunks, None)
            if item is None:
                return
            table, chunk = item
            self._quantize(table, *table.chunk_range(chunk), buffer, scratch)
            self.writer.finish_chunk(table, chunk)

    def _quantize(self, table: StoredTable, start: int, stop: int, buffer: bytearray, scratch: bytearray) -> None:
        matrix = self.matrices[table.name]
        step = self.checks.step(table.name)  # reads are whole steps: some rows at a chunk's ends are read for both neighbours
        read_rows = max(1, len(buffer) // (matrix.dim * matrix.source.bytes) // step) * step
        end = min(-(-stop // step) * step, matrix.rows)
        for first in range(start // step * step, end, read_rows):
            last = min(first + read_rows, end)
            count = (last - first) * matrix.dim
            values = np.frombuffer(buffer, DTYPES[matrix.source], count).reshape(-1, matrix.dim)
            self.checks.read(table.name, first, last, values, scratch)
            begin, last = max(first, start), min(last, stop)
            rows = values[begin - first : last - first]
            try:
                self.backend.quantize(rows, matrix.source, self.row_formats[table.name], self.writer.rows(table, begin, last))
            except NotRepresentable as error:
                raise CheckpointError(f"{self.checkpoint.path}: {matrix.key!r}: {error.describe(begin + error.row)}") from error
        with self._lock:
            self.done_rows += stop - start
            self.progress(self.done_rows, self.total_rows)
