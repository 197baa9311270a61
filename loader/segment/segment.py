"""The segment: one immutable file in shared memory that holds a version. Numbers are little-endian.

    offset   bytes
    0        8      magic TABLSIDE in ASCII, written last
    8        4      format version, uint32: 1; 2 if ids are not row numbers or buckets lie elsewhere;
                    3 for a delta (loader.segment.delta) and a compacted version
    12       4      H, uint32: bytes of the header
    16       8      bytes of the whole file, uint64
    24       8      xxh3-64 of header and checksums
    32       32     zeros
    64       H      header: JSON, padded with spaces (loader.segment.header)
    64 + H   8 C    checksums, uint64: xxh3-64 of each chunk of each table, then of each id index
    ...             each table at its `offset`: rows of `row_bytes` (quant.row_format)
    ...             the id index of each table of raw ids (loader.segment.stored, quant.rows.ids)
    ...             the scorer's program, if any

Each `offset` is a multiple of 4096; gaps are zeros. A chunk has `chunk_rows` rows, the last one fewer.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import SegmentError
from tableside.loader.segment.header import (
    PRELUDE,
    TABLE_ALIGNMENT_BYTES,
    Change,
    Header,
    align,
    check_header,
    checksum,
    lay_out,
)
from tableside.loader.segment.huge_pages import huge_page_bytes
from tableside.loader.segment.memory import Mapping, reserve
from tableside.loader.segment.stored import StoredRows, StoredTable, row_map
from tableside.quant import RowFormat, Table
from tableside.quant.contract import Bytes

MAGIC, FORMAT_VERSION = b"TABLSIDE", 3

Verify = Literal["full", "always", "header"]
"""What is read when a file is attached: full: every byte, once a host (loader.versions.verified); always:
every byte; header: the header."""
_READ_S = 0.001  # that `Segment.verify` reads between two rests
_NICE = 10  # of a thread that reads with rests: a tenth of a core that others need as well


class SegmentWriter:
    """A new segment at `path`, with all bytes reserved. The caller writes every chunk of `header.stored` with
    `rows`, and may call `finish_chunk` once one is written (any thread); then it calls `seal`. program: the
    scorer's archive. fd: an empty file at `path`, closed here; None: it is created. NoSpace: at most an empty
    file stays."""

    def __init__(self, path: Path, header: Header, program: bytes = b"", fd: int | None = None) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600) if fd is None else fd
        try:
            self.header, self._header_bytes, end = lay_out(header, program)
            self.size = align(end + len(program), huge_page_bytes(self._fd) or TABLE_ALIGNMENT_BYTES)
            self._checksums, self._has_sum = np.zeros(header.chunks, "<u8"), np.zeros(header.chunks, np.bool_)
            self.mapping = reserve(self._fd, self.size, path.parent)
            self.mapping.bytes[end : end + len(program)] = np.frombuffer(program, np.uint8)
        except BaseException:
            os.close(self._fd)
            raise

    def rows(self, table: StoredRows, start: int, stop: int) -> Bytes:
        """Returns rows [start, stop) of a table or index as writable uint8 [rows, row_bytes]."""
        first = table.offset + start * table.row_bytes
        part = self.mapping.bytes[first : first + (stop - start) * table.row_bytes]
        return part.reshape(-1, table.row_bytes)

    def finish_chunk(self, table: StoredRows, chunk: int) -> None:
        """Stores the checksum of a completely written chunk."""
        at = table.first_chunk + chunk
        self._checksums[at], self._has_sum[at] = checksum(self.rows(table, *table.chunk_range(chunk))), True

    def finish_rest(self, threads: int = 1) -> None:
        """Stores the checksums of the chunks that have none yet."""
        chunks = ((stored, n) for stored in self.header.stored for n in range(stored.chunks))
        left = [(stored, n) for stored, n in chunks if not self._has_sum[stored.first_chunk + n]]
        with ThreadPoolExecutor(threads, "tableside-checksum") as pool:
            list(pool.map(lambda chunk: self.finish_chunk(*chunk), left))

    def seal(self, load: dict[str, float]) -> Header:
        """Writes the checksums that are left, header, checksums, then the magic, and makes the file
        read-only. Returns the final header."""
        self.finish_rest()
        self.header = replace(self.header, load=load)
        text = self.header.to_json()
        if len(text) > self._header_bytes:
            raise SegmentError(
                f"{self.path}: the header grew to {len(text)} bytes; {self._header_bytes} were reserved"
            )
        text = text.ljust(self._header_bytes)
        sums = self._checksums.tobytes()
        data = self.mapping.bytes
        data[PRELUDE.size : PRELUDE.size + len(text) + len(sums)] = np.frombuffer(text + sums, np.uint8)
        prelude = PRELUDE.pack(MAGIC, self.header.format_version, len(text), self.size, checksum(text + sums))
        data[8 : PRELUDE.size] = np.frombuffer(prelude[8:], np.uint8)
        data[:8] = np.frombuffer(prelude[:8], np.uint8)
        os.fchmod(self._fd, os.fstat(self._fd).st_mode & 0o440)
        self.close()
        return self.header

    def close(self) -> None:
        """Closes the file; its mapping goes with the last array over it. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "SegmentWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Segment:
    """An attached version: mapped, valid while this object or a table of it lives. fd: an open file of it,
    closed here. SegmentError: the file is no valid segment (docs/format.md). Copies are the object itself; a
    pickle holds the path and attaches again, with SegmentError if another file is there."""

    def __init__(self, path: Path, verify: Verify = "always", fd: int | None = None) -> None:
        """verify: "full" reads every byte, too."""
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
        try:
            self.file = os.fstat(fd)
            size = self.file.st_size
            prelude = os.pread(fd, PRELUDE.size, 0)
            header_bytes = _check_prelude(path, prelude, size)
            self.mapping = Mapping(fd, size)
        finally:
            os.close(fd)
        self.header_checksum = PRELUDE.unpack(prelude)[4]
        self.header, self._checksums = self._read_header(prelude, header_bytes)
        if verify != "header":
            self.verify()
        self.tables = {t.name: self._table(t) for t in self.header.tables}

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

    @property
    def size(self) -> int:
        return self.mapping.size

    def __copy__(self) -> "Segment":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Segment":
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _attach_again, (self.path, self.content())

    def _read_header(self, prelude: bytes, header_bytes: int) -> tuple[Header, NDArray[np.uint64]]:
        data = self.mapping.bytes
        text = data[PRELUDE.size : PRELUDE.size + header_bytes].tobytes()
        try:
            header = Header.from_json(text)
            sums = data[PRELUDE.size + header_bytes :][: 8 * header.chunks]
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RecursionError) as error:
            raise SegmentError(
                f"{self.path}: the header is corrupt ({error}); publish the version again"
            ) from error
        if checksum(text + sums.tobytes()) != self.header_checksum:
            raise SegmentError(f"{self.path}: the checksum of the header is wrong; publish the version again")
        try:
            check_header(header, PRELUDE.size + header_bytes + sums.size, self.size)
            if header.format_version > PRELUDE.unpack(prelude)[1]:
                raise SegmentError(
                    f"the header has what format version {header.format_version} has, the file says 1"
                )
        except SegmentError as error:
            raise SegmentError(f"{self.path}: {error}; publish the version again") from None
        return header, sums.view("<u8")

    def content(self) -> int:
        """Returns xxh3-64 over the checksums of rows and scorer; independent of version number and time."""
        h = self.header
        tables = [(t.name, t.row_format, t.dim, t.rows, *((t.ids,) if t.ids else ())) for t in h.tables]
        scorer = h.scorer and (h.scorer.kind, h.scorer.inputs, h.scorer.checksum)
        what = repr((h.model, tables, h.features, scorer))
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

    def chunks(self) -> Iterator[tuple[StoredRows, int, int]]:
        """Yields (table or index, first row, end row) of each chunk."""
        for stored in self.header.stored:
            for chunk in range(stored.chunks):
                yield stored, *stored.chunk_range(chunk)

    def is_whole(self, table: StoredRows, start: int, stop: int) -> bool:
        """Reads a chunk; returns whether its checksum is right."""
        first = table.offset + start * table.row_bytes
        data = self.mapping.bytes[first : first + (stop - start) * table.row_bytes]
        return checksum(data) == int(self._checksums[table.first_chunk + start // table.chunk_rows])

    def describe(self, stored: StoredRows, start: int, stop: int) -> str:
        if isinstance(stored, StoredTable):
            return f"table {stored.name!r}, rows [{start}, {stop})"
        owner = next(t.name for t in self.header.tables if t.ids is not None and t.ids.index == stored)
        return f"the id index of table {owner!r}"

    def verify(self, threads: int = 1, rest: float = 0.0) -> None:
        """Reads every row on `threads` threads; SegmentError names the first chunk with a wrong checksum.
        rest: seconds of rest for each second of reading, so that others have the memory's bandwidth; and they
        have this thread's core before it."""
        if self.header.scorer:
            self.program()
        self._check(list(self.chunks()), threads, rest)

    def verify_indexes(self) -> None:
        """Verifies id indexes, not rows: a damaged row gives a wrong vector, a damaged index may lead
        anywhere."""
        self._check([chunk for chunk in self.chunks() if not isinstance(chunk[0], StoredTable)])

    def _check(
        self, chunks: Sequence[tuple[StoredRows, int, int]], threads: int = 1, rest: float = 0.0
    ) -> None:
        count = len(chunks)
        parts = [chunks[count * n // threads : count * (n + 1) // threads] for n in range(threads)]
        with ThreadPoolExecutor(threads, "tableside-verify", _give_way if rest else None) as pool:
            found = list(pool.map(partial(self._first_corrupt, rest=rest), parts))
        for chunk in filter(None, found):
            raise SegmentError(
                f"{self.path}: {self.describe(*chunk)}: the checksum is wrong, so bytes changed after they "
                "were written; activate another version, or publish this one again"
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


def _give_way() -> None:
    """Lets others have this thread's core before it, for as long as the thread lives."""
    thread = os.PRIO_PROCESS, threading.get_native_id()
    os.setpriority(*thread, max(_NICE, os.getpriority(*thread)))


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


def _check_prelude(path: Path, prelude: bytes, size: int) -> int:
    """Checks the prelude before mapping; returns the bytes of the header."""
    if len(prelude) < PRELUDE.size:
        raise SegmentError(
            f"{path}: {len(prelude)} bytes are too few for a segment; it was truncated or never written"
        )
    magic, version, header_bytes, recorded, _ = PRELUDE.unpack(prelude)
    if magic != MAGIC:
        raise SegmentError(
            f"{path}: expected the magic {MAGIC!r}, found {magic!r}; this is not a finished segment"
        )
    if not 1 <= version <= FORMAT_VERSION:
        raise SegmentError(
            f"{path}: segment format version {version}, this tableside reads 1 to {FORMAT_VERSION}; publish "
            "it again with this release"
        )
    if recorded != size:
        raise SegmentError(
            f"{path}: the file has {size} bytes, its header says {recorded}; it was truncated, publish it "
            "again"
        )
    if PRELUDE.size + header_bytes > size:
        raise SegmentError(
            f"{path}: a header of {header_bytes} bytes does not fit in {size}; publish it again"
        )
    return int(header_bytes)
