"""Where tables lie: the small ones in the segment, a large one in a file of its own, which versions share.

    3.segment    header, checksums, small tables, their id indexes, the scorer's program
    3.1.rows     head of 4096 bytes, rows of the first large table, its id index; zeros to the end of a page

The head of a table's file, little-endian: 8 bytes magic TABLROWS in ASCII; 8 bytes of the whole
file; 8 bytes xxh3-64 of the checksums of its chunks, by which the version that names it knows it; zeros. The
file says nothing of a version, since versions in which the table is the same have links to one file. On a
disk the checksums of its blocks follow (loader.segment.blocks), and smaller tables have files, too.
"""

import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from tableside.loader.errors import SegmentError
from tableside.loader.segment.blocks import sum_bytes
from tableside.loader.segment.header import (
    FILE_HEAD_BYTES,
    PRELUDE,
    Header,
    TableFile,
    align,
    checksum,
)
from tableside.loader.segment.huge_pages import HUGE_PAGE_BYTES
from tableside.loader.segment.stored import StoredTable

CHUNK_BYTES = 1 << 20
LARGEST_HEADER_BYTES = 1 << 30
SPARE_BYTES = 256  # room for what is known only at the end: `load`
LARGE_PAGES = 128  # a table of so many has a file, of which the last page is partly empty
_UNKNOWN = 2**64 - 1  # the longest number, where a file's checksum will be
LARGEST_SEED = 2**63 - 1  # of a file's block checksums; where one will be
_HEAD = struct.Struct("<8sQQ")
HEAD_BYTES = _HEAD.size
_HEAD_MAGIC = b"TABLROWS"


class Files(Protocol):
    """A folder in which the files of a version are made (loader.versions.folder.Folder)."""

    def create(self, name: str) -> int: ...
    def open(self, name: str) -> int: ...
    def exists(self, name: str) -> bool: ...
    def link(self, old: str, new: str) -> bool: ...


def file_name(segment: Path, number: int) -> str:
    """Returns the name of the file of a version's large table `number`, from 1."""
    return f"{segment.name.partition('.segment')[0]}.{number}.rows"


def pack_head(file: TableFile) -> bytes:
    """Returns the first bytes of a table's file."""
    return _HEAD.pack(_HEAD_MAGIC, file.bytes, file.checksum)


def check_head(path: Path, head: bytes, size: int, file: TableFile) -> None:
    """Raises SegmentError for a file that is not the one that the version names. size: its bytes."""
    if size != file.bytes:
        raise SegmentError(
            f"{path}: the file of table {file.table!r} has {size} bytes; the version says {file.bytes}; "
            "publish it again"
        )
    if head != pack_head(file):
        raise SegmentError(
            f"{path}: this is not the file of table {file.table!r} that the version names; it was damaged, "
            "or somebody put it there: publish the version again"
        )


def plan_tables(tables: Iterable[StoredTable]) -> tuple[StoredTable, ...]:
    """Numbers the checksums of tables, then of their indexes; `lay_out` places them. A table's new chunks are
    multiples of its chunk_rows, if they hold that many."""
    stored, chunk = [], 0
    for table in tables:
        chunk_rows = max(1, CHUNK_BYTES // table.row_bytes)
        chunk_rows -= chunk_rows % table.chunk_rows if chunk_rows >= table.chunk_rows else 0
        stored.append(replace(table, chunk_rows=chunk_rows, first_chunk=chunk))
        chunk += stored[-1].chunks
    for i, table in enumerate(stored):
        if table.ids is not None and (index := table.ids.index) is not None:
            stored[i] = replace(table, ids=replace(table.ids, index=replace(index, first_chunk=chunk)))
            chunk += index.chunks
    return tuple(stored)


class Layout(NamedTuple):
    """header: with final offsets; header_bytes: reserved for it; program_at: offset of the scorer's archive;
    segment_bytes: of the segment, whole pages where tables have files."""

    header: Header
    header_bytes: int
    program_at: int
    segment_bytes: int

    @property
    def bytes(self) -> int:
        """Returns the bytes of all files."""
        return self.header.files[-1].end if self.header.files else self.segment_bytes


def lay_out(
    header: Header, program: bytes, page_bytes: int, has_files: bool, on_disk: bool = False
) -> Layout:
    """Places tables, indexes and scorer. page_bytes: of the file system; has_files: large tables get files;
    on_disk: with checksums of their blocks.
    The header's length and the offsets in it depend on each other: sizes grow until they agree."""
    page = page_bytes if on_disk else max(page_bytes, HUGE_PAGE_BYTES)
    large = {t.name for t in header.tables if has_files and _bytes(t) >= LARGE_PAGES * page}
    reserved = align(len(header.to_json()) + SPARE_BYTES, 64)
    while True:
        at = align(PRELUDE.size + reserved + 8 * header.chunks)
        small = [t for t in header.tables if t.name not in large]
        placed, end = _placed(small, at)
        scorer = header.scorer and replace(
            header.scorer, offset=end, bytes=len(program), checksum=checksum(program)
        )
        size = align(end + len(program), page if large else page_bytes)
        files, at = [], size
        for table in (t for t in header.tables if t.name in large):
            found, after = _placed([table], at + FILE_HEAD_BYTES)
            sums = (after, _UNKNOWN, LARGEST_SEED) if on_disk else (0, 0, 0)
            after += sum_bytes(table) if on_disk else 0
            files.append(TableFile(table.name, at, align(after, page) - at, _UNKNOWN, *sums))
            placed, at = placed | found, files[-1].end
        tables = tuple(placed[t.name] for t in header.tables)
        laid_out = replace(header, tables=tables, scorer=scorer, files=tuple(files))
        needed = align(len(laid_out.to_json()) + SPARE_BYTES // 2, 64)
        if needed > LARGEST_HEADER_BYTES:
            raise SegmentError(
                f"model {header.model!r} has {len(tables):,} tables, whose header takes {needed:,} bytes; "
                f"the format holds {LARGEST_HEADER_BYTES:,}: publish it as several models"
            )
        if needed <= reserved:
            return Layout(laid_out, reserved, end, size)
        reserved = needed


def _bytes(table: StoredTable) -> int:
    index = table.index
    return table.bytes + (0 if index is None else index.bytes)


def _placed(tables: Iterable[StoredTable], at: int) -> tuple[dict[str, StoredTable], int]:
    """Places tables, then their indexes, from `at` on; returns them by name, and where they end."""
    placed = {}
    for table in tables:
        placed[table.name] = replace(table, offset=at)
        at += align(table.bytes)
    for name, table in placed.items():
        if table.ids is not None and (index := table.ids.index) is not None:
            placed[name] = replace(table, ids=replace(table.ids, index=replace(index, offset=at)))
            at += align(index.bytes)
    return placed, at
