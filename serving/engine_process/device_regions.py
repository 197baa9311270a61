"""Clients' regions in a GPU's memory, opened by the engine process on first use. A region is closed once it
is unregistered and no request uses it."""

import base64
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from tableside.quant import QuantError
from tableside.serving.errors import bad_request, short
from tableside.serving.model.request import Request
from tableside.serving.shm.regions import PartlyOnDevice, RegionEntry, RegionRegistry, Slice, gone

if TYPE_CHECKING:  # they import torch
    from tableside.quant.device.ipc import SharedDeviceMemory
    from tableside.quant.gpu.backend import GpuBackend
    from tableside.quant.gpu.batch.elsewhere import DeviceRange, Elsewhere


def parts_of(inputs: PartlyOnDevice) -> bytes:
    """Returns tensors' places on the device as JSON: [name, offset, size, at] of inputs, then outputs."""
    return orjson.dumps([_listed(inputs.reads), _listed(inputs.writes)])


def _listed(slices: tuple[Slice, ...]) -> list[Any]:
    return [(one.region.entry.name, one.offset, one.size, one.at) for one in slices]


def between(holes: Sequence[Slice], end: int) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges (first, end) of [0, end) outside the holes."""
    at = 0
    for hole in sorted(holes, key=lambda hole: hole.at):
        if hole.at > at:
            yield at, hole.at
        at = hole.at + hole.size
    if at < end:
        yield at, end


class DeviceRegions:
    """The engine process's open regions. Any thread may call. registry: None if not allowed."""

    def __init__(self, registry: RegionRegistry | None, gpu: "GpuBackend") -> None:
        self._registry, self._gpu = registry, gpu
        self._lock = threading.Lock()
        self._generation = -1
        self._entries: dict[str, RegionEntry] = {}
        self._open: dict[str, SharedDeviceMemory] = {}

    def find(self, name: str) -> "SharedDeviceMemory":
        """Returns a region's memory. ApiError: it is not registered, or CUDA does not open it."""
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
        """Returns inputs with the places that `parts_of` wrote. ApiError: a region is gone, or not allowed
        here."""
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
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        """Rereads a changed list. The caller holds the lock."""
        if self._registry is None or self._registry.generation == self._generation:
            return
        self._generation, entries = self._registry.read()
        now = {e.name: e for e in entries}
        self._open = {n: m for n, m in self._open.items() if now.get(n) == self._entries.get(n)}
        self._entries = now
