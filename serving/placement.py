"""Where a worker's tables lie: in the memory of its GPU, in the segment where the GPU reads them, or with the CPU."""

import logging
import threading
import weakref
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from loader.registration import Registration
from loader.segment import Segment, StoredTable
from quant import CpuBackend, DeviceTable, Table
from quant.contract import INTERPRETER, Variant
from serving.errors import ServingError
from serving.settings import ServerSettings

if TYPE_CHECKING:
    from quant.fused import Fused

logger = logging.getLogger("tableside")

_DEFAULT_SHARE = 0.4  # of a GPU's memory, for the workers on it together: while a version is replaced, two are held


class Placement(StrEnum):
    """hbm: copied once to the GPU. uvm: read in the segment, through CUDA. host: looked up by the CPU."""

    HBM = "hbm"
    UVM = "uvm"
    HOST = "host"


def plan_placements(tables: Iterable[StoredTable], wanted: str, budget_bytes: int) -> dict[str, Placement]:
    """Table name -> placement. auto: the smallest tables in hbm, as many as the budget holds; the rest uvm.

    ServingError: hbm was asked for and the budget does not hold every table.
    """
    tables = list(tables)
    if wanted == Placement.HBM and (total := sum(t.bytes for t in tables)) > budget_bytes:
        raise ServingError(
            f"placement hbm needs {total:,} bytes, the budget of this worker is {budget_bytes:,}; raise --hbm-budget, "
            "or choose --placement auto"
        )
    if wanted != "auto":
        return {t.name: Placement(wanted) for t in tables}
    placements, left = {}, budget_bytes
    for t in sorted(tables, key=lambda t: t.bytes):
        fits = t.bytes <= left
        placements[t.name] = Placement.HBM if fits else Placement.UVM
        left -= t.bytes if fits else 0
    return placements


class Placed:
    """A version's tables where a worker looks them up. What they take of its GPU's memory is given back with this object."""

    def __init__(
        self, tables: Mapping[str, Table | DeviceTable], placements: Mapping[str, Placement], hbm_bytes: int = 0
    ) -> None:
        self.tables, self.placements, self.hbm_bytes = tables, placements, hbm_bytes


class Placer:
    """Places the tables of versions for one worker. fused None: the worker has no GPU, every table stays with the CPU."""

    def __init__(self, settings: ServerSettings, cpu: CpuBackend) -> None:
        self.fused: Fused | None = None
        self._settings, self._cpu = settings, cpu
        self._budget = self._held = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        """Takes the device that the settings name. MissingBackend: it is not here."""
        if not self._settings.devices:
            return
        from quant import fused

        (device,) = self._settings.devices  # the supervisor gave each worker one
        name = device if device == INTERPRETER else f"cuda:{device}"
        self.fused = fused.Fused(name, self._cpu, threads=self._settings.threads)
        default = int(self.fused.memory_bytes * _DEFAULT_SHARE / self._settings.sharing)
        self._budget = default if self._settings.hbm_budget is None else self._settings.hbm_budget

    @property
    def torch_device(self) -> str:
        """Where scorers run."""
        return "cpu" if self.fused is None else str(self.fused.device)

    def place(self, segment: Segment, replaced_bytes: int = 0) -> Placed:
        """A segment's tables where this worker looks them up, within what other models and versions leave of the budget.

        replaced_bytes: of a version in hbm that goes when this one is taken. RegistrationError, QuantError, ServingError: CUDA,
        the GPU's memory or the budget does not allow it.
        """
        fused = self.fused
        if fused is None:
            return Placed(segment.tables, dict.fromkeys(segment.tables, Placement.HOST))
        fused.trim()
        with self._lock:  # one version after another: each sees what those before it took
            left = max(0, self._budget - self._held + replaced_bytes)
            placements = plan_placements(segment.header.tables, self._settings.placement, left)
            hbm_bytes = sum(t.bytes for t in segment.header.tables if placements[t.name] is Placement.HBM)
            placed = Placed(self._tables(fused, segment, placements), placements, hbm_bytes)
            self._held += hbm_bytes
        weakref.finalize(placed, self._release, hbm_bytes)
        return placed

    def _release(self, hbm_bytes: int) -> None:
        self._held -= hbm_bytes

    def _tables(self, fused: "Fused", segment: Segment, placements: Mapping[str, Placement]) -> dict[str, Table | DeviceTable]:
        registration = None
        if Placement.UVM in placements.values() and not fused.is_interpreted:
            registration = Registration(segment, fused.device)
            logger.info("%s: %.1f GB registered with CUDA in %.1f s", segment.path, segment.size / 1e9, registration.seconds)
        variant = Variant.of(*(segment.tables[name] for name, p in placements.items() if p is not Placement.HOST))
        tables: dict[str, Table | DeviceTable] = {}
        for stored in segment.header.tables:
            table = segment.tables[stored.name]
            rows = None if registration is None else registration.view(stored.offset, stored.bytes)
            match placements[stored.name]:
                case Placement.HBM:
                    tables[stored.name] = fused.hold(table, rows, variant)
                case Placement.UVM:
                    tables[stored.name] = fused.view(table, rows, variant)
                case Placement.HOST:
                    tables[stored.name] = table
        return tables
