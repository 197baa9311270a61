"""Places the requests of a batch one after another, and writes inputs and header, by routines of C
(`quant/cpu/native/_native_batch.c`), which release the GIL for large copies. The header tells kernels of the
launches:
for each launch: jobs int64 [jobs, FIELDS] · job of each program int32 [programs] · zeros to 8
then the jobs of the resolve kernel (`quant.gpu.batch.resolve`) and the cache (`quant.cache.jobs`)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cpu import _native
from tableside.quant.device.device import Device
from tableside.quant.device.launch import Jobs
from tableside.quant.gpu.batch.layout import Bases, Layout
from tableside.quant.gpu.kernels.launch_config import LaunchConfig
from tableside.quant.gpu.kernels.wanted import KernelKey

Host = NDArray[np.uint8]
LOCKED_FROM = (
    32 << 10
)  # bytes of a request's inputs from which a copy of their own takes less than staging them


@dataclass(frozen=True)
class Launch:
    """Jobs of one launch. jobs_at, programs_at: header offsets of jobs and of programs' jobs. members:
    (request, its first flag, end of its flags)."""

    pooled: bool
    key: KernelKey
    config: LaunchConfig
    jobs: int
    programs: int
    first_flag: int
    has_lengths: bool
    is_weighted: bool
    is_indirect: bool
    jobs_at: int
    programs_at: int
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Launches:
    """Launches of a batch, in order: `resolve` and `probe`, if any, then the lookups. Requests with equal
    kernels and launch configurations share one. is_overlaid: a table of `resolve` has an overlay. address:
    of the header on the device."""

    lookups: tuple[Launch, ...]
    resolve: Jobs | None
    probe: Jobs | None
    is_overlaid: bool = False
    address: int = 0

    def placed(self, address: int) -> "Launches":
        """The same, with the header at this address of the device, a multiple of 8."""
        resolve = None if self.resolve is None else self.resolve.placed(address)
        probe = None if self.probe is None else self.probe.placed(address)
        return replace(self, resolve=resolve, probe=probe, address=address)


class Sizes(NamedTuple):
    """A batch's bytes in the buffers (scratch: int32 values). stay: the first outputs, which stay on the
    device. jobs, resolved: numbers of jobs and of lookups with mapped ids."""

    stay: int
    inputs: int
    outputs: int
    scratch: int
    rows: int
    jobs: int
    resolved: int
    header: int


class Copy(NamedTuple):
    """Bytes between a request's staged inputs or outputs, from byte `staged` on, and an address."""

    staged: int
    address: int
    size: int


class BatchLayout:
    """Requests one after another. extras: bytes behind each one's inputs for others to fill. stays: outputs
    stay on the device. moves: by number, of requests of which other parts are staged than their layouts
    say."""

    def __init__(
        self, layouts: Sequence[Layout], extras: Sequence[int] = (), stays: Sequence[bool] = ()
    ) -> None:
        self._requests = [layout.native for layout in layouts]
        self.moves: dict[int, bytes] = {}
        self._has_header = False
        self._bases, *sizes, self._launches, self._resolve, self._probe = _native.place_batch(
            self._requests, [*extras] if any(extras) else None, [*stays] if any(stays) else None
        )
        self.sizes = Sizes(*sizes)

    @cached_property
    def bases(self) -> list[Bases]:
        rows = np.frombuffer(self._bases, np.int64).reshape(-1, len(Bases._fields))
        return [Bases(*row) for row in rows.tolist()]

    @cached_property
    def outputs_at(self) -> list[int]:
        found: list[int] = np.frombuffer(self._bases, np.int64)[1 :: len(Bases._fields)].tolist()
        return found

    def launches(self) -> Launches:
        """The launches, whose header `write` writes then."""
        self._has_header = True
        lookups = tuple(
            Launch(is_pooled, alike.key, alike.config, *rest) for alike, is_pooled, *rest in self._launches
        )
        resolve = None if self._resolve is None else Jobs(*self._resolve)
        probe = None if self._probe is None else Jobs(*self._probe)
        is_overlaid = resolve is not None and any(one.is_overlaid for one in self._requests)
        return Launches(lookups, resolve, probe, is_overlaid)

    def write(
        self,
        inputs: list[Any] | None,
        host: Host,
        header_at: int,
        locked: list[tuple[int, int]],
        rows_at: int = 0,
    ) -> list[Copy]:
        """Writes the inputs to the staging memory, if any are given, and the header, if `launches` was
        called, at `header_at`. locked: host ranges that the device copies from. rows_at: device address of
        gathered rows. Returns the copies that are left to the device. ValueError: inputs are too short."""
        at = header_at if self._has_header else -1
        for n, moves in self.moves.items():
            assert inputs is not None, "others are staged"
            inputs[n] = moves, inputs[n]
        left = _native.write_batch(
            self._requests, self._bases, inputs, host, at, rows_at, locked, LOCKED_FROM
        )
        return [Copy(*one) for one in left]


def launches_on_device(layout: Layout, device: Device) -> tuple[torch.Tensor, Launches]:
    """The header of one request on the device, and what is to be launched."""
    alone = BatchLayout([layout])
    launches = alone.launches()
    header = np.empty(alone.sizes.header, np.uint8)
    alone.write(None, header, 0, [])
    memory = torch.empty(max(1, header.size), dtype=torch.uint8, device=device.torch_device)
    memory[: header.size].copy_(torch.from_numpy(header))
    return memory, launches.placed(memory.data_ptr())
