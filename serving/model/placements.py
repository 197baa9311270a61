"""Where the tables of a version were placed."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import INDEX_UNIT_BYTES, TIME_BYTES, StoredTable
from tableside.quant import RowSource
from tableside.quant.rows.ids import ID_BYTES

if TYPE_CHECKING:
    from tableside.quant.gpu.residence.residence import Residence, TableSize
    from tableside.quant.gpu.residence.tables import DeviceTable


class Placements:
    """A version's placed tables; their HBM goes with this object. placements: kinds of residences. on_gpu:
    empty without a GPU. hbm_bytes: beside the cache. files: (device, inode) of tables in files of their own.
    base: those of the version without deltas, whose memory they share. hot: number of the hot segment that is
    read; 0: none. is_counted: ids are counted for the next one."""

    def __init__(
        self,
        placements: Mapping[str, str],
        *,
        on_host: Mapping[str, RowSource] | None = None,
        on_gpu: "Mapping[str, DeviceTable] | None" = None,
        hbm_bytes: int = 0,
        files: Mapping[str, tuple[int, int]] | None = None,
        base: "Placements | None" = None,
        hot: int = 0,
        is_counted: bool = False,
    ) -> None:
        self.placements, self.hbm_bytes, self.files = placements, hbm_bytes, files or {}
        self.hot, self.is_counted = hot, is_counted
        self._base = base
        self.handovers: list[Callable[[], None]] = []  # what `take_over` calls
        self.on_gpu = on_gpu or {}
        self.tables: Mapping[str, RowSource] = {**(on_host or {}), **self.on_gpu}

    @property
    def base(self) -> "Placements":
        return self if self._base is None else self._base

    def with_tables(
        self,
        on_gpu: "Mapping[str, DeviceTable]",
        placements: Mapping[str, str] | None = None,
        **changed: Any,
    ) -> "Placements":
        """The same memory with other tables. changed: hbm_bytes, hot, is_counted."""
        kept = {"hbm_bytes": self.hbm_bytes, "hot": self.hot, "is_counted": self.is_counted}
        kinds = self.placements if placements is None else placements
        return Placements(kinds, on_gpu=on_gpu, base=self.base, **(kept | changed))

    def take_over(self) -> None:
        """Keeps the replaced version's unchanged cached rows. Call it as requests move to this version: the
        other one must fetch them again."""
        base = self.base
        handovers, base.handovers = base.handovers, []  # they hold the replaced version
        for handover in handovers:
            handover()


def size_of(stored: StoredTable) -> "TableSize":
    """Returns what a plan of the device's memory knows of a table."""
    from tableside.quant.gpu.residence.residence import TableSize

    size = TableSize(stored.name, stored.rows, stored.row_bytes)
    if stored.ids is None or (index := stored.ids.index) is None:
        return size
    ids, is_in_rows = index.slots * ID_BYTES, index.id_at >= 0
    # Kept ids may stay in host memory, and times are read by compactions alone
    apart = (0 if is_in_rows else ids, TIME_BYTES * index.slots if index.has_times else 0)
    array = sum(-(-part // INDEX_UNIT_BYTES) * INDEX_UNIT_BYTES for part in apart)
    return size._replace(index_bytes=index.bytes - array, id_bytes=ids, ids_in_rows=is_in_rows)


def files_of(segment: Segment) -> dict[str, tuple[int, int]]:
    """Returns (device, inode) of the tables in files of their own."""
    return {f.table: (f.status.st_dev, f.status.st_ino) for f in segment.files if f.table is not None}


def residences_in(
    replaced: Placements | None, files: Mapping[str, tuple[int, int]]
) -> "dict[str, Residence]":
    """Returns the residences of a replaced version's tables, which is mapped, that lie in these files."""
    if replaced is None:
        return {}
    before = replaced.base
    return {n: before.on_gpu[n].residence for n, file in files.items() if before.files.get(n) == file}
