"""Where the tables of a version were placed."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tableside.quant import RowSource

if TYPE_CHECKING:
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

    def take_over(self) -> None:
        """Keeps the replaced version's unchanged cached rows. Call it as requests move to this version: the
        other one must fetch them again."""
        base = self.base
        handovers, base.handovers = base.handovers, []  # they hold the replaced version
        for handover in handovers:
            handover()
