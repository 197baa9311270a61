"""Writes a new version, or a delta: the segment and the files of large tables (loader.segment.layout)."""

import os
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import SegmentError
from tableside.loader.segment.blocks import sum_bytes, write_sums, write_sums_between
from tableside.loader.segment.header import MAGIC, PRELUDE, TABLE_ALIGNMENT_BYTES, Header, TableFile, checksum
from tableside.loader.segment.huge_pages import huge_page_bytes, is_on_disk
from tableside.loader.segment.layout import LARGEST_SEED, Files, file_name, lay_out, pack_head
from tableside.loader.segment.memory import FileToMap, reserve
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredRows, StoredTable
from tableside.quant.contract import Bytes


class SegmentWriter:
    """A new segment at `path`, with all bytes reserved. The caller writes every chunk of `header.stored` with
    `rows`, but for tables that are `linked`, and may call `finish_chunk` once one is written (any thread);
    then it calls `seal`. program: the scorer's archive. fd: an empty file at `path`, closed here; None: it is
    created. folder: of `path`, where large tables get files; None: all lie in one. kept: versions whose files
    are linked where a table is theirs, by table. node: the NUMA node of new files; None: any. NoSpace: at
    most empty files stay."""

    def __init__(
        self,
        path: Path,
        header: Header,
        program: bytes = b"",
        fd: int | None = None,
        folder: Files | None = None,
        kept: Mapping[str, Segment] = MappingProxyType({}),
        node: int | None = None,
    ) -> None:
        self.path, self._node = path, node
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fds = [os.open(path, flags, 0o600) if fd is None else fd]
        self.linked: set[str] = set()
        try:
            page = huge_page_bytes(self._fds[0]) or TABLE_ALIGNMENT_BYTES
            layout = lay_out(header, program, page, folder is not None, is_on_disk(self._fds[0]))
            self.header, self._header_bytes, end, size = layout
            self._files = {file.table: _seeded(file) for file in self.header.files}
            self._checksums, self._has_sum = np.zeros(header.chunks, "<u8"), np.zeros(header.chunks, np.bool_)
            files = [FileToMap(self._fds[0], size, True, node)]
            for number, file in enumerate(self.header.files, 1):
                assert folder is not None
                files.append(self._opened(folder, number, file, kept.get(file.table)))
            self.size = layout.bytes
            self.mapping = reserve(files, path.parent)
            self.mapping.bytes[end : end + len(program)] = np.frombuffer(program, np.uint8)
        except BaseException:
            self.close()
            raise

    def _opened(self, folder: Files, number: int, file: TableFile, of: Segment | None) -> FileToMap:
        """Returns the file of a large table: that of a version which has the same one, or a new one."""
        name = file_name(self.path, number)
        is_linked = of is not None and self._take_over(folder, name, file, of)
        self._fds.append(folder.open(name) if is_linked else folder.create(name))
        return FileToMap(self._fds[-1], file.bytes, not is_linked, self._node)

    def _take_over(self, folder: Files, name: str, file: TableFile, of: Segment) -> bool:
        """Links a table's file in the version `of`; False: it has another form, or may not be linked."""
        before = next((f for f in of.files[1:] if f.table == file.table), None)
        said = next((f for f in of.header.files if f.table == file.table), None)
        if before is None or said is None or before.status.st_size != file.bytes:
            return False
        if said.sums_in_file != file.sums_in_file or bool(said.seed) != bool(file.seed):
            return (
                False  # one of them lies in memory, where blocks have no checksums, or is of an older format
            )
        stored = self.header.stored_in(file)
        shapes = [
            [(s.offset - first, s.rows, s.row_bytes, s.chunk_rows) for s in part]
            for part, first in ((stored, file.offset), (before.stored, before.offset))
        ]
        if shapes[0] != shapes[1] or not folder.link(before.path.name, name):
            return False
        for new, old in zip(stored, before.stored, strict=True):
            self._sums_of(new)[:] = of.checksums(old)
            self._has_sum[new.first_chunk : new.first_chunk + new.chunks] = True
        self._files[file.table] = replace(file, sums=said.sums, seed=said.seed)
        self.linked.add(file.table)
        return True

    @property
    def sizes(self) -> list[tuple[str | None, int]]:
        """Returns the bytes of each file: the segment's (None), then those of large tables."""
        files = self.header.files
        segment = files[0].offset if files else self.size
        return [(None, segment), *((file.table, file.bytes) for file in files)]

    def _sums_of(self, stored: StoredRows) -> NDArray[np.uint64]:
        return self._checksums[stored.first_chunk : stored.first_chunk + stored.chunks]

    def rows(self, table: StoredRows, start: int, stop: int) -> Bytes:
        """Returns rows [start, stop) of a table or index as writable uint8 [rows, row_bytes]."""
        first = table.offset + start * table.row_bytes
        part = self.mapping.bytes[first : first + (stop - start) * table.row_bytes]
        return part.reshape(-1, table.row_bytes)

    def finish_chunk(self, table: StoredRows, chunk: int) -> None:
        """Stores the checksum of a completely written chunk."""
        at = table.first_chunk + chunk
        rows = self.rows(table, *table.chunk_range(chunk))
        self._checksums[at], self._has_sum[at] = checksum(rows), True
        if isinstance(table, StoredTable) and (file := self._files.get(table.name)) and file.seed:
            start, stop = (row * table.row_bytes for row in table.chunk_range(chunk))
            write_sums(self._bytes_of(table), start, stop, file.seed, self._block_sums(file, table))

    def _bytes_of(self, table: StoredTable) -> Bytes:
        return self.mapping.bytes[table.offset : table.offset + table.bytes]

    def _block_sums(self, file: TableFile, table: StoredTable) -> NDArray[np.uint32]:
        return self.mapping.bytes[file.sums_at : file.sums_at + sum_bytes(table)].view("<u4")

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
        data, files = self.mapping.bytes, []
        tables = {table.name: table for table in self.header.tables}
        for file in self._files.values():
            stored = [self._sums_of(s) for s in self.header.stored_in(file)]
            if file.seed and file.table not in self.linked:
                table = tables[file.table]
                of_blocks = self._block_sums(file, table)
                write_sums_between(self._bytes_of(table), table, file.seed, of_blocks)
                file = replace(file, sums=checksum(of_blocks))
            files.append(replace(file, checksum=checksum(np.concatenate(stored))))
            if file.table not in self.linked:
                head = np.frombuffer(pack_head(files[-1]), np.uint8)
                data[file.offset : file.offset + head.size] = head
        self.header = replace(self.header, load=load, files=tuple(files))
        text = self.header.to_json()
        if len(text) > self._header_bytes:
            raise SegmentError(
                f"{self.path}: the header grew to {len(text)} bytes; {self._header_bytes} were reserved"
            )
        text = text.ljust(self._header_bytes)
        sums = self._checksums.tobytes()
        data[PRELUDE.size : PRELUDE.size + len(text) + len(sums)] = np.frombuffer(text + sums, np.uint8)
        size = self.sizes[0][1]
        prelude = PRELUDE.pack(MAGIC, self.header.format_version, len(text), size, checksum(text + sums))
        data[8 : PRELUDE.size] = np.frombuffer(prelude[8:], np.uint8)
        data[:8] = np.frombuffer(prelude[:8], np.uint8)
        for fd, name in zip(self._fds, (None, *(f.table for f in files)), strict=True):
            if name not in self.linked:
                os.fsync(fd)  # on a disk; in memory this is nothing
                os.fchmod(fd, os.fstat(fd).st_mode & 0o440)
        self.close()
        return self.header

    def close(self) -> None:
        """Closes the files; their mapping goes with the last array over it. Safe to call twice."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> "SegmentWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _seeded(file: TableFile) -> TableFile:
    """The same with a seed of its own, where its blocks have checksums."""
    return replace(file, seed=1 + secrets.randbelow(LARGEST_SEED)) if file.sums_at else file
