"""The segment: an immutable file in shared memory that holds a version, without its large tables, which have
files of their own (loader.segment.layout). Numbers are little-endian.

    offset   bytes
    0        8      magic TABLSIDE in ASCII, written last
    8        4      format version, uint32: 1; 2 if ids are not row numbers or buckets lie elsewhere;
                    3 for a delta (loader.segment.delta) and a compacted version; 4 if tables have files,
                    6 if other hosts have rows; 7 if changes are numbered alike on several hosts; 8 if files
                    have checksums of blocks, 5 if those are an older release's; 10 if Redis has rows; 11 if
                    ids are strings; 12 if rows have times; 13 of hot rows (loader.hot.hot)
    12       4      H, uint32: bytes of the header
    16       8      bytes of this file, uint64
    24       8      xxh3-64 of header and checksums
    32       32     zeros
    64       H      header: JSON, padded with spaces (loader.segment.header)
    64 + H   8 C    checksums, uint64: xxh3-64 of each chunk of each table, then of each id index
    ...             each table at its `offset`: rows of `row_bytes` (quant.row_format)
    ...             the id index of each table of raw ids (loader.segment.stored, quant.rows.ids)
    ...             the scorer's program, if any

Each `offset` is a multiple of 4096; gaps are zeros. A chunk has `chunk_rows` rows, the last one fewer. The
tables' files are mapped behind this one, so that an `offset` beyond its bytes lies in one of them.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import DamagedRows, SegmentError
from tableside.loader.segment.blocks import BlockFile, BlockReader
from tableside.loader.segment.header import (
    PRELUDE,
    Change,
    Header,
    TableFile,
    checksum,
)
from tableside.loader.segment.header_checks import check_header, check_prelude
from tableside.loader.segment.layout import HEAD_BYTES, Files, check_head, file_name
from tableside.loader.segment.memory import FileToMap, Mapping, keep_in_memory
from tableside.loader.segment.remote import HostsState
from tableside.loader.segment.stored import StoredRows, StoredTable, row_map
from tableside.quant import RowFormat, Table
from tableside.quant.contract import Bytes

logger = logging.getLogger("tableside")

Verify = Literal["full", "always", "header"]
"""What is read when a file is attached: full: every byte, once a host (loader.versions.verified); always:
every byte; header: the header."""
_READ = os.O_RDONLY | os.O_CLOEXEC
_READ_S = 0.001  # that `Segment.verify` reads between two rests
_NICE = 10  # of a thread that reads with rests: a tenth of a core that others need as well


class SegmentFile(NamedTuple):
    """A file of an attached version. table: the large one whose file it is; None: the segment itself. offset:
    where it is mapped; identity: checksum of what it holds; stored: its tables and indexes."""

    path: Path
    table: str | None
    offset: int
    status: os.stat_result
    identity: int
    stored: tuple[StoredRows, ...]


class Segment:
    """An attached version: mapped, valid while this object or a table of it lives. fd: an open file of it,
    closed here; open_file: opens another one by name. SegmentError: the files are no valid segment. Copies
    are the object itself; a pickle attaches again by the path, SegmentError if another file is there."""

    header: Header
    mapping: Mapping

    def __init__(
        self,
        path: Path,
        verify: Verify = "always",
        fd: int | None = None,
        open_file: Callable[[str], int] | None = None,
    ) -> None:
        """verify: "full" reads every byte, too."""
        self.path = path
        fd = os.open(path, _READ) if fd is None else fd
        try:
            files, header_bytes = self._read_head(fd)
            if self.header.files:
                self.mapping = Mapping(FileToMap(fd, self.mapping.size), size=self.header.files[-1].end)
        finally:
            os.close(fd)
        self.readers: dict[str, BlockReader] = {}  # of tables on a disk
        for number, file in enumerate(self.header.files, 1):
            name = file_name(path, number)
            files.append(
                self._add(name, file, open_file(name) if open_file else os.open(path.parent / name, _READ))
            )
        self.files = tuple(files)
        sums = self.mapping.bytes[PRELUDE.size + header_bytes :][: 8 * self.header.chunks]
        self._checksums: NDArray[np.uint64] = sums.view("<u8")
        if verify != "header":
            self.verify()
        self.tables = {t.name: self._table(t) for t in self.header.tables}

    def _read_head(self, fd: int) -> tuple[list[SegmentFile], int]:
        """Maps the segment and reads its header; returns the first file, and the bytes of the header."""
        status, prelude = os.fstat(fd), os.pread(fd, PRELUDE.size, 0)
        header_bytes = check_prelude(self.path, prelude, status.st_size)
        self.mapping = Mapping(FileToMap(fd, status.st_size))
        self.header = self._read_header(prelude, header_bytes)
        found, stored = PRELUDE.unpack(prelude)[4], self.header.stored_in(None)
        return [SegmentFile(self.path, None, 0, status, found, stored)], header_bytes

    def _add(self, name: str, file: TableFile, fd: int) -> SegmentFile:
        """Maps the file of a table behind those before it. SegmentError: it is not that of the header."""
        path = self.path.parent / name
        try:
            status = os.fstat(fd)
            check_head(path, os.pread(fd, HEAD_BYTES, 0), status.st_size, file)
            self.mapping.add(FileToMap(fd, file.bytes))
            if file.seed:
                self.readers[file.table] = self._reader(path, file, fd)
            elif file.sums_at:
                logger.warning(
                    "%s: an older release wrote it; its rows are read where it is mapped, and one that is "
                    "not in memory holds the process up: load the model again",
                    path,
                )
        finally:
            os.close(fd)
        stored = self.header.stored_in(file)
        return SegmentFile(path, file.table, file.offset, status, file.checksum, stored)

    def _reader(self, path: Path, file: TableFile, fd: int) -> BlockReader:
        """Returns what reads the rows of a table's file. SegmentError: its block checksums changed."""
        (table,) = (t for t in self.header.tables if t.name == file.table)
        mapped = self.mapping.bytes[table.offset : table.offset + table.bytes]
        opened = BlockFile(os.dup(fd), table.offset - file.offset, file.sums_in_file, file.seed)
        reader = BlockReader(opened, table, mapped, name=f"{path}, table {table.name}")
        if checksum(reader.sums()) != file.sums:
            raise SegmentError(
                f"{path}: the block checksums of table {file.table!r} changed after they were written; "
                "activate another version, or publish this one again"
            )
        return reader

    @property
    def base(self) -> "Segment":
        return self

    @property
    def deltas(self) -> tuple[Any, ...]:
        """Returns the deltas over the version, newest first."""
        return ()

    @property
    def change(self) -> Change | None:
        """Returns the last change in the segment; None: unchanged since the load."""
        return self.header.merged

    @property
    def sequence(self) -> int:
        """Returns the sequence of the last delta, also if compacted; 0: none."""
        return 0 if self.change is None else self.change.sequence

    def hosts_state(self) -> HostsState | None:
        """Returns what the state is called by all hosts of its model; None: it is not known how it came
        about."""
        content = self.header.origin or self.base.content()
        if not self.deltas and not self.header.origin:
            return HostsState(content)
        assert self.change is not None, "changes were compacted into it, or lie over it"
        return HostsState(content, self.change.mark) if self.change.mark else None

    @property
    def size(self) -> int:
        return self.mapping.size

    @property
    def shared_bytes(self) -> int:
        """Returns the bytes of files that other versions have as well, as of when they were opened."""
        return sum(file.status.st_size for file in self.files if file.status.st_nlink > 1)

    def __copy__(self) -> "Segment":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Segment":
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _attach_again, (self.path, self.content())

    def _read_header(self, prelude: bytes, header_bytes: int) -> Header:
        data = self.mapping.bytes
        text = data[PRELUDE.size : PRELUDE.size + header_bytes].tobytes()
        try:
            header = Header.from_json(text)
            sums = data[PRELUDE.size + header_bytes :][: 8 * header.chunks]
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RecursionError) as error:
            raise SegmentError(
                f"{self.path}: the header is corrupt ({error}); publish the version again"
            ) from error
        if checksum(text + sums.tobytes()) != PRELUDE.unpack(prelude)[4]:
            raise SegmentError(f"{self.path}: the checksum of the header is wrong; publish the version again")
        try:
            check_header(header, PRELUDE.size + header_bytes + sums.size, self.size)
            if header.format_version > PRELUDE.unpack(prelude)[1]:
                raise SegmentError(
                    f"the header has what format version {header.format_version} has, the file says 1"
                )
        except SegmentError as error:
            raise SegmentError(f"{self.path}: {error}; publish the version again") from None
        return header

    def checksums(self, stored: StoredRows) -> NDArray[np.uint64]:
        """Returns the checksums of the chunks of a table or index."""
        return self._checksums[stored.first_chunk : stored.first_chunk + stored.chunks]

    def content(self) -> int:
        """Returns xxh3-64 over the checksums of rows and scorer; independent of version number and time."""
        h = self.header
        tables = [(t.name, t.row_format, t.dim, t.rows, *((t.ids,) if t.ids else ())) for t in h.tables]
        scorer = h.scorer and (h.scorer.kind, h.scorer.inputs, h.scorer.checksum)
        what = repr((h.model, tables, h.features, scorer, *((h.remote,) if h.remote else ())))
        return checksum(what.encode() + self._checksums.tobytes())

    def program(self) -> bytes:
        """Returns the archive of the scorer. SegmentError: its bytes changed."""
        scorer = self.header.scorer
        assert scorer is not None
        data = self.mapping.bytes[scorer.offset : scorer.offset + scorer.bytes].tobytes()
        if checksum(data) != scorer.checksum:
            raise SegmentError(
                f"{self.path}: the checksum of the scorer is wrong; activate another version, or publish it "
                "again"
            )
        return data

    def _table(self, t: StoredTable) -> Table:
        packed = self.mapping.bytes[t.offset : t.offset + t.bytes].reshape(t.rows, t.row_bytes)
        try:
            return Table(packed, RowFormat.parse(t.row_format), t.dim, row_map(t, self.mapping.bytes, packed))
        except SegmentError as error:
            raise SegmentError(f"{self.path}: {error}; publish the version again") from None

    def is_whole(self, table: StoredRows, start: int, stop: int) -> bool:
        """Reads a chunk; returns whether its checksum is right."""
        first = table.offset + start * table.row_bytes
        data = self.mapping.bytes[first : first + (stop - start) * table.row_bytes]
        return checksum(data) == int(self._checksums[table.first_chunk + start // table.chunk_rows])

    def rows(self, stored: StoredRows, start: int, stop: int) -> Iterator[tuple[int, Bytes]]:
        """Yields (row, rows from there on) of rows [start, stop) of a table, in one piece or more."""
        first = stored.offset + start * stored.row_bytes
        data = self.mapping.bytes[first : first + (stop - start) * stored.row_bytes]
        yield start, data.reshape(-1, stored.row_bytes)

    def need(self, part: NDArray[Any]) -> None:
        """Has a part of `mapping`, of one table or index, be there; here all is."""

    def describe(self, stored: StoredRows, start: int, stop: int) -> str:
        if isinstance(stored, StoredTable):
            return f"table {stored.name!r}, rows [{start}, {stop})"
        owner = next(t.name for t in self.header.tables if t.index == stored)
        return f"the id index of table {owner!r}"

    def verify(self, threads: int = 1, rest: float = 0.0) -> None:
        """Reads every row on `threads` threads; SegmentError names the first chunk with a wrong checksum.
        rest: seconds of rest for each second of reading, so that others have the memory's bandwidth; and they
        have this thread's core before it."""
        for file in self.files:
            self.verify_file(file, threads, rest)

    def verify_file(self, file: SegmentFile, threads: int = 1, rest: float = 0.0) -> None:
        """As `verify`, of what one file holds."""
        if file.table is None and self.header.scorer:
            self.program()
        self._check(file, _chunks(file.stored), threads, rest)

    def verify_indexes(self, *files: SegmentFile) -> None:
        """Verifies id indexes, not rows: a damaged row gives a wrong vector, a damaged index may lead
        anywhere. files: of these; none: of all."""
        for file in files or self.files:
            self._check(file, _chunks(s for s in file.stored if not isinstance(s, StoredTable)))

    def keep_indexes(self, tables: Collection[str]) -> list[str]:
        """Locks the id indexes of tables in memory; returns those of which this process may not."""
        indexes = {t.name: t.index for t in self.header.tables if t.index}
        return [
            name
            for name, index in indexes.items()
            if name in tables
            and not keep_in_memory(self.mapping.bytes[index.offset : index.offset + index.bytes])
        ]

    def _check(
        self,
        file: SegmentFile,
        chunks: Sequence[tuple[StoredRows, int, int]],
        threads: int = 1,
        rest: float = 0.0,
    ) -> None:
        count = len(chunks)
        parts = [chunks[count * n // threads : count * (n + 1) // threads] for n in range(threads)]
        begin = partial(give_way, _NICE) if rest else None
        with ThreadPoolExecutor(threads, "tableside-verify", begin) as pool:
            found = list(pool.map(partial(self._first_corrupt, rest=rest), parts))
        for chunk in filter(None, found):
            raise DamagedRows(
                f"{file.path}: {self.describe(*chunk)}: the checksum is wrong, so bytes changed after they "
                "were written; activate another version, or publish this one again",
                file.path.name,
            )

    def _first_corrupt(
        self, chunks: Sequence[tuple[StoredRows, int, int]], rest: float
    ) -> tuple[StoredRows, int, int] | None:
        began = time.thread_time()
        for chunk in chunks:
            if not self.is_whole(*chunk):
                return chunk
            if rest and (read_s := time.thread_time() - began) > _READ_S:
                time.sleep(rest * read_s)
                began = time.thread_time()
        return None


def open_segment(folder: Files, path: Path, verify: Verify) -> Segment:
    """Opens a segment of a folder. FileNotFoundError: it is not there. SegmentError: it is damaged, or the
    file of a table is gone."""
    try:
        return Segment(path, verify, folder.open(path.name), folder.open)
    except FileNotFoundError as error:
        if not folder.exists(path.name):
            raise
        raise SegmentError(
            f"{path.parent / str(error.filename)} is gone, the file of a table of {path}; activate another "
            "version, or publish this one again"
        ) from error


def _chunks(stored: Iterable[StoredRows]) -> list[tuple[StoredRows, int, int]]:
    """Returns (table or index, first row, end row) of each chunk."""
    return [(rows, *rows.chunk_range(chunk)) for rows in stored for chunk in range(rows.chunks)]


def give_way(nice: int) -> None:
    """Lets others have this thread's core before it, for as long as the thread lives."""
    thread = os.PRIO_PROCESS, threading.get_native_id()
    os.setpriority(*thread, max(nice, os.getpriority(*thread)))


def _attach_again(path: Path, content: int) -> Segment:
    """Attaches a pickled segment. SegmentError: it is gone, or has other rows."""
    return unpickled(path, content, lambda: Segment(path, "header"))


def unpickled(path: Path, content: int, attach: Callable[[], Segment]) -> Segment:
    """Calls `attach` for a pickled path. SegmentError: the file is gone, or its `content` differs."""
    try:
        segment = attach()
    except FileNotFoundError as error:
        raise SegmentError(
            f"{error.filename or path}: the pickled segment is no longer published; publish it again, or "
            "pickle a later one"
        ) from error
    if segment.content() != content:
        raise SegmentError(
            f"{path}: another version was published there since the segment was pickled; pickle it again"
        )
    return segment
