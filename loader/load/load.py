"""The load: checkpoint -> quantized chunks -> segment -> version.

Threads take chunks of a table. Each reads a piece that fits its core's cache, quantizes it into the segment,
and hashes the chunk after its last piece. So private memory is a few pieces per thread. Indexes of raw ids
are built by `loader.load.raw_ids`; tables not to be read again are copied by `loader.load.reuse`.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

from tableside.loader.checkpoint import Checkpoint, open_checkpoint
from tableside.loader.checkpoint.contents import fingerprint, sample
from tableside.loader.errors import ModelError
from tableside.loader.load.in_redis import tables_in_redis
from tableside.loader.load.origin import spec_digest
from tableside.loader.load.parts import MatrixLoad, PieceBuffers, RawLoad, RedisLoad, Work
from tableside.loader.load.plan import PlannedTable, Sources, plan, stored_table
from tableside.loader.load.raw_ids import RawTable
from tableside.loader.load.reuse import LiveTables, Piece
from tableside.loader.load.same import add_same
from tableside.loader.load.scorer import stored_scorer
from tableside.loader.load.settings import DEFAULTS, PIECE_BYTES, LoadSettings, Progress, threads_of
from tableside.loader.load.share import whole_name
from tableside.loader.load.verification import Verification
from tableside.loader.model.specs import ModelSpec
from tableside.loader.segment.header import Header, Owner
from tableside.loader.segment.layout import plan_tables
from tableside.loader.segment.numa import chosen_nodes
from tableside.loader.segment.remote import RemoteTable
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.versions import Model
from tableside.quant import CpuBackend, choose


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
            if aged := [
                t.name for t in reused.others if t.raw and t.raw.has_times and unlike.keyed[t.name].has_ages
            ]:
                source["aged"] = aged
            steps = {table: checks.step(table) for table in unlike.matrices}
            header = replace(
                _header(spec, planned, reused, version, source, steps),
                scorer=scorer,
                evaluation=spec.evaluation,
                disk_timeout_s=spec.disk_timeout_s or 0,
                owner=None if spec.share is None else Owner(whole_name(spec), version, *spec.share),
                remote=(*remote, *tables_in_redis(planned, model, backend)),
            )
            with model.writer(version, header, program, reused.kept, nodes) as writer:
                Load(checkpoint, checks, writer, backend, settings, progress).run(planned, reused)
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
    if only and (in_redis := [t.name for t in spec.tables if t.redis]):
        raise ModelError(
            f"--only {only[0]}: table {in_redis[0]!r} has its rows in Redis, which each load writes anew; "
            "load the whole model, without --only"
        )
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
        tables[p.spec.name] = stored_table(p.spec, p.rows, p.dim, p.ids, steps.get(p.spec.name, 1))
    placed = plan_tables(tables[t.name] for t in spec.tables if not t.redis)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Header(spec.name, version, created, placed, spec.features, source)


class Load:
    """One load's work, shared by threads. Per table: any thread takes work of `reading`, then one calls
    `complete`. rows: of the source; buffer_bytes: private memory per thread; now: when rows are loaded."""

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
        self.now = settings.clock()
        self._settings, self._progress, self._done_rows, self._total_rows = settings, progress, 0, 0
        self.is_stopping, self._lock = False, Lock()

    def run(self, planned: list[PlannedTable], reused: LiveTables) -> None:
        """Writes every row and takes the checksums; raises a thread's error."""
        stored = {t.name: t for t in self.writer.header.tables}
        remote = {t.name: t for t in self.writer.header.remote}
        parts: list[RawLoad | MatrixLoad] = [
            RawLoad(self, p, p.source, stored[p.spec.name])
            if isinstance(p.source, RawTable)
            else MatrixLoad(self, p, p.source, stored[p.spec.name])
            if p.spec.redis is None
            else RedisLoad(self, p, p.source, remote[p.spec.name])
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

    def _share(self, items: Iterator[Work]) -> None:
        with ThreadPoolExecutor(self._threads, thread_name_prefix="tableside-load") as pool:
            futures = [pool.submit(self._work, items) for _ in range(self._threads)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self.is_stopping = True
        for future in futures:
            future.result()
        self.is_stopping = False

    def _work(self, items: Iterator[Work]) -> None:
        buffers = PieceBuffers(bytearray(self._buffer_bytes), bytearray(self._buffer_bytes))
        while not self.is_stopping:
            with self._lock:
                item = next(items, None)
            if item is None:
                return
            item(buffers)

    def _copy(self, reused: LiveTables, piece: Piece, buffers: PieceBuffers) -> None:
        self.done(reused.copy(piece, self.writer))

    def done(self, rows: int) -> None:
        """Counts rows that were written. Any thread may call."""
        with self._lock:
            self._done_rows += rows
            self._progress(self._done_rows, self._total_rows)
