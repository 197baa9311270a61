"""Tables on a disk whose rows a process reads one by one."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from tableside.loader.hot.counts import counted_tables
from tableside.loader.segment.blocks import BlockReader
from tableside.loader.segment.segment import Segment
from tableside.quant.contract import Bytes
from tableside.quant.gpu.residence.registry import is_by_cpu, read_from_disk
from tableside.quant.rows.fetched import RowReader
from tableside.serving.model.hot_rows import HotRows
from tableside.serving.settings import ServerSettings

logger = logging.getLogger("tableside")


class DiskTables:
    """Of the versions that one process serves. count_reads: is given what reads rows, the model and the
    table. kinds: of each table's residence."""

    def __init__(
        self, settings: ServerSettings, count_reads: Callable[[BlockReader, str, str], object]
    ) -> None:
        self._settings, self._count_reads = settings, count_reads
        self.hot = HotRows(settings)

    def readers(self, segment: Segment, kinds: Mapping[str, str]) -> dict[str, RowReader]:
        """Returns what reads rows from a disk, by table of that kind."""
        base, found = segment.base, {}
        timeout_s = base.header.row_timeout_s(self._settings.disk_timeout_s)
        of_disk = set(read_from_disk(kinds))
        for table in (table for table in counted_tables(base) if table.name in of_disk):
            name, ids = table.name, table.ids
            reader = base.readers[name]
            self._count_reads(reader, base.header.model, name)
            reader.timeout_s = timeout_s
            reader.without_readahead()
            default = None if ids is None else self._default_row(reader, ids.default_row, name)
            calls = reader, reader.ready, timeout_s, reader.away, reader.ask, default
            found[name] = RowReader(*calls, self.hot.counter(base, name), reader.read_in_place)
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
        stored = frozenset(table.name for table in counted_tables(segment.base))
        for name in segment.base.readers.keys() - stored:
            if not is_by_cpu(kinds[name]):
                continue
            logger.warning(
                "table %s, whose rows have no room for their raw ids, is read where its file is mapped: a "
                "row that is not in memory holds its worker up (docs/disk.md)",
                name,
            )
        return stored.intersection(read_from_disk(kinds))
