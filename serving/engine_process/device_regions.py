"""Regions of a GPU's memory that clients registered, as its engine process uses them: opened when they are
named first.

A region is closed when it is not registered any more and no request uses it.
"""

import base64
import threading
from typing import TYPE_CHECKING, Any

import orjson

from tableside.quant import QuantError
from tableside.serving.errors import bad_request, short
from tableside.serving.model.request import Request
from tableside.serving.shm.regions import PartlyOnDevice, Slice, gone
from tableside.serving.shm.registry import RegionEntry, RegionRegistry

if TYPE_CHECKING:  # they import torch
    from tableside.quant.device.ipc import SharedDeviceMemory
    from tableside.quant.gpu.backend import GpuBackend
    from tableside.quant.gpu.batch.elsewhere import DeviceRange, Elsewhere


def parts_of(inputs: PartlyOnDevice) -> bytes:
    """Where tensors of a request lie on the device, as JSON: [name, offset, size, at] of inputs, then of
    outputs."""
    return orjson.dumps([_listed(inputs.reads), _listed(inputs.writes)])


def _listed(slices: tuple[Slice, ...]) -> list[Any]:
    return [(one.region.entry.name, one.offset, one.size, one.at) for one in slices]


class DeviceRegions:
    """The regions that an engine process has open. Any thread may call. registry: None: clients may
    register none."""

    def __init__(self, registry: RegionRegistry | None, gpu: "GpuBackend") -> None:
        self._registry, self._gpu = registry, gpu
        self._lock = threading.Lock()
        self._generation = -1
        self._entries: dict[str, RegionEntry] = {}
        self._open: dict[str, SharedDeviceMemory] = {}

    def find(self, name: str) -> "SharedDeviceMemory":
        """A region's memory. ApiError: none of that name is registered, or CUDA does not open it."""
        from tableside.quant.device.ipc import SharedDeviceMemory

        with self._lock:
            self._refresh()
            if (found := self._open.get(name)) is not None:
                return found
            if (entry := self._entries.get(name)) is None or not entry.handle:
                raise gone(name)
            try:
                opened = SharedDeviceMemory(base64.b64decode(entry.handle), entry.byte_size, self._gpu.device)
            except QuantError as error:
                raise bad_request(f"CUDA shared memory region {short(name)}: {error}") from error
            self._open[name] = opened
            return opened

    def elsewhere(self, request: Request, inputs: Any, parts: bytes) -> "Elsewhere":
        """A request's inputs with where `parts_of` says that tensors lie. ApiError: a region is gone, or
        the request cannot have tensors there."""
        from tableside.quant.gpu.batch.elsewhere import Elsewhere, check_elsewhere

        reads, writes = orjson.loads(parts)
        try:
            check_elsewhere(request.plan.layout)  # type: ignore[attr-defined]  # the engine's plans are the GPU's
        except QuantError as error:
            raise bad_request(f"CUDA shared memory: {error}") from error
        return Elsewhere(
            inputs, tuple(self._part(*one) for one in reads), tuple(self._part(*one) for one in writes)
        )

    def _part(self, name: str, offset: int, size: int, at: int) -> "DeviceRange":
        from tableside.quant.gpu.batch.elsewhere import DeviceRange

        memory = self.find(name)
        if min(offset, size, at) < 0 or offset + size > memory.size:
            raise bad_request(
                f"CUDA shared memory region {short(name)} has fewer bytes than before; send the request again"
            )
        return DeviceRange(at, size, memory.address + offset, memory)

    def look(self) -> None:
        """Closes what is not registered any more."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        """Takes the list where it changed. The caller holds the lock."""
        if self._registry is None or self._registry.generation == self._generation:
            return
        self._generation, entries = self._registry.read()
        now = {e.name: e for e in entries}
        self._open = {n: m for n, m in self._open.items() if now.get(n) == self._entries.get(n)}
        self._entries = now
