"""Plans which rows and indexes of a version's tables lie in a GPU's memory, within a budget."""

import bisect
import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from tableside.loader.segment.stored import INDEX_UNIT_BYTES, StoredTable
from tableside.quant import Table
from tableside.quant.gpu.kernels.job import SPLIT_BLOCK, split_rows
from tableside.quant.row_format import GPU_ALIGNMENT, device_row_bytes
from tableside.quant.rows.ids import ID_BYTES
from tableside.serving.errors import ServingError

if TYPE_CHECKING:
    from tableside.quant.gpu.residence.residence import InHost

logger = logging.getLogger("tableside")

_SMALL_PART = (
    4  # a quarter of a budget that does not hold all tables is for small ones, which are copied whole
)
_SMALLEST_CACHE = 1 << 20  # bytes
_DELTAS = 16  # a sixteenth of a budget that a cache or split tables take is left for deltas


class Placement(StrEnum):
    """hbm: copied to the GPU. cached: read through its cache. zero_copy: read by the GPU in the segment.
    hybrid: some rows as hbm, others as zero_copy. host: looked up by the CPU."""

    HBM = "hbm"
    CACHED = "cached"
    HYBRID = "hybrid"
    ZERO_COPY = "zero_copy"
    HOST = "host"


def plan_placements(
    tables: Iterable[StoredTable], wanted: str, budget_bytes: int, cache_is_open: bool = False
) -> dict[str, Placement]:
    """Maps table names to placements. auto: all in hbm if they fit; else the smallest in a quarter of the
    budget, the others cached; if that leaves too little for a cache, as many in hbm as fit, the others
    zero_copy. cache_is_open: a cache exists beside this budget and takes what does not fit. ServingError: hbm
    does not fit."""
    tables = list(tables)
    total = sum(bytes_in_hbm(t) + index_bytes(t, True) for t in tables)
    holds_all = total <= budget_bytes
    if wanted == Placement.HYBRID:
        rest = without_deltas(budget_bytes) - sum(index_bytes(t, False) for t in tables)
        whole = (
            Placement.HBM
            if holds_all
            else Placement.HYBRID
            if largest_share(tables, rest)
            else Placement.ZERO_COPY
        )
        return {t.name: whole for t in tables}
    if wanted == Placement.HBM and not holds_all:
        why = f"placement hbm needs {total:,} bytes, the budget of this worker is {budget_bytes:,}"
        raise ServingError(f"{why}; raise --hbm-budget, or choose --placement auto")
    if wanted != "auto":
        return {t.name: Placement(wanted) for t in tables}
    least = {t.name: index_bytes(t, False, copies_ids=False) for t in tables}  # wherever their rows lie
    rest = budget_bytes if holds_all else max(0, budget_bytes - sum(least.values()))
    for_cache = rest - rest // _SMALL_PART - 2 * map_bytes(tables)
    opens_cache = not (holds_all or cache_is_open) and for_cache >= _SMALLEST_CACHE
    left = rest // _SMALL_PART if opens_cache else rest
    others = Placement.CACHED if opens_cache or cache_is_open else Placement.ZERO_COPY
    placements = {}
    for t in sorted(tables, key=lambda t: t.bytes):
        size = bytes_in_hbm(t) + index_bytes(t, True) - least[t.name]
        fits = holds_all or size <= left
        placements[t.name] = Placement.HBM if fits else others
        left -= size if fits else 0
    return placements


def check_padding(tables: Iterable[StoredTable], placements: Mapping[str, Placement]) -> None:
    """Raises ServingError if the GPU would read rows in host memory that are not padded for it."""
    in_place = (Placement.CACHED, Placement.HYBRID, Placement.ZERO_COPY)
    if tight := [t for t in tables if t.row_bytes % GPU_ALIGNMENT and placements[t.name] in in_place]:
        names, first = ", ".join(t.name for t in tight), tight[0]
        raise ServingError(
            f"placement {placements[first.name]} reads rows in host memory; those of table {names} take "
            f"{first.row_bytes} bytes, and are not padded for that: load the model with row_alignment = "
            f"{GPU_ALIGNMENT}, as a load on a machine with a GPU does, raise --hbm-budget, or choose "
            "--placement host"
        )


