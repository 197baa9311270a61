"""Makes the hot segment of a version from what was counted (`loader.hot.counts`).

The rows that were asked for most, for the bytes that they take, are copied: those of the hot segment before
it from there, the others from the disk or Redis, and all are checked. It is made where it would have a
hundredth more of the ids than the one before it. Uses of long ago count less: all counts are halved where
enough new ones came.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.hot.counts import HOT, MOST, RowCounts, counted_tables, own_rows
from tableside.loader.hot.hot import HotTable, clear_hot, hot_folder, open_hot, remove_hot, write_hot
from tableside.loader.segment.delta import Delta, delta_name
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable
from tableside.loader.versions.folder import Folder, deltas_of
from tableside.loader.versions.versions import Model
from tableside.quant.contract import Bytes, Ids
from tableside.quant.cpu.in_memory import kept_ids
from tableside.quant.errors import RowsNotRead
from tableside.quant.rows.fetched import Fetch, RowState, not_read
from tableside.quant.rows.ids import RowMap

_GAIN = 0.01  # of the ids, for which another hot segment is made
_NEW = 1.5  # ids for each of its rows, after which all counts are halved
_SLACK_BYTES = 1 << 20  # by which a budget may be missed: whole pages
_AT_ONCE = 1 << 16  # rows that are read together
_REDIS_S = 5.0  # that Redis may take for some thousands of rows


class Warmed(NamedTuple):
    """What a hot segment would have of the counted ids, and what the one before it had. rows: it was made of
    so many; 0: it was not made. bytes: of its file."""

    share: float
    before: float
    rows: int = 0
    bytes: int = 0


def warm(model: Model, version: int, budget: int) -> Warmed:
    """Makes the hot segment of a version, of up to `budget` bytes, if it gains. VersionError: the version
    is gone, or another process makes one. NoSpace, RowsNotRead: none is made. SegmentError: the one that
    was there is damaged, and is removed."""
    segment = model.attach(version, "header")
    with hot_folder(model.root, model.name) as folder, folder.lock("warm.lock", 0):
        number = max(deltas_of(folder, version), default=0)
        counts = RowCounts.shared(folder, segment)
        if counts.begin():
            _inherit(folder, model, segment, counts)
        clear_hot(model.root, model.name, model.versions)
        try:
            before = open_hot(folder, segment, number, "header") if number else None
            return _Warming(segment, counts, before, budget).run(folder, number)
        except SegmentError:
            if number in deltas_of(folder, version):
                folder.unlink(delta_name(version, number))
            raise


class _Warming:
    """before: the hot segment that is there."""

    def __init__(self, version: Segment, counts: RowCounts, before: Delta | None, budget: int) -> None:
        self._version, self._counts, self._before = version, counts, before
        self._tables = {t.name: t for t in counted_tables(version)}
        self._histograms = {name: counts.histogram(name) for name in self._tables}
        self._read = dict[str, _RowCopier]()  # of the tables that have hot rows
        self._budget = budget

    def run(self, folder: Folder, number: int) -> Warmed:
        chosen = self._chosen()
        try:
            return self._made(folder, number, chosen)
        finally:
            if self._counts.sampled > _NEW * sum(rows.size for rows in chosen.values()):
                self._counts.age()

    def _made(self, folder: Folder, number: int, chosen: Mapping[str, Ids]) -> Warmed:
        uses = {name: self._histograms[name] * (np.arange(256) & MOST) for name in self._tables}
        total = max(1, sum(int(u.sum()) for u in uses.values()))
        had = 0 if self._before is None else sum(int(u[HOT:].sum()) for u in uses.values())
        has = self._uses(chosen)
        found = Warmed(has / total, had / total)
        is_too_large = _row_bytes(self._before) > self._budget + _SLACK_BYTES
        least = -1 if is_too_large else had + _GAIN * total
        if has <= least:
            return found
        tables = {name: self._table(name, rows) for name, rows in chosen.items()}
        tables = {name: table for name, table in tables.items() if table.rows.size}
        if not tables:
            remove_hot(folder, self._version.header.version, number + 1 if is_too_large else 0)
            return found
        try:
            size = self._write(folder, number, tables)
        except RowsNotRead:
            if all(name in self._version.readers for name in tables):
                raise
            tables = self._that_come(tables)
            if self._uses({name: table.rows for name, table in tables.items()}) <= least:
                return found
            size = self._write(folder, number, tables)
        self._counts.mark({name: table.rows for name, table in tables.items()})
        return found._replace(rows=sum(table.rows.size for table in tables.values()), bytes=size)

    def _write(self, folder: Folder, number: int, tables: Mapping[str, HotTable]) -> int:
        return write_hot(folder, self._version, self._counts.new_number(number), tables, self._before)

    def _that_come(self, tables: Mapping[str, HotTable]) -> dict[str, HotTable]:
        """The same without the rows that Redis has no more, of which requests are told. RowsNotRead: half of
        all do not come."""
        are_here = {name: self._read[name].are_here(table.rows) for name, table in tables.items()}
        size, here = (sum(int(of(mask)) for mask in are_here.values()) for of in (np.size, np.count_nonzero))
        if 2 * here < size:
            raise RowsNotRead(size, size - here, 0)
        return {n: t._replace(rows=t.rows[are_here[n]]) for n, t in tables.items() if are_here[n].any()}

    def _uses(self, rows: Mapping[str, Ids]) -> int:
        """Returns how often rows were asked for, by table."""
        return sum(int((self._counts.tables[name][some] & MOST).sum()) for name, some in rows.items())

    def _chosen(self) -> dict[str, Ids]:
        """Returns the rows that were asked for most, by table, ascending; of those that were asked for as
        often, first the ones that are there."""
        left, chosen = self._budget, dict[str, list[Ids]]()
        costs = {name: t.row_bytes for name, t in self._tables.items()}
        steps = [
            ((byte & MOST) / costs[name], byte, name)
            for name in self._tables
            for byte in np.flatnonzero(self._histograms[name]).tolist()
            if byte & MOST
        ]
        for _, byte, name in sorted(steps, reverse=True):
            rows = self._counts.rows_with(name, byte, left // costs[name])
            chosen.setdefault(name, []).append(rows)
            left -= rows.size * costs[name]
        return {name: np.sort(np.concatenate(parts)) for name, parts in chosen.items()}

    def _table(self, name: str, rows: Ids) -> HotTable:
        """Those of the rows that have an id, and are this version's own."""
        read = self._read[name] = _RowCopier(self._version, self._tables[name], self._before)
        row_map = _row_map(self._version, name) or RowMap(self._tables[name].rows)
        if row_map.index is None:
            has_id = row_map.ids_of(rows)[1]
        else:
            has_id = own_rows(row_map, read.kept_ids(rows)) == rows
        return HotTable(rows[has_id & ~row_map.is_backfilled(rows)], read)


