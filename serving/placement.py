"""Where a worker's tables lie: in the memory of its GPU, in the segment where the GPU reads them, or with the CPU."""

import bisect
import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from tableside.loader.header import StoredTable
from tableside.loader.registration import Registration
from tableside.loader.segment import Segment
from tableside.quant import CpuBackend, DeviceTable, Table
from tableside.quant.contract import INTERPRETER, MEMORY_UNIT, SPLIT_BLOCK, InCache, Variant, split_rows
from tableside.serving.errors import ServingError
from tableside.serving.settings import ServerSettings

if TYPE_CHECKING:
    from tableside.quant.cache.cache import Cache
    from tableside.quant.gpu.backend import Fused

logger = logging.getLogger("tableside")

_SMALL_SHARE = 4  # of a budget that does not hold all tables, the part for those held whole
_SMALLEST_CACHE = 1 << 20
_GATHERERS, _WIDE_BYTES = 4, 4 << 30  # threads and bytes of tables from which the CPU gathers faster than the GPU reads
_DEFAULT_SHARE = 0.4  # of a GPU's memory, for the workers on it together: while a version is replaced, two are held


class Placement(StrEnum):
    """hbm: copied once to the GPU. cached: read in the segment through the GPU's cache. uvm: read in the segment, through CUDA.
    hybrid: some rows as hbm, the others as uvm. host: looked up by the CPU."""

    HBM = "hbm"
    CACHED = "cached"
    HYBRID = "hybrid"
    UVM = "uvm"
    HOST = "host"


def plan_placements(
    tables: Iterable[StoredTable], wanted: str, budget_bytes: int, cache_is_open: bool = False
) -> dict[str, Placement]:
    """Table name -> placement. auto: all tables in hbm where the budget holds them; else the smallest, in a quarter of it, and
    the rest cached. Where that leaves too little for a cache: as many in hbm as the budget holds, the rest uvm.

    cache_is_open: there is one already, beside this budget; what the budget does not hold goes through it.

    ServingError: hbm was asked for and the budget does not hold every table.
    """
    tables = list(tables)
    holds_all = sum(t.bytes for t in tables) <= budget_bytes
    if wanted == Placement.HYBRID:
        whole = Placement.HBM if holds_all else Placement.HYBRID if _share(tables, budget_bytes) else Placement.UVM
        return {t.name: whole for t in tables}
    if wanted == Placement.HBM and (total := sum(t.bytes for t in tables)) > budget_bytes:
        raise ServingError(
            f"placement hbm needs {total:,} bytes, the budget of this worker is {budget_bytes:,}; raise --hbm-budget, "
            "or choose --placement auto"
        )
    if wanted != "auto":
        return {t.name: Placement(wanted) for t in tables}
    for_cache = budget_bytes - budget_bytes // _SMALL_SHARE - 2 * _map_bytes(tables)
    opens_cache = not (holds_all or cache_is_open) and for_cache >= _SMALLEST_CACHE
    left = budget_bytes // _SMALL_SHARE if opens_cache else budget_bytes
    others = Placement.CACHED if opens_cache or cache_is_open else Placement.UVM
    placements = {}
    for t in sorted(tables, key=lambda t: t.bytes):
        fits = t.bytes <= left
        placements[t.name] = Placement.HBM if fits else others
        left -= t.bytes if fits else 0
    return placements


def _share(tables: Sequence[StoredTable], budget_bytes: int) -> int:
    """Rows of SPLIT_BLOCK, all of them at most but one, that the budget holds of every table alike."""
    shares = range(SPLIT_BLOCK)
    return max(0, bisect.bisect_right(shares, budget_bytes, key=lambda share: _split_bytes(tables, share)) - 1)


def _split_bytes(tables: Iterable[StoredTable], share: int) -> int:
    """What split tables take of a GPU's memory."""
    return sum(split_rows(t.rows, share) * t.row_bytes for t in tables)


def _map_bytes(tables: Iterable[StoredTable | Table]) -> int:
    """What cached tables take of a GPU's memory beside their rows."""
    from tableside.quant.cache.tables import map_bytes

    return sum(map_bytes(t.rows) for t in tables)


class Placed:
    """A version's tables where a worker looks them up. What they take of its GPU's memory is given back with this object."""

    def __init__(
        self, tables: Mapping[str, Table | DeviceTable], placements: Mapping[str, Placement], hbm_bytes: int = 0
    ) -> None:
        self.tables, self.placements, self.hbm_bytes = tables, placements, hbm_bytes


def _in_cache(table: Table | DeviceTable | None) -> InCache | None:
    return table.in_cache if isinstance(table, DeviceTable) else None


