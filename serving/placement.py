"""Where a worker's tables lie: in the memory of its GPU, in the segment where the GPU reads them, or with the CPU."""

import logging
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from loader.registration import Registration
from loader.segment import Segment, StoredTable
from quant import CpuBackend, DeviceTable, Table
from serving.errors import ServingError
from serving.settings import INTERPRETER, ServerSettings

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


class Placer:
    """Places the tables of versions for one worker. fused None: the worker has no GPU, every table stays with the CPU."""

    def __init__(self, settings: ServerSettings, cpu: CpuBackend) -> None:
        self.fused: Fused | None = None
        self._settings, self._cpu = settings, cpu
        self._budget = 0

    def open(self) -> None:
        """Takes the device that the settings name. MissingBackend: it is not here."""
        if not self._settings.devices:
            return
        from quant import fused

        (device,) = self._settings.devices  # the supervisor gave each worker one
        name = device if device == INTERPRETER else f"cuda:{device}"
        self.fused = fused.Fused(name, self._cpu, threads=self._settings.threads)
        default = int(self.fused.memory_bytes * _DEFAULT_SHARE / self._settings.workers)  # of workers that share the device
        self._budget = default if self._settings.hbm_budget is None else self._settings.hbm_budget

    @property
    def torch_device(self) -> str:
        """Where scorers run."""
        return "cpu" if self.fused is None else str(self.fused.device)

    def place(self, segment: Segment) -> tuple[Mapping[str, Table | DeviceTable], dict[str, Placement]]:
        """A segment's tables where this worker looks them up, and their placements.

        RegistrationError, QuantError, ServingError: CUDA, the GPU's memory or the budget does not allow it.
        """
        fused = self.fused
        if fused is None:
            return segment.tables, dict.fromkeys(segment.tables, Placement.HOST)
        placements = plan_placements(segment.header.tables, self._settings.placement, self._budget)
        registration = None
        if Placement.UVM in placements.values() and not fused.is_interpreted:
            registration = Registration(segment, fused.device)
            logger.info("%s: %.1f GB registered with CUDA in %.1f s", segment.path, segment.size / 1e9, registration.seconds)
        tables: dict[str, Table | DeviceTable] = {}
        for stored in segment.header.tables:
            table = segment.tables[stored.name]
            rows = None if registration is None else registration.view(stored.offset, stored.bytes)
            match placements[stored.name]:
                case Placement.HBM:
                    tables[stored.name] = fused.hold(table, rows)
                case Placement.UVM:
                    tables[stored.name] = fused.view(table, rows)
                case Placement.HOST:
                    tables[stored.name] = table
        return tables, placements
