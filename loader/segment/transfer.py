"""Versions and deltas of other hosts, of which chunks are fetched as they are needed.

What a host gives is the *head* of a file (prelude, header and checksums, loader.segment.segment), and chunks
of its tables and id indexes by their numbers. Each chunk is compared with the checksum that the version was
published with. So bytes that changed at the other host, or on their way, are found, and a transfer goes on at
any chunk.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import SegmentError
from tableside.loader.segment.delta import Delta
from tableside.loader.segment.header import PRELUDE, Header, checksum
from tableside.loader.segment.header_checks import check_prelude
from tableside.loader.segment.memory import FileToMap, Mapping
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredRows, index_parts
from tableside.quant.contract import Bytes

REQUEST_BYTES = 4 << 20  # that are asked for at once, of chunks that are no larger
Read = Callable[[int, int, int, int], Any]
"""Gets chunks of a file: its identity, the first, the one after the last, and the bytes that they have."""


def head_of(segment: Segment) -> Bytes:
    """Returns the head of a version's or delta's file."""
    data = segment.mapping.bytes
    header_bytes = PRELUDE.unpack(data[: PRELUDE.size].tobytes())[2]
    return data[: PRELUDE.size + header_bytes + 8 * segment.header.chunks]


def stored_range(header: Header, first: int, end: int) -> tuple[StoredRows, int, int]:
    """Returns the table or index that has chunks [first, end), and which of its rows these are. ValueError:
    none has all of them."""
    for stored in header.stored:
        if stored.first_chunk <= first < end <= stored.first_chunk + stored.chunks:
            start, _ = stored.chunk_range(first - stored.first_chunk)
            return stored, start, stored.chunk_range(end - 1 - stored.first_chunk)[1]
    raise ValueError(f"chunks [{first}, {end}) are not those of one table; the version has {header.chunks}")


class TransferredSegment(Segment):
    """A version or delta of another host. Its tables are zeros but for what `need` fetched; `rows` fetches.
    path: for people. SegmentError: what came is no version, or not its bytes."""

    def __init__(self, path: Path, head: Bytes, read: Read) -> None:
        """What `read` raises is raised here, and by `need` and `rows`."""
        self.path, self.files, self.readers, self._read = path, (), {}, read
        prelude = head[: PRELUDE.size].tobytes()
        size = PRELUDE.unpack(prelude)[3] if len(prelude) == PRELUDE.size else 0
        header_bytes = check_prelude(path, prelude, size)
        self.identity: int = PRELUDE.unpack(prelude)[4]
        self._fd = os.memfd_create("tableside-transfer", os.MFD_CLOEXEC)
        self._map(size)
        self.mapping.bytes[: head.size] = head = head[:size]
        self.header = self._read_header(prelude, header_bytes)
        end = PRELUDE.size + header_bytes + 8 * self.header.chunks
        self._checksums = head[PRELUDE.size + header_bytes : end].view("<u8")
        if self.header.files:
            self._map(self.header.files[-1].end)
        self._need_directories()
        self.tables = {t.name: self._table(t) for t in self.header.tables}

    def _map(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)  # pages take memory once something is written there
            self.mapping = Mapping(FileToMap(self._fd, size, writable=True))
        except (OSError, OverflowError) as error:
            raise SegmentError(f"{self.path}: {size:,} bytes are no size of a version ({error})") from error

    def _need_directories(self) -> None:
        """Fetches what says where rows are, and default rows."""
        for t in self.header.tables:
            if t.ids is not None:
                self.need(self._bytes(t, t.rows - 1, t.rows))
            if t.ids is not None and (index := t.index) is not None:
                directory, _, _, bits = index_parts(index, self._bytes(index, 0, index.rows), t.ids.has_bits)
                self.need(directory)
                self.need(bits)

    def _bytes(self, stored: StoredRows, start: int, stop: int) -> Bytes:
        first = stored.offset + start * stored.row_bytes
        return self.mapping.bytes[first : first + (stop - start) * stored.row_bytes]

    def need(self, part: NDArray[Any]) -> None:
        if not part.size:
            return
        at = part.ctypes.data - self.mapping.address
        stored = next(s for s in self.header.stored if s.offset <= at < s.offset + s.bytes)
        first, end = at - stored.offset, at - stored.offset + part.nbytes
        for start, rows in self._chunks(stored, first // stored.row_bytes, -(-end // stored.row_bytes)):
            self._bytes(stored, start, start + len(rows))[:] = rows.reshape(-1)

    def rows(self, stored: StoredRows, start: int, stop: int) -> Iterator[tuple[int, Bytes]]:
        for first, rows in self._chunks(stored, start, stop):
            begin = max(first, start)
            yield begin, rows[begin - first : stop - first]

    def _chunks(self, stored: StoredRows, start: int, stop: int) -> Iterator[tuple[int, Bytes]]:
        """Fetches and checks the chunks that rows [start, stop) lie in; yields (row, rows from there on)."""
        last = -(-stop // stored.chunk_rows)
        each = max(1, REQUEST_BYTES // (stored.chunk_rows * stored.row_bytes))
        for chunk in range(start // stored.chunk_rows, last, each):
            end = min(chunk + each, last)
            first, after = stored.chunk_range(chunk)[0], stored.chunk_range(end - 1)[1]
            size, before = (after - first) * stored.row_bytes, stored.first_chunk
            data = np.frombuffer(self._read(self.identity, before + chunk, before + end, size), np.uint8)
            if data.size != size:
                raise SegmentError(
                    f"{self.path}: {self.describe(stored, first, after)}: {data.size:,} bytes came; expected "
                    f"{size:,}; fetch them again"
                )
            rows = data.reshape(-1, stored.row_bytes)
            for one in range(chunk, end):
                begin, over = stored.chunk_range(one)
                if checksum(rows[begin - first : over - first]) != int(self.checksums(stored)[one]):
                    raise SegmentError(
                        f"{self.path}: {self.describe(stored, begin, over)}: the checksum is wrong, so "
                        "bytes changed there, or on their way; fetch them again, and if it comes again, look "
                        "there: tableside verify"
                    )
            yield first, rows

    def as_delta(self) -> Delta:
        """Returns the whole delta that this is."""
        for stored in self.header.stored:
            self.need(self._bytes(stored, 0, stored.rows))
        return Delta(self.path, os.dup(self._fd), "header")

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", -1)) >= 0:
            os.close(fd)