def bytes_in_hbm(table: StoredTable) -> int:
    """Returns the bytes of a table's rows in HBM."""
    return table.rows * device_row_bytes(table.row_bytes)


def without_deltas(budget_bytes: int) -> int:
    """Returns a cache's or split tables' part of a budget, without the deltas' part."""
    return budget_bytes - budget_bytes // _DELTAS


def largest_share(tables: Sequence[StoredTable], budget_bytes: int) -> int:
    """Returns the largest share, below SPLIT_BLOCK, with which the tables' HBM rows fit."""
    shares = range(SPLIT_BLOCK)
    return max(0, bisect.bisect_right(shares, budget_bytes, key=lambda share: split_bytes(tables, share)) - 1)


def split_bytes(tables: Iterable[StoredTable], share: int) -> int:
    return sum(split_rows(t.rows, share) * t.row_bytes for t in tables)


def map_bytes(tables: Iterable[StoredTable | Table]) -> int:
    """Returns the HBM of cached tables beside the cache: maps of a batch's misses."""
    from tableside.quant.cache.tables import map_bytes as of_one

    return sum(of_one(t.rows) for t in tables)


def index_bytes(table: StoredTable, rows_in_hbm: bool, copies_ids: bool = True) -> int:
    """Returns the HBM of a table's index, 0 without one. Directory, pilots and bits are always copied. Rows'
    ids are read in rows if all are in HBM with room for them, else copied unless `copies_ids` is false."""
    if table.ids is None or (index := table.ids.index) is None:
        return 0
    ids = index.slots * ID_BYTES
    is_array = index.id_at < 0
    without_ids = index.bytes - (-(-ids // INDEX_UNIT_BYTES) * INDEX_UNIT_BYTES if is_array else 0)
    takes_ids = is_array if rows_in_hbm else copies_ids
    return without_ids + (ids if takes_ids else 0)


def with_copied_ids(tables: Iterable[StoredTable], budget_bytes: int) -> frozenset[str]:
    """Returns the tables, not wholly in HBM, that copy their ids there: smallest first within the budget."""
    names, left = [], budget_bytes
    for table in sorted(tables, key=lambda t: t.rows):
        left -= index_bytes(table, False) - index_bytes(table, False, copies_ids=False)
        if left >= 0:
            names.append(table.name)
    return frozenset(names)


def plan_indexes(
    tables: Sequence[StoredTable],
    placements: Mapping[str, Placement],
    left: int,
    cache_is_open: bool,
    is_successor: bool,
) -> tuple[dict[str, "InHost"], int]:
    """Returns each table's index part in host memory, and the HBM of all indexes. Beside a cache or split
    tables copied ids take half of the rest. For a successor the largest indexes move to host memory if
    needed. ServingError: what must be copied does not fit."""
    from tableside.quant.gpu.residence.residence import InHost

    whole = [t for t in tables if placements[t.name] is Placement.HBM]
    others = [t for t in tables if placements[t.name] not in (Placement.HBM, Placement.HOST)]
    least = sum(index_bytes(t, True) for t in whole) + sum(
        index_bytes(t, False, copies_ids=False) for t in others
    )
    rest = left - least - sum(map(bytes_in_hbm, whole))
    in_host: dict[str, InHost] = {}
    for t in sorted(others, key=lambda t: t.rows, reverse=True) if is_successor else ():
        if rest < 0 and (size := index_bytes(t, False, copies_ids=False)):
            in_host[t.name], least, rest = InHost.ALL, least - size, rest + size
            what = "the id index of table %s is read in host memory: it takes %d bytes (--hbm-budget)"
            logger.warning(what, t.name, size)
    if least and rest < 0:
        raise ServingError(
            f"the id indexes of this version's tables take {least:,} bytes of HBM at least; the budget of "
            f"this worker leaves {max(0, rest + least):,}; raise --hbm-budget, or choose --placement host"
        )
    shares_it = Placement.HYBRID in placements.values() or (
        Placement.CACHED in placements.values() and not cache_is_open
    )
    others = [t for t in others if t.name not in in_host]
    copied = with_copied_ids(others, rest // 2 if shares_it else rest)
    in_host |= {t.name: InHost.NOTHING if t.name in copied else InHost.SOME for t in others}
    return in_host, least + sum(
        index_bytes(t, False) - index_bytes(t, False, copies_ids=False) for t in others if t.name in copied
    )