class Placer:
    """Places the tables of versions for one worker. fused None: the worker has no GPU, every table stays with the CPU.

    stashable: what is held in the GPU's memory can be given back for a while (`Fused.stash`).
    """

    def __init__(self, settings: ServerSettings, cpu: CpuBackend, *, stashable: bool = False) -> None:
        self.fused: Fused | None = None
        self._stashable = stashable
        self._settings, self._cpu = settings, cpu
        self._budget = self._held = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        """Takes the device that the settings name. MissingBackend: it is not here."""
        if not self._settings.devices:
            return
        from tableside.quant.gpu import backend as fused

        (device,) = self._settings.devices  # the supervisor gave each worker one
        name = device if device == INTERPRETER else f"cuda:{device}"
        self.fused = fused.Fused(name, self._cpu, threads=self._settings.threads)
        default = int(self.fused.memory_bytes * _DEFAULT_SHARE / self._settings.sharing)
        self._budget = default if self._settings.hbm_budget is None else self._settings.hbm_budget

    @property
    def torch_device(self) -> str:
        """Where scorers run."""
        return "cpu" if self.fused is None else str(self.fused.device)

    @property
    def cache(self) -> "Cache | None":
        """The worker's cache, once a table needed one."""
        return None if self.fused is None else self.fused.cache

    def place(self, segment: Segment, replaced: Placed | None = None) -> Placed:
        """A segment's tables where this worker looks them up, within what other models and versions leave of the budget.

        replaced: of the version that goes when this one is taken; what is hot in its cached tables is cached of this one too.
        RegistrationError, QuantError, ServingError: CUDA, the GPU's memory or the budget does not allow it.
        """
        fused = self.fused
        if fused is None:
            return Placed(segment.tables, dict.fromkeys(segment.tables, Placement.HOST))
        fused.trim()
        with self._lock:  # one version after another: each sees what those before it took
            left = max(0, self._budget - self._held + (replaced.hbm_bytes if replaced else 0))
            placements = plan_placements(segment.header.tables, self._settings.placement, left, self.cache is not None)
            hbm_bytes = sum(t.bytes for t in segment.header.tables if placements[t.name] is Placement.HBM)
            split = [t for t in segment.header.tables if placements[t.name] is Placement.HYBRID]
            share = _share(split, left)
            hbm_bytes += _split_bytes(split, share)
            if self._stashable:
                hbm_bytes += sum(-t.bytes % MEMORY_UNIT for t in segment.header.tables if placements[t.name] is Placement.HBM)
            if self.cache is None:  # it is opened with room for these tables' maps
                self._open_cache(fused, segment, placements, left - hbm_bytes)
            else:
                hbm_bytes += _map_bytes(t for t in segment.header.tables if placements[t.name] is Placement.CACHED)
            placed = Placed(self._tables(fused, segment, placements, share), placements, hbm_bytes)
            self._held += hbm_bytes
        weakref.finalize(placed, self._release, hbm_bytes)
        if replaced is not None:
            self._warm(placed, replaced)
        return placed

    def _warm(self, placed: Placed, replaced: Placed) -> None:
        """Brings the hotter half of what the cache holds of a version's tables for those of the next one, by their names."""
        for name, table in placed.tables.items():
            new, old = _in_cache(table), _in_cache(replaced.tables.get(name))
            if self.cache is not None and new is not None and old is not None:
                hot = self.cache.hot(old.number)
                hot = hot[: (hot.size + 1) // 2]
                self.cache.warm(new.number, hot[hot < table.rows])
                logger.info("%d rows of table %s were brought to the cache", hot.size, name)
        if self.cache is not None:
            self.cache.statistics(wait=True)  # a version that is dropped now must not be read any more

    def _open_cache(self, fused: "Fused", segment: Segment, placements: Mapping[str, Placement], budget_bytes: int) -> None:
        """Makes the cache when a first table needs it, of all that is left; all models and versions of the worker share it."""
        tables = [segment.tables[name] for name, p in placements.items() if p is Placement.CACHED]
        if tables:
            from tableside.quant.cache.settings import CacheSettings

            threads = self._settings.threads
            is_wide = threads >= _GATHERERS and sum(t.packed.size for t in tables) >= _WIDE_BYTES
            settings = CacheSettings(gather_threads=threads if is_wide else 0)
            if (maps := 2 * _map_bytes(tables)) >= budget_bytes:  # of a version and its successor
                raise ServingError(
                    f"the cache's maps of {sum(t.rows for t in tables):,} rows, of two versions, take {maps:,} bytes; the budget "
                    f"leaves {max(0, budget_bytes):,}; raise --hbm-budget, or choose --placement uvm"
                )
            cache = fused.open_cache(budget_bytes - maps, min(t.row_bytes for t in tables), settings)
            self._held += budget_bytes
            logger.info("a cache of %.2f GB on %s", cache.bytes / 1e9, fused.description)

    def _release(self, hbm_bytes: int) -> None:
        self._held -= hbm_bytes

    def _tables(
        self, fused: "Fused", segment: Segment, placements: Mapping[str, Placement], share: int
    ) -> dict[str, Table | DeviceTable]:
        registration = None
        copied_once = {Placement.HOST} if self._stashable else {Placement.HBM, Placement.HOST}
        if set(placements.values()) - copied_once and not fused.is_interpreted:
            registration = Registration(segment, fused.device)
            logger.info("%s: %.1f GB registered with CUDA in %.1f s", segment.path, segment.size / 1e9, registration.seconds)
        variant = Variant.of(*(segment.tables[name] for name, p in placements.items() if p is not Placement.HOST))
        tables: dict[str, Table | DeviceTable] = {}
        for stored in segment.header.tables:
            table = segment.tables[stored.name]
            rows = None if registration is None else registration.view(stored.offset, stored.bytes)
            match placements[stored.name]:
                case Placement.HBM:
                    tables[stored.name] = fused.hold(table, rows, variant, stashable=self._stashable)
                case Placement.CACHED:
                    name = f"{segment.header.model}/{stored.name}"
                    tables[stored.name] = fused.cached(table, rows, variant, name)
                case Placement.HYBRID:
                    tables[stored.name] = fused.split(table, rows, share, variant)
                case Placement.UVM:
                    tables[stored.name] = fused.view(table, rows, variant)
                case Placement.HOST:
                    tables[stored.name] = table
        return tables
