"""Deltas: small immutable files of rows that override or extend a version's.

    ROOT/MODEL/3+17.delta           delta 17 over version 3

A delta has the format of a version (loader.segment.segment). For each table that it changes it holds a table
of raw ids: for each id a row in the table's format, or a bit for a deleted id; and a filter
(quant.rows.overlay). It lies over the version, or over one other delta and then holds all later changes. So a
reader uses two deltas at most, the newer and smaller one first.
"""

import contextlib
import fcntl
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tableside.loader.errors import SegmentError
from tableside.loader.segment.header import Change, checksum
from tableside.loader.segment.memory import MappedWindow
from tableside.loader.segment.segment import Segment, Verify, unpickled
from tableside.loader.segment.stored import filter_part, hot_part, marks_part
from tableside.quant import Table
from tableside.quant.contract import Bytes
from tableside.quant.rows.hot import HotRows
from tableside.quant.rows.ids import RowMap
from tableside.quant.rows.overlay import Overlay, OverlayLayer

SUFFIX = ".delta"


def delta_name(version: int, sequence: int) -> str:
    return f"{version}+{sequence}{SUFFIX}"


def parse_delta_name(name: str) -> tuple[int, int] | None:
    """Returns (version, sequence) of a delta's file name, or None."""
    version, plus, sequence = name.removesuffix(SUFFIX).partition("+")
    are_numbers = all(n.isdecimal() and n.isascii() for n in (version, sequence))
    if not (name.endswith(SUFFIX) and plus and are_numbers):
        return None
    return int(version), int(sequence)


class Delta:
    """An attached delta, mapped. Closes `fd`. SegmentError: the file is damaged, or its name does not fit
    it."""

    def __init__(self, path: Path, fd: int, verify: Verify = "always") -> None:
        self.path = path
        self._fd = fd
        self.segment = Segment(path, verify, os.dup(fd))
        header = self.segment.header
        if header.delta is None:
            raise SegmentError(
                f"{path} is a version, not a delta; somebody put it there under another name: remove it"
            )
        self.change: Change = header.delta
        self.tables = {t.name: t for t in header.tables}
        if (named := parse_delta_name(path.name)) != (found := (header.version, self.change.sequence)):
            raise SegmentError(
                f"{path} holds delta {found[1]} over version {found[0]}; its name says {named}: remove it"
            )

    @property
    def sequence(self) -> int:
        return self.change.sequence

    @property
    def entries(self) -> int:
        """Returns the number of ids overridden, inserted or deleted, over all tables."""
        return sum(t.id_count for t in self.segment.header.tables)

    def layer(self, name: str, base: Table) -> OverlayLayer:
        """Returns the delta's layer over table `name`, read beside `base`. SegmentError: rows are packed
        otherwise, or are hot ones."""
        return self._layer(name, *self._beside(name, base), base)

    def hot_rows(self, name: str, base: Table) -> HotRows:
        """Returns the rows of a hot segment (loader.hot.hot), as `layer`. SegmentError: it is a delta."""
        return self._hot(name, *self._beside(name, base), base.rows)

    def own_hot_rows(self, name: str, rows: int) -> HotRows:
        """Returns the same with slots as row numbers, for callers that do not look rows up. rows: of the
        version's table."""
        return self._hot(name, self.segment.tables[name].packed, 0, rows)

    def _beside(self, name: str, base: Table) -> tuple[Bytes, int]:
        """Returns a table's rows where they lie some rows away from `base`, and how many."""
        stored, table = self.tables[name], self.segment.tables[name]
        if (table.row_format, table.dim, table.row_bytes) != (base.row_format, base.dim, base.row_bytes):
            formats = [f"{t.row_format.label} of dim {t.dim} in {t.row_bytes} bytes" for t in (table, base)]
            raise SegmentError(
                f"{self.path}: table {name!r} has rows of {formats[0]}; those of the version are {formats[1]}"
            )
        window = MappedWindow(self._fd, stored.offset, stored.bytes, base.address, stored.row_bytes)
        packed = window.bytes.reshape(stored.rows, stored.row_bytes)
        return packed, (packed.ctypes.data - base.address) // stored.row_bytes

    def own_layer(self, name: str) -> OverlayLayer:
        """Returns the layer with row numbers from 0, for callers that do not look rows up."""
        return self._layer(name, self.segment.tables[name].packed, 0)

    def _hot(self, name: str, packed: Bytes, first_row: int, rows: int) -> HotRows:
        at = self.tables[name].index
        if at is None or at.numbered != rows:
            raise SegmentError(
                f"{self.path}: table {name!r} has no marks of hot rows, or not of {rows} rows: remove it"
            )
        marks = hot_part(at, self.segment.mapping.bytes[at.offset : at.offset + at.bytes])
        return HotRows(marks, packed[: at.slots], first_row)

    def _layer(self, name: str, packed: Bytes, first_row: int, base: Table | None = None) -> OverlayLayer:
        stored, row_map = self.tables[name], self.segment.tables[name].row_map
        if row_map is None or (index := row_map.index) is None:
            raise SegmentError(f"{self.path} holds hot rows, and is no delta: remove it")
        assert stored.ids is not None and stored.ids.index is not None
        at = stored.ids.index
        data = self.segment.mapping.bytes[at.offset : at.offset + at.bytes]
        words, marks = filter_part(at, data, stored.ids.has_bits), None
        if base is not None and at.marked:
            first, count = base.row_numbers
            if count != at.marked:
                raise SegmentError(
                    f"{self.path}: table {stored.name!r} has marks of {at.marked} rows; those of the version "
                    f"are {count}"
                )
            marks = marks_part(at, data, stored.ids.has_bits, first)
        return OverlayLayer(index, packed, words, index.backfilled, first_row, marks)

    def hold(self) -> None:
        """Has the file stay until this object goes (loader.versions.retention), unless it is being
        removed."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", -1)) >= 0:
            os.close(fd)


class OverlaidSegment(Segment):
    """A version with deltas over it, newest first; shares the version's mapping."""

    def __init__(self, base: Segment, tables: dict[str, Table], deltas: tuple[Delta, ...]) -> None:
        self.__dict__ = {**base.__dict__, "tables": tables}
        self._base, self._deltas = base, deltas

    @property
    def base(self) -> Segment:
        return self._base

    @property
    def deltas(self) -> tuple[Delta, ...]:
        return self._deltas

    @property
    def change(self) -> Change | None:
        return self._deltas[0].change

    def content(self) -> int:
        parts = [self._base.content(), *(delta.segment.content() for delta in self._deltas)]
        return checksum(b"".join(part.to_bytes(8, "little") for part in parts))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _attach_again, (self.path, [delta.path for delta in self._deltas], self.content())


