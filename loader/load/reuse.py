"""Tables taken over from the live version: those that `tableside load --only TABLE` does not name, and those
that are the same in the checkpoint (loader.load.same).

Files of large tables are read, checked and linked. Other rows and indexes are copied chunk by chunk on all
threads and checked against the live checksums. So damage is not published again. The checkpoint may lack
these tables. Shared memory has no copy on write (tmpfs and hugetlbfs refuse FICLONE), and two threads copy
and check faster than copy_file_range (docs/log.md).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tableside.loader.errors import ModelError, SegmentError, VersionError
from tableside.loader.load.default_rows import DefaultRow
from tableside.loader.load.settings import thread_count
from tableside.loader.model.specs import ModelSpec, TableSpec
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredRows, StoredTable
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.states import check_bare
from tableside.loader.versions.versions import Model
from tableside.quant import CpuBackend

# A table or index of the live version, the one that is written, a chunk of the former
Piece = tuple[StoredRows, StoredRows, int]


class LiveTables:
    """Tables taken over from the live version. tables: name -> stored in `segment` (None: none); unread:
    those that the checkpoint may lack; others: the specification of the loaded ones."""

    def __init__(self, spec: ModelSpec, only: Collection[str], model: Model, backend: CpuBackend) -> None:
        """only: tables to load; empty: all. ModelError: one is missing, or another's specification changed.
        VersionError: none is live. SegmentError: it is damaged."""
        names = [t.name for t in spec.tables]
        if unknown := [name for name in only if name not in names]:
            raise ModelError(
                f"--only {unknown[0]}: model {spec.name!r} has no such table; it has: {', '.join(names)}"
            )
        reused = [t for t in spec.tables if only and t.name not in only]
        self.others = tuple(t for t in spec.tables if t not in reused)
        self.segment = _live(model) if reused else None
        self.tables = (
            {} if self.segment is None else {t.name: checked(t, self.segment, backend) for t in reused}
        )
        self.unread = frozenset(self.tables)
        self._verified: dict[str, Any] = {}

    def add(self, segment: Segment, same: dict[str, StoredTable], verified: dict[str, Any]) -> None:
        """Takes over tables that were read, too. segment: the live version; verified: what verified their
        rows in the checkpoint."""
        self.segment = segment
        self.tables |= same
        self._verified |= verified
        self.others = tuple(t for t in self.others if t.name not in same)

    @property
    def rows(self) -> int:
        """Of all tables that are taken over."""
        return sum(t.rows for t in self.tables.values())

    @property
    def kept(self) -> dict[str, Segment]:
        """Returns the version that has each table, whose file may be linked."""
        return {} if self.segment is None else dict.fromkeys(self.tables, self.segment)

    def check_live(self, model: Model, threads: int) -> None:
        """Verifies the files that may be linked. VersionError: another version was made live since.
        SegmentError: a file is damaged. Caller holds the load lock."""
        if self.segment is None:
            return
        if model.current() != self.segment.header.version:
            raise VersionError(
                f"version {model.current()} of model {model.name!r} went live while tables of version "
                f"{self.segment.header.version} were about to be taken over; load again"
            )
        for file in self.segment.files:
            if file.table in self.tables:
                self.segment.verify_file(file, thread_count(threads))

    def verified(self) -> dict[str, Any]:
        """Returns what verified the rows when they were read, for the tables of which that is known."""
        known = {} if self.segment is None else self.segment.header.source.get("verified")
        unread = {t: known[t] for t in self.unread if t in known} if isinstance(known, dict) else {}
        return unread | self._verified

    def source(self) -> dict[str, Any]:
        """Returns entries of the header's `source`: the version taken over from, per unread table the version
        that read it, and the tables that are the same."""
        if self.segment is None:
            return {}
        header = self.segment.header
        same = sorted(set(self.tables) - self.unread)
        found: dict[str, Any] = {"same": {"version": header.version, "tables": same}} if same else {}
        if not self.unread:
            return found
        before = header.source.get("reused")
        read_in = before.get("tables", {}) if isinstance(before, Mapping) else {}
        tables = {name: read_in.get(name, header.version) for name in sorted(self.unread)}
        return {"reused": {"version": header.version, "tables": tables}} | found

    def pieces(self, header_tables: Collection[StoredTable]) -> Iterator[Piece]:
        """All that is to be copied to these tables. Each piece may be copied by another thread."""
        for to in header_tables:
            if (of := self.tables.get(to.name)) is None:
                continue
            pairs: list[tuple[StoredRows, StoredRows]] = [(of, to)]
            if of.index and to.index:
                pairs.append((of.index, to.index))
            for old, new in pairs:
                for chunk in range(old.chunks):
                    yield old, new, chunk

    def copy(self, piece: Piece, writer: SegmentWriter) -> int:
        """Copies and checks a chunk; returns its rows, 0 of an index. SegmentError: live bytes changed."""
        of, to, chunk = piece
        segment = self.segment
        assert segment is not None
        start, stop = of.chunk_range(chunk)
        if not segment.is_whole(of, start, stop):
            raise SegmentError(
                f"{segment.path}: {segment.describe(of, start, stop)}: the checksum is wrong, so bytes "
                "changed after they were written; load the whole model again, without --only"
            )
        first = of.offset + start * of.row_bytes
        rows = writer.rows(to, start, stop)
        rows.reshape(-1)[:] = segment.mapping.bytes[first : first + rows.size]
        if not isinstance(of, StoredTable):
            return 0
        if of.chunk_rows == to.chunk_rows:
            writer.finish_chunk(to, chunk)
        return stop - start


def _live(model: Model) -> Segment:
    segment = model.attach(verify="header")  # what is taken over is verified as it is copied
    check_bare(model, segment.header.version, "--only")
    if (owner := segment.header.owner) is not None:
        raise ModelError(
            f"version {segment.header.version} of model {model.name!r} is share {owner.number} of "
            f"{owner.owners} of a model; "
            "--only takes tables over from a whole version: load the whole model, without --only"
        )
    return segment


def checked(spec: TableSpec, segment: Segment, backend: CpuBackend) -> StoredTable:
    """Returns the table as the live version has it. ModelError: it is not what `spec` says."""
    header = segment.header
    of_live = f"version {header.version} of model {header.model!r}, which is live,"
    stored = next((t for t in header.tables if t.name == spec.name), None)
    if stored is None:
        raise ModelError(
            f"[tables.{spec.name}]: {of_live} has no such table; load it too, with --only {spec.name}"
        )
    for what, live, wanted in _settings(spec, stored):
        if live != wanted:
            raise ModelError(
                f"[tables.{spec.name}]: {what} is {wanted!r}; {of_live} has {live!r}; load this table too, "
                f"with --only {spec.name}, or the whole model, without --only"
            )
    if spec.missing.policy == "constant" and not _has_vector(spec, segment, stored, backend):
        raise ModelError(
            f"[tables.{spec.name}]: missing is another vector than that of {of_live[:-1]}; load this table "
            f"too, with --only {spec.name}, or the whole model, without --only"
        )
    return stored


def _settings(spec: TableSpec, stored: StoredTable) -> Iterator[tuple[str, object, object]]:
    """Yields (name, live value, specified value); omits how ids were read from the checkpoint."""
    ids, index, raw = stored.ids, stored.index, spec.raw
    yield "key", stored.key, spec.key
    yield "row_format", stored.row_format, spec.row_format.label
    yield "dim", stored.dim, stored.dim if spec.dim is None else spec.dim
    if spec.row_alignment is not None:
        yield "the size of a row (row_alignment)", stored.row_bytes, spec.row_bytes(stored.dim)
    yield "ids", stored.id_kind, spec.id_kind
    if index is not None and raw is not None:
        yield "buckets", index.buckets, raw.buckets
        yield "bucket_ids", index.bucket_ids, raw.bucket_ids or 0
        yield "ttl in seconds", ids and (ids.ttl_s or None), raw.ttl_s
        yield "max_rows", ids and (ids.max_rows or None), raw.max_rows
    yield "missing", "error" if ids is None else ids.missing, str(spec.missing)


def _has_vector(spec: TableSpec, segment: Segment, stored: StoredTable, backend: CpuBackend) -> bool:
    """Returns whether the default row is the vector of the specification, packed."""
    row = np.zeros(stored.row_bytes, np.uint8)
    DefaultRow(replace(spec, raw=None), stored.dim, None).pack(row, backend)
    used = spec.row_format.used_bytes(stored.dim)
    return np.array_equal(row[:used], segment.tables[spec.name].packed[-1][:used])