def _row_map(version: Segment, name: str) -> RowMap | None:
    """Returns how ids of a table become row numbers; None: they are row numbers."""
    return version.tables[name].row_map if name in version.tables else None


def _fetch_of(version: Segment, name: str) -> Fetch:
    """Returns what reads a table's rows. MissingBackend: the client of Redis is not installed."""
    if name in version.readers:
        return version.readers[name]
    from tableside.loader.redis.reader import RedisRows  # which needs the client

    remote = tuple(table for table in version.header.remote if table.name == name)
    rows = RedisRows(remote, version.path.parent, _REDIS_S, lambda outcome, counts: None)
    return partial(rows.fetch_table, name)


class _RowCopier:
    """Gives packed rows of a table: those of a hot segment from there, the others from the disk or Redis."""

    def __init__(self, version: Segment, stored: StoredTable, before: Delta | None) -> None:
        self._stored, self._fetch = stored, _fetch_of(version, stored.name)
        self._is_on_disk = stored.name in version.readers
        self._there = np.empty(0, np.int64)
        if before is not None and stored.name in before.tables:
            self._there, self._packed = _hot_rows(before, stored)

    def __call__(self, rows: Ids) -> Bytes:
        """Returns rows [n], ascending. RowsNotRead: some are late or damaged."""
        out, state = self._copied(rows)
        if state.any():
            raise not_read(state)
        return out

    def are_here(self, rows: Ids) -> NDArray[np.bool_]:
        """Returns the mask of rows [n], ascending, that come; of a disk all are to."""
        if self._is_on_disk:
            return np.ones(rows.size, np.bool_)
        parts = (rows[start : start + _AT_ONCE] for start in range(0, rows.size, _AT_ONCE))
        return np.concatenate([self._copied(part)[1] == RowState.HERE for part in parts])

    def _copied(self, rows: Ids) -> tuple[Bytes, NDArray[np.uint8]]:
        """Returns rows [n], ascending, and what came of those that were fetched, `RowState` [n]."""
        out = np.empty((rows.size, self._stored.row_bytes), np.uint8)
        left = np.ones(rows.size, np.bool_)
        if self._there.size:
            at = np.minimum(self._there.searchsorted(rows), self._there.size - 1)
            left = self._there[at] != rows
            out[~left] = self._packed[at[~left]]
        wanted = rows[left]
        state = np.zeros(rows.size, np.uint8)
        if wanted.size:
            fetched, came = np.empty((wanted.size, out.shape[1]), np.uint8), np.zeros(wanted.size, np.uint8)
            began = time.monotonic()
            self._fetch(wanted, fetched, came, None)
            out[left], state[left] = fetched, came
            if not self._is_on_disk:
                time.sleep(time.monotonic() - began)  # requests come first
        return out, state

    def kept_ids(self, rows: Ids) -> Ids:
        """Returns the id that each row [n] keeps, ascending rows."""
        assert self._stored.index is not None
        ids = np.empty(rows.size, np.int64)
        for start in range(0, rows.size, _AT_ONCE):
            packed = self(rows[start : start + _AT_ONCE])
            ids[start : start + _AT_ONCE] = kept_ids(packed, self._stored.index.id_at)
        return ids