def _attach_again(path: Path, deltas: list[Path], content: int) -> Segment:
    """Attaches a pickled state. SegmentError: a part of it is gone, or has other rows."""

    def attach() -> Segment:
        opened = [Delta(d, os.open(d, os.O_RDONLY | os.O_CLOEXEC), "header") for d in deltas]
        return overlaid(Segment(path, "header"), opened)

    return unpickled(path, content, attach)


def overlaid(base: Segment, deltas: Sequence[Delta]) -> Segment:
    """Returns `base` under deltas (newest first, at least one). SegmentError: a delta's tables do not fit."""
    tables = dict(base.tables)
    for delta in deltas:
        if unknown := sorted(set(delta.tables) - set(tables)):
            raise SegmentError(
                f"{delta.path} has a table {unknown[0]!r}, which the version {base.header.version} has not"
            )
        timed = {t.name for t in base.header.tables if t.has_times}
        if other := [t.name for t in delta.tables.values() if t.has_times is not (t.name in timed)]:
            raise SegmentError(
                f"{delta.path}: table {other[0]!r} has times of its rows, or lacks them; expected what the "
                "version has: remove it"
            )
    for name, table in base.tables.items():
        if layers := [d.layer(name, table) for d in deltas if name in d.tables]:
            tables[name] = under(table, layers)
    return OverlaidSegment(base, tables, tuple(deltas))


def under(table: Table, layers: Sequence[OverlayLayer]) -> Table:
    """Returns a table below layers (newest first), which take the place of those that it has."""
    row_map = RowMap(table.rows) if table.row_map is None else table.row_map
    return replace(table, row_map=replace(row_map, overlay=Overlay(layers)))
