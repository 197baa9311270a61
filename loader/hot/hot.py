"""The hot segment: the rows of a version on a disk, or in Redis, that are used most, in memory that the
processes of a host share.

    /dev/shm/tableside-hot-UID/HASH/MODEL/3+7.delta     the seventh over version 3 of the root with this hash
    /dev/shm/tableside-hot-UID/HASH/MODEL/3.counts      what it is made from (loader.hot.counts)

It is a file as a delta is, of the version's own rows in their order, which are found by their row numbers
(quant.rows.hot), and never changes: another one takes its place. Whoever reads it checks that it is over the
very version that is attached.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tableside.loader.errors import AccessError, DamagedRows, SegmentError
from tableside.loader.hot.counts import RowCounts, counted_tables
from tableside.loader.segment.delta import Delta, delta_name
from tableside.loader.segment.delta_writer import write_tables
from tableside.loader.segment.header import Change, checksum
from tableside.loader.segment.segment import Segment, Verify
from tableside.loader.segment.stored import StoredIds, StoredTable, hot_part, plan_index
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.folder import Folder, deltas_of, make_folder
from tableside.loader.versions.verified import verify_once
from tableside.quant import RowFormat
from tableside.quant.contract import Bytes, Ids
from tableside.quant.rows.hot import fill_hot

_SHARED = Path("/dev/shm")
_PARTIAL = ".delta.partial"  # ends the name of one that is being made, by whoever holds the lock
_OVER = "over"  # what the header calls the version's content
_AT_ONCE = 1 << 14  # rows that are copied together
_FILE = re.compile(r"([1-9][0-9]{0,17})(\+|\.counts)")


def hot_path(root: Path, model: str) -> Path:
    """Returns the folder of a model's hot segments, this user's."""
    place = checksum(str(root.resolve()).encode())
    return _SHARED / f"tableside-hot-{os.geteuid()}" / f"{place:016x}" / model


@contextlib.contextmanager
def hot_folder(root: Path, model: str) -> Iterator[Folder]:
    """Opens that folder, a new one if there is none. AccessError: it is another user's."""
    path = hot_path(root, model)
    for folder in (path.parent.parent, path.parent, path):
        make_folder(folder)
    with Folder(path) as opened:
        yield opened


def newest_hot(root: Path, version: Segment) -> int:
    """Returns the number of the newest hot segment over a version; 0: there is none."""
    try:
        with Folder(hot_path(root, version.header.model)) as folder:
            return max(deltas_of(folder, version.header.version), default=0)
    except (FileNotFoundError, AccessError):
        return 0


def counts_of(root: Path, version: Segment) -> RowCounts | None:
    """Returns the counts of a version's rows; None: there are none."""
    try:
        with Folder(hot_path(root, version.header.model)) as folder:
            return RowCounts.opened(folder, version)
    except (FileNotFoundError, AccessError):
        return None


def open_hot(folder: Folder, version: Segment, number: int, verify: Verify) -> Delta | None:
    """Opens a hot segment; None: it is gone, over another version of that number, or of an earlier release.
    SegmentError: it is damaged."""
    name = delta_name(version.header.version, number)
    try:
        hot = Delta(folder.path / name, folder.open(name), "always" if verify == "always" else "header")
    except FileNotFoundError:
        return None
    if hot.change.positions.get(_OVER) != _content(version):
        return None
    if not all(index.numbered for index in hot.segment.header.indexes):
        return None
    if unknown := set(hot.tables) - {t.name for t in counted_tables(version)}:
        raise SegmentError(f"{hot.path} has a table {min(unknown)!r}, which has no hot rows: remove it")
    if verify == "full":
        verify_once(folder, hot.segment)
    return hot


class HotTable(NamedTuple):
    """What a hot segment holds of a table. rows: [n], ascending; read: gives packed rows of some of them."""

    rows: Ids
    read: Callable[[Ids], Bytes]


def write_hot(
    folder: Folder, version: Segment, number: int, tables: Mapping[str, HotTable], source: Delta | None
) -> int:
    """Writes a hot segment and has it take the place of those before it; returns its bytes. The caller holds
    the folder's lock. source: the one before it, of which rows are copied. NoSpace, RowsNotRead: nothing
    stays. SegmentError: bytes of `source` changed; it is removed."""
    name = delta_name(version.header.version, number)
    for left in (one for one in folder.names() if one.endswith(_PARTIAL)):  # of a killed process
        folder.unlink(left)
    change = Change(number, positions={_OVER: _content(version)})
    try:
        with folder.replacing(name) as new:
            size = _write(folder.path / new, folder.create(new), version, change, tables)
            if source is not None:  # now: what changed before the copies were made is found
                source.segment.verify()
    except DamagedRows:
        assert source is not None
        folder.unlink(source.path.name)
        raise
    remove_hot(folder, version.header.version, number)
    return size


def _write(path: Path, fd: int, version: Segment, change: Change, tables: Mapping[str, HotTable]) -> int:
    ids, counted = dict[str, StoredIds](), counted_tables(version)
    for of in (of for of in counted if of.name in tables):
        count = tables[of.name].rows.size
        index = plan_index(RowFormat.parse(of.row_format), of.dim, count, 1, numbered=of.rows)
        ids[of.name] = StoredIds(count, index=index)
    base = replace(version.header, tables=tuple(counted))
    with write_tables(path, fd, base, change, ids, partial(_fill, tables)) as writer:
        writer.seal({})
    return writer.size


def _fill(tables: Mapping[str, HotTable], writer: SegmentWriter, stored: StoredTable) -> None:
    rows, read = tables[stored.name]
    assert stored.index is not None
    packed, marks = writer.rows(stored, 0, stored.rows), writer.rows(stored.index, 0, stored.index.rows)
    for start in range(0, rows.size, _AT_ONCE):
        packed[start : start + _AT_ONCE][: rows.size - start] = read(rows[start : start + _AT_ONCE])
    fill_hot(rows, hot_part(stored.index, marks.reshape(-1)))


def remove_hot(folder: Folder, version: int, until: int) -> None:
    """Removes the hot segments over a version before a number."""
    for number in deltas_of(folder, version):
        if number < until:
            folder.unlink(delta_name(version, number))


def drop_damaged(root: Path, version: Segment, rest: float) -> str:
    """Reads every byte of the hot segments over a version, with rests (`Segment.verify`), and removes those
    that changed; returns what is wrong with them."""
    wrong = ""
    with contextlib.suppress(FileNotFoundError), Folder(hot_path(root, version.header.model)) as folder:
        for number in deltas_of(folder, version.header.version):
            try:
                if (hot := open_hot(folder, version, number, "header")) is not None:
                    hot.segment.verify(rest=rest)
            except SegmentError as error:
                wrong = str(error)
                folder.unlink(delta_name(version.header.version, number))
    return wrong


def clear_hot(root: Path, model: str, versions: Callable[[], Collection[int]]) -> list[Path]:
    """Removes what this user has over other versions than those that there are; returns what was removed."""
    path = hot_path(root, model)
    try:
        folder = Folder(path)
    except FileNotFoundError:
        return []
    with folder:
        names = folder.names()
        there = versions()  # only now: what is made for one that comes meanwhile stays
        gone = [n for n in names if (of := _version(n)) and of not in there]
        for name in gone:
            folder.unlink(name)
    if not there:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
            path.parent.rmdir()
            path.parent.parent.rmdir()
    return [path / name for name in gone]


def _content(version: Segment) -> str:
    return f"{version.content():016x}"


def _version(name: str) -> int:
    """The version that a file is over; 0: of a lock."""
    found = _FILE.match(name)
    return int(found[1]) if found else 0