def _row_bytes(hot: Delta | None) -> int:
    return 0 if hot is None else sum(table.bytes for table in hot.tables.values())


def _hot_rows(hot: Delta, stored: StoredTable) -> tuple[Ids, Bytes]:
    """Returns the numbers [n] of a table's hot rows, and the packed rows. SegmentError: the marks changed."""
    found = hot.own_hot_rows(stored.name, stored.rows)
    if (numbers := found.numbers()).size != len(found.packed):
        raise SegmentError(
            f"{hot.path}: table {stored.name!r} has {len(found.packed)} rows and marks of {numbers.size}; "
            "its bytes changed"
        )
    return numbers, found.packed


def _opened(folder: Folder, version: Segment) -> Delta | None:
    """Returns the newest hot segment of a version; None: there is none that is whole."""
    try:
        return open_hot(folder, version, max(deltas_of(folder, version.header.version), default=0), "header")
    except SegmentError:
        return None


def _inherit(folder: Folder, model: Model, version: Segment, counts: RowCounts) -> None:
    """Takes over the counts of the newest version before this one: of raw ids those that its hot segment
    has."""
    for number in reversed([v for v in model.versions() if v < version.header.version]):
        try:
            before = model.attach(number, "header")
            if (known := RowCounts.opened(folder, before)) is None:
                continue
        except (SegmentError, VersionError):  # it is damaged, or was removed meanwhile
            continue
        hot = _opened(folder, before)
        stored = {table.name: table for table in counted_tables(before)}
        for name in known.tables.keys() & counts.tables.keys():
            row_map, uses = _row_map(before, name), known.tables[name]
            if (index := stored[name].index) is None:
                used = np.flatnonzero(uses & MOST)
                ids = used if row_map is None else row_map.ids_of(used)[0]
            elif hot is not None and name in hot.tables:
                try:
                    used, packed = _hot_rows(hot, stored[name])
                except SegmentError:  # it is damaged
                    continue
                ids = kept_ids(packed, index.id_at)
            else:
                continue
            rows = own_rows(_row_map(version, name), ids)
            is_row = (rows >= 0) & (rows < counts.tables[name].size)
            counts.add(name, rows[is_row], uses[used[is_row]])
        return
