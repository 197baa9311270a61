"""What the id indexes of a worker's tables take of a GPU's memory."""

from collections.abc import Iterable

from tableside.loader.stored import INDEX_UNIT_BYTES, StoredTable
from tableside.quant.ids import ID_BYTES


def index_bytes(table: StoredTable, rows_in_hbm: bool, copies_ids: bool = True) -> int:
    """HBM that the index of a table takes, 0 where it has none.

    Directory, pilots and bits are always copied. The id that is kept for each row is read in the row, where all rows are in HBM
    (`rows_in_hbm`) and have room for it; else it is copied, unless `copies_ids` is false and host memory is read.
    """
    if table.ids is None or (index := table.ids.index) is None:
        return 0
    ids = index.slots * ID_BYTES
    is_array = index.id_at < 0
    without_ids = index.bytes - (-(-ids // INDEX_UNIT_BYTES) * INDEX_UNIT_BYTES if is_array else 0)
    takes_ids = is_array if rows_in_hbm else copies_ids
    return without_ids + (ids if takes_ids else 0)


def with_copied_ids(tables: Iterable[StoredTable], budget_bytes: int) -> frozenset[str]:
    """The names of the tables, whose rows are not all in HBM, that have their ids copied there: the smallest first, as far as the
    budget goes."""
    names, left = [], budget_bytes
    for table in sorted(tables, key=lambda t: t.rows):
        left -= index_bytes(table, False) - index_bytes(table, False, copies_ids=False)
        if left >= 0:
            names.append(table.name)
    return frozenset(names)
