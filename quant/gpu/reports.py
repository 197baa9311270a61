"""Reports of wrong ids and offsets from tensor lookups, without waiting for the device. Kernels write the
record (`quant.gpu.kernels.tensor_bags.report`) to page-locked memory; without errors it costs the host one
read. Replays of a captured call report too."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tableside.quant.contract import RowSource
from tableside.quant.errors import BadIds, Problem
from tableside.quant.gpu.batch.launcher import Launcher
from tableside.quant.gpu.kernels.job import ReportField


class WrongInput(NamedTuple):
    """A report. name: of the feature. cause: ids or lengths; None: `offset` (number, value) is negative, or
    the first and not 0."""

    name: str
    cause: BadIds | None
    offset: tuple[int, int] = (0, 0)


class _FeatureName(NamedTuple):
    """A feature, and why an id of it is refused; bound: as that of `BadIds`."""

    feature: str
    problem: Problem
    bound: int


def _named(feature: str, table: RowSource) -> _FeatureName:
    if table.row_map is None:
        return _FeatureName(feature, Problem.ID, table.rows)
    return _FeatureName(
        feature, Problem.ID if table.row_map.is_plain else Problem.MISSING, table.row_map.count
    )


class Reports:
    """The first error in a device's lookups since `take`. Thread-safe. address: of the record, for
    kernels."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        on_host = launcher.device.pinned(len(ReportField) + 1, torch.int64).zero_()
        self._claim = torch.zeros(1, dtype=torch.int32, device=launcher.device.torch_device)
        on_host[-1] = self._claim.data_ptr()
        self._held, self._record = on_host, on_host.numpy()
        self.address = on_host.data_ptr()
        self._names: list[_FeatureName] = []
        self._lock = threading.Lock()
        self.wait()  # the claim is written

    def add(self, names: Sequence[str], tables: Sequence[RowSource]) -> int:
        """Registers a lookup's features; returns the first one's number for its jobs (TensorField.NAME)."""
        with self._lock:
            named = [_named(name, table) for name, table in zip(names, tables, strict=True)]
            first = next(
                (at for at in range(len(self._names)) if self._names[at : at + len(named)] == named),
                len(self._names),
            )
            if first == len(self._names):
                self._names += named
            return first

    @property
    def is_there(self) -> bool:
        """True if a finished lookup reported an error."""
        return bool(self._record[ReportField.IS_THERE])

    def wait(self) -> None:
        """Waits for the device."""
        with self._launcher.exclusive():  # nothing is captured meanwhile
            self._launcher.device.synchronize()

    def take(self) -> WrongInput | None:
        """Returns the first report, or None, and clears it; later ones are lost. Waits for the device if
        there is one."""
        if not self.is_there:
            return None
        with self._lock:
            self.wait()
            record = [int(value) for value in self._record[: len(ReportField)]]
            self._record[: len(ReportField)] = 0
            self._claim.zero_()
            self.wait()
        return self._wrong(*record) if record[ReportField.IS_THERE] else None

    def _wrong(
        self, is_there: int, name: int, bag: int, position: int, value: int, end: int, ids: int
    ) -> WrongInput:
        feature, problem, bound = self._names[name]
        if bag < 0:
            return WrongInput(feature, BadIds(problem, 0, position, value, bound))
        if end < value:
            return WrongInput(feature, BadIds(Problem.LENGTH, 0, bag, end - value, 0))
        if value < 0 or (bag == 0 and value != 0):
            return WrongInput(feature, None, (bag, value))
        return WrongInput(feature, BadIds(Problem.SUM, 0, bag + 1, end, ids))
