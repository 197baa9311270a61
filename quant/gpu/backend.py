"""Lookups on a GPU: one launch of `quant.gpu.kernels.lookup` serves all tables of all waiting requests.
One copy sends inputs and jobs, one launch looks up, one copy returns the vectors. Bags with lengths, unpooled
features and a follower (`quant.gpu.batch.follower`) take one more launch each. The GPU reads rows in host
memory itself for few ids, and always for split tables. Random reads over a large span are slow because of
address translation, not bytes (docs/log.md). So from `gather_from` ids on the CPU gathers rows to page-locked
memory, and each chunk is copied while the next is gathered. The third way is a cache (`open_cache`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.contract import (
    Backend,
    Floats,
    Ids,
    Lengths,
    Lookup,
    LookupKind,
    Pooling,
    Precision,
    RowSource,
    Table,
    place_of,
)
from tableside.quant.cpu.backend import CpuBackend
from tableside.quant.cpu.checked import check_arguments
from tableside.quant.errors import MissingBackend, QuantError

try:
    import triton

    from tableside.quant.gpu.kernels import lookup as lookup_kernel
except ImportError as error:
    raise MissingBackend(f"triton does not import ({error}); install tableside[gpu]") from error
from tableside.quant.cache.cache import Cache
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.device.devices import open_device
from tableside.quant.gpu.batch.batches import Batches
from tableside.quant.gpu.batch.launcher import Launcher
from tableside.quant.gpu.batch.layout import Layouts
from tableside.quant.gpu.batch.plan import GpuPlan, GpuPlanner
from tableside.quant.gpu.kernels.launch_config import LaunchConfig, LaunchConfigs
from tableside.quant.gpu.kernels.wanted import KernelKey
from tableside.quant.gpu.residence.layers import DeviceLayers
from tableside.quant.gpu.residence.memory import InHost
from tableside.quant.gpu.residence.registry import COPIED, residence
from tableside.quant.gpu.residence.residence import Residence
from tableside.quant.gpu.residence.row_map import DeviceRowMap
from tableside.quant.gpu.residence.tables import DeviceTable

GATHER_FROM = 4096  # ids of host rows in a request from which the CPU gathers them
# For devices on which a program takes milliseconds, whatever its width.
_WIDE = LaunchConfigs(
    LaunchConfig(4, 1024, 4), LaunchConfig(2, 1024, 4), LaunchConfig(1, 1024, 4), LaunchConfig(2, 256, 4, 4)
)


class GpuBackend(Backend):
    """The lookup kernel on one device: "cuda:0", or "interpreter" (Triton's, on the CPU; slow, for tests).
    cpu: looks up tables not on the device, and gathers, with `threads` threads. One batch is looked up at a
    time. MissingBackend: no such device."""

    name = "fused"
    warm_up_bags: tuple[int, ...] = (2, 32, 64)  # one for each of `LaunchConfigs.of_pooled`

    def __init__(
        self,
        device: str,
        cpu: CpuBackend,
        *,
        threads: int = 1,
        gather_from: int = GATHER_FROM,
        configs: LaunchConfigs | None = None,
    ) -> None:
        self.cpu, self.threads, self.gather_from = cpu, threads, gather_from
        self.device = open_device(
            device, is_compiled=isinstance(lookup_kernel.lookup, triton.runtime.JITFunction)
        )
        self.is_lost = self.device.is_lost
        if not self.device.compiles:
            self.warm_up_bags = self.warm_up_bags[:1]
        self.configs = configs or (LaunchConfigs() if self.device.compiles else _WIDE)
        self.launcher = Launcher(self.device)
        self.batches = Batches(self.launcher)
        self._layers = DeviceLayers(self.device)

    @property
    def cache(self) -> Cache | None:
        """The device's cache, once it is open."""
        return self.launcher.cache

    @property
    def description(self) -> str:
        return f"fused ({self.device.description})"

    # ---- tables ----

    def place(
        self,
        kind: str,
        table: Table,
        rows: torch.Tensor | None = None,
        key: KernelKey | None = None,
        *,
        in_host: InHost = InHost.NOTHING,
        **how: Any,
    ) -> DeviceTable:
        """Places a table in a residence of a kind (`quant.gpu.residence.registry`), until the last reference
        goes. rows: uint8 [bytes] on the device over registered memory; None: the table's own memory, for
        the interpreter and rows that are copied. key: of all tables used together with this one. in_host:
        what of its index is read in the memory that `rows` is a view of. how: as `of` of the kind's class.
        QuantError: it does not fit, or the device does not read that memory."""
        return self.placed(table, residence(kind).of(self.launcher, table, rows, **how), key, in_host)

    def placed(
        self, table: Table, held: Residence, key: KernelKey | None, in_host: InHost = InHost.NOTHING
    ) -> DeviceTable:
        """A table in its residence; its row map is copied to HBM with it (`quant.gpu.residence.row_map`)."""
        has_map = table.row_map is not None and held.is_on_device
        device_map = DeviceRowMap(table, held, self.device, in_host) if has_map else None
        return self.overlay(DeviceTable(table, held, key or KernelKey.of(table), device_map), table)

    def overlay(self, placed: DeviceTable, table: Table, *, in_host: InHost = InHost.NOTHING) -> DeviceTable:
        """Returns a placed table with `table`'s overlay, or none; both tables have the same base rows.
        Rows stay. Missing layers are copied to HBM on a separate stream, so lookups go on; this waits.
        in_host: of new layers. QuantError: no room."""
        assert not placed.is_overlaid, "states are made of the table without one"
        if not placed.residence.is_on_device:
            return replace(placed, host=placed.residence.source(table))
        with self.device.on(self.launcher.copies):
            layers = self._layers.of(table, placed.residence, in_host)
            device_map = placed.device_map
            if layers:
                if device_map is None:
                    device_map = DeviceRowMap(table, placed.residence, self.device)
                device_map = device_map.with_layers(layers)
        return replace(placed, host=table, device_map=device_map)

    def overlay_bytes(self, placed: DeviceTable, table: Table, *, in_host: InHost = InHost.NOTHING) -> int:
        """HBM that `overlay` would take."""
        return (
            self._layers.new_bytes(table, placed.residence, in_host) if placed.residence.is_on_device else 0
        )

    def open_cache(
        self, budget_bytes: int, smallest_row_bytes: int = 32, settings: CacheSettings | None = None
    ) -> Cache:
        """Makes the cache that tables are read through. QuantError: there is one, or too few bytes."""
        if self.cache is not None:
            raise QuantError("this device has a cache already; its tables share one")
        try:
            self.launcher.cache = Cache(
                self.device,
                budget_bytes,
                settings,
                smallest_row_bytes=smallest_row_bytes,
                stream=self.launcher.stream,
            )
        except torch.OutOfMemoryError as error:
            raise QuantError(
                f"a cache of {budget_bytes:,} bytes does not fit on {self.device}; take a smaller budget "
                f"({error})"
            ) from error
        return self.launcher.cache

    # ---- stashing ----

    def stash(self) -> int:
        """Frees the memory of all stashable tables after running lookups; returns the bytes. Copies nothing:
        the host keeps the rows. The next lookup, or `restore`, brings them back."""
        return self.launcher.stash()

    def restore(self) -> None:
        """Begins to restore stashed tables on a separate stream; the next lookup waits, the caller does not.
        QuantError: no room for all; free some and call again, or look up."""
        self.launcher.restore()

    # ---- lookups ----

    def plan(self, lookups: Sequence[Lookup], threads: int = 1, out_bytes: int = 0) -> GpuPlan:
        """Plans as `Backend.plan`. threads: of the CPU, at least the backend's. QuantError: as of
        `Layouts.lay_out`."""
        kinds = [LookupKind(lk.table, lk.pooling, lk.precision) for lk in lookups]
        places = [place_of(lk, n) for n, lk in enumerate(lookups)]
        return self.planner(kinds, threads).plan(np.array(places, np.int64).tobytes(), out_bytes)

    def planner(self, kinds: Sequence[LookupKind], threads: int = 1) -> GpuPlanner:
        layouts = Layouts(
            kinds,
            self.cpu,
            max(threads, self.threads),
            configs=self.configs,
            device=self.device,
            gather_from=self.gather_from,
        )
        return GpuPlanner(self.batches, layouts)

    def lookup(
        self,
        table: RowSource,
        ids: Ids,
        lengths: Lengths | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        weights: NDArray[np.float32] | None = None,
        half: bool = False,
        out: Floats | None = None,
        threads: int = 1,
    ) -> Floats:
        """As the contract says; a table of the host is copied to the device for this one call."""
        held = self.place(COPIED, table) if isinstance(table, Table) else table
        out = check_arguments(held, ids, lengths, pooling, weights, half, out)
        bags = 0 if lengths is None else lengths.size
        lengths_at = None if lengths is None else ids.nbytes
        weights_at = None if weights is None else ids.nbytes + 4 * bags
        precision = Precision.FP16 if half else Precision.FP32
        lk = Lookup(held, pooling, 0, ids.size, 0, precision, bags, lengths_at, weights_at=weights_at)
        inputs = b"".join(array.tobytes() for array in (ids, lengths, weights) if array is not None)
        self.plan([lk], threads).run(inputs, out.reshape(-1).view(np.uint8))
        return out
