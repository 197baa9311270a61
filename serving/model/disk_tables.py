"""Tables on a disk whose rows a process reads one by one, and the hot segments that it reads over them, and
over those in Redis."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from tableside.loader.errors import LoaderError
from tableside.loader.hot.counts import RowCounts, counted_tables, counts_name, disk_tables
from tableside.loader.hot.hot import hot_folder, hot_path, newest_hot, open_hot
from tableside.loader.segment.blocks import BlockReader
from tableside.loader.segment.delta import Delta
from tableside.loader.segment.segment import Segment
from tableside.quant.contract import Bytes, Table
from tableside.quant.gpu.residence.registry import is_by_cpu, read_from_disk
from tableside.quant.rows.fetched import AskedTable, Note, RowReader
from tableside.quant.rows.hot import HotRows
from tableside.quant.rows.ids import RowMap
from tableside.serving.settings import ServerSettings

logger = logging.getLogger("tableside")


class DiskTables:
    """Of the versions that one process serves. count_reads: is given what reads rows, the model and the
    table. kinds: of each table's residence."""

    def __init__(
        self, settings: ServerSettings, count_reads: Callable[[BlockReader, str, str], object]
    ) -> None:
        self._settings, self._count_reads = settings, count_reads
        self.hot = HotSegments(settings)

    def readers(self, segment: Segment, kinds: Mapping[str, str]) -> dict[str, RowReader]:
        """Returns what reads rows from a disk, by table of that kind."""
        base, found = segment.base, {}
        timeout_s = base.header.row_timeout_s(self._settings.disk_timeout_s)
        of_disk = set(read_from_disk(kinds))
        for table in (table for table in disk_tables(base) if table.name in of_disk):
            name, ids = table.name, table.ids
            reader = base.readers[name]
            self._count_reads(reader, base.header.model, name)
            reader.timeout_s = timeout_s
            reader.without_readahead()
            row = None if ids is None or not is_by_cpu(kinds[name]) else ids.default_row
            default = self._default_row(reader, row, name)  # under a GPU's cache late rows are errors
            calls = reader, reader.ready, timeout_s, reader.away, reader.ask, default
            row_map = base.tables[name].row_map
            note = self.hot.counter(base, name, row_map, reader.count_sample)
            found[name] = RowReader(*calls, note, reader.count_in_place)
        return found

    def _default_row(
        self, reader: BlockReader, row: int | None, table: str
    ) -> Callable[[], Bytes | None] | None:
        """Returns what gives a table's default row, kept in memory; None: it stands for no late row."""
        if row is None or self._settings.disk_late != "default":
            return None
        if reader.kept(row, self._settings.disk_timeout_s) is None:
            logger.warning("table %s: its default row is not read; until it is, late rows are errors", table)
        return partial(reader.kept, row)

    def checked(self, segment: Segment, kinds: Mapping[str, str]) -> frozenset[str]:
        """Returns the tables whose rows are checked as they are read; says which others on a disk the CPU
        reads where they are mapped."""
        stored = frozenset(table.name for table in disk_tables(segment.base))
        for name in segment.base.readers.keys() - stored:
            if not is_by_cpu(kinds[name]):
                continue
            logger.warning(
                "table %s, whose rows have no room for their raw ids, is read where its file is mapped: a "
                "row that is not in memory holds its worker up (docs/disk.md)",
                name,
            )
        return stored.intersection(read_from_disk(kinds))


class HotSegments:
    """Of the versions that one process serves."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._rows: WeakKeyDictionary[Segment, tuple[int, dict[str, HotRows]]] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[Segment, RowCounts | None] = WeakKeyDictionary()

    def are_counted(self, version: Segment) -> bool:
        """Returns whether a hot segment is made from what this process counts; else it counts anew."""
        counts = self._counts.get(version)
        path = hot_path(_root(version), version.header.model) / counts_name(version.header.version)
        if counts is None or counts.are_at(path):
            return True
        del self._counts[version]
        return False

    def newest(self, version: Segment) -> int:
        """Returns the number of the hot segment that is there; 0: none."""
        return newest_hot(_root(version), version) if self._settings.host_cache else 0

    def over(self, segment: Segment, tables: Collection[str], number: int) -> Mapping[str, Table]:
        """Returns a state's tables, those that are named under the hot segment with this number; 0: none."""
        opened = self._opened(segment.base, number) if number and tables else {}
        hot = {name: _with_hot(segment.tables[name], opened[name]) for name in tables if name in opened}
        return {**segment.tables, **hot}

    def over_asked(
        self, version: Segment, tables: Mapping[str, AskedTable], number: int, told: Callable[..., object]
    ) -> dict[str, AskedTable]:
        """Returns the tables in Redis under the hot segment with this number, and counted; others as they
        are. told: takes samples of the ids, behind the table."""
        counted = {t.name for t in counted_tables(version)} & tables.keys()
        opened = self._opened(version, number) if number and counted else {}
        notes = {name: self.counter(version, name, None, partial(told, name)) for name in counted}
        under = {name: replace(tables[name], hot=opened.get(name), note=notes[name]) for name in counted}
        return {**tables, **under}

    def counter(
        self, version: Segment, table: str, row_map: RowMap | None, told: Callable[[int, int], object]
    ) -> Note | None:
        """Returns what counts ids of a table; None: none are counted. told: as of `RowCounts.counter`."""
        if not self._settings.host_cache:
            return None
        if version not in self._counts:
            self._counts[version] = self._shared(version)
        counts = self._counts[version]
        return None if counts is None else counts.counter(table, row_map, told)

    def _shared(self, version: Segment) -> RowCounts | None:
        try:
            with hot_folder(_root(version), version.header.model) as folder:
                return RowCounts.shared(folder, version)
        except (LoaderError, OSError) as error:
            logger.warning(
                "no rows of %s version %d are counted, so that none are kept in memory: %s",
                version.header.model,
                version.header.version,
                error,
            )
            return None

    def _opened(self, version: Segment, number: int) -> dict[str, HotRows]:
        """Returns the rows of a hot segment by table; none where it cannot be read."""
        known, opened = self._rows.get(version, (0, {}))
        if known != number:
            opened = {}
            try:
                with hot_folder(_root(version), version.header.model) as folder:
                    if (hot := open_hot(folder, version, number, self._settings.verify)) is not None:
                        opened = {name: _rows_of(hot, version, name) for name in hot.tables}
            except (LoaderError, OSError) as error:
                logger.error("the hot rows of %s are not read: %s", version.header.model, error)
            self._rows[version] = number, opened
        return opened


def _root(version: Segment) -> Path:
    return version.path.parent.parent


def _rows_of(hot: Delta, version: Segment, name: str) -> HotRows:
    """Returns the hot rows of a table, beside its own if these are in a file of this host."""
    if name in version.tables:
        return hot.hot_rows(name, version.tables[name])
    return hot.own_hot_rows(name, next(t.rows for t in counted_tables(version) if t.name == name))


def _with_hot(table: Table, hot: HotRows) -> Table:
    return replace(table, row_map=replace(table.row_map or RowMap(table.rows), hot=hot))
