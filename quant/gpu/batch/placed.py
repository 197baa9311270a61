"""Places the requests of a batch one after another, and writes inputs and header.
`BatchLayout` takes any layouts. `NativeBatchLayout` takes those of `quant.gpu.batch.steady` and writes the
same bytes in one C call, which releases the GIL for large copies."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.cache.jobs import ProbeJobs
from tableside.quant.cpu import _native
from tableside.quant.device.device import Device
from tableside.quant.gpu.batch.layout import Bases, Layout, aligned
from tableside.quant.gpu.batch.merge import Launch, Launches, merge
from tableside.quant.gpu.batch.resolve import ResolveJobs
from tableside.quant.gpu.kernels.launch_config import NativeLayout

Host = NDArray[np.uint8]
LOCKED_FROM = (
    32 << 10
)  # bytes of a request's inputs from which a copy of their own takes less than staging them


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


class Copy(NamedTuple):
    """Bytes between a request's staged inputs or outputs, from byte `staged` on, and an address."""

    staged: int
    address: int
    size: int


class BatchLayout:
    """Any requests. moves: from each one's inputs to its staged ones."""

    def __init__(
        self, layouts: Sequence[Layout], extras: Sequence[int], stays: Sequence[bool], device: Device
    ) -> None:
        """extras: bytes behind each request's inputs for others to fill. stays: outputs stay on the
        device."""
        self._layouts, self._device = layouts, device
        self._header = b""
        self.moves = [layout.moves_in for layout in layouts]
        stay, self.outputs_at = _outputs_at(layouts, stays)
        inputs = scratch = rows = jobs = located = resolved = 0
        self.bases = []
        for layout, extra, outputs in zip(layouts, extras, self.outputs_at, strict=True):
            self.bases.append(Bases(inputs, outputs, scratch, rows, 4 * located))
            inputs += aligned(layout.in_bytes) + extra
            scratch += layout.scratch
            rows += layout.rows_bytes
            jobs += layout.job_count
            located += layout.cached_ids
            resolved += len(layout.resolved)
        self.sizes = Sizes(
            stay, inputs, sum(layout.out_bytes for layout in layouts), scratch, rows, jobs, resolved
        )

    def launches(self, rows: int) -> tuple[int, Launches]:
        """Returns the header's bytes, and the launches. rows: device address of gathered rows."""
        bases = [Bases(b.inputs, b.outputs, b.scratch, rows + b.rows, b.locations) for b in self.bases]
        self._header, launches = merge(self._layouts, bases, self._device)
        return len(self._header), launches

    def write(
        self, inputs: list[Any], host: Host, header_at: int, locked: list[tuple[int, int]]
    ) -> list[Copy]:
        """Writes the inputs to the staging memory, and the header, if `launches` was called, behind them.
        locked: host ranges that the device copies from. Returns those copies. ValueError: inputs are too
        short."""
        host[header_at : header_at + len(self._header)] = np.frombuffer(self._header, np.uint8)
        parts = [(m, one, b.inputs) for m, one, b in zip(self.moves, inputs, self.bases, strict=True)]
        _native.move_all(parts, host)
        return []  # Python would take longer to find out than to copy


class NativeBatchLayout:
    """Requests that were measured. As `BatchLayout`, but that the rows of none are gathered."""

    def __init__(
        self, layouts: list[NativeLayout], extras: list[int] | None, stays: list[bool] | None
    ) -> None:
        self._layouts, self._has_header = layouts, False
        (
            bases,
            stay,
            inputs,
            outputs,
            scratch,
            jobs,
            resolved,
            header,
            self._launches,
            self._resolve,
            self._probe,
        ) = _native.place_batch(self._layouts, extras, stays)
        self._bases, self._header_bytes = bases, header
        self.sizes = Sizes(stay, inputs, outputs, scratch, 0, jobs, resolved)

    @cached_property
    def bases(self) -> list[Bases]:
        return [
            Bases(i, o, s, 0, at)
            for i, o, s, at in np.frombuffer(self._bases, np.int64).reshape(-1, 4).tolist()
        ]

    @cached_property
    def outputs_at(self) -> list[int]:
        found: list[int] = np.frombuffer(self._bases, np.int64)[1::4].tolist()
        return found

    def launches(self, rows: int) -> tuple[int, Launches]:
        """As of `BatchLayout`."""
        self._has_header = True
        lookups = tuple(
            Launch(is_pooled, alike.key, alike.config, *rest) for alike, is_pooled, *rest in self._launches
        )
        resolve = probe = None
        if self._resolve is not None:
            is_overlaid = any(layout.is_overlaid for layout in self._layouts)
            resolve = ResolveJobs(*self._resolve, is_overlaid)
        if self._probe is not None:
            probe = ProbeJobs(*self._probe)
        return self._header_bytes, Launches(lookups, resolve, probe)

    def write(
        self, inputs: list[Any], host: Host, header_at: int, locked: list[tuple[int, int]]
    ) -> list[Copy]:
        """As of `BatchLayout`."""
        at = header_at if self._has_header else -1
        left = _native.write_batch(self._layouts, self._bases, inputs, host, at, locked, LOCKED_FROM)
        return [Copy(*one) for one in left]


def batch_layout(
    layouts: Sequence[Layout],
    extras: Sequence[int],
    stays: Sequence[bool],
    device: Device,
    natively: bool = True,
) -> BatchLayout | NativeBatchLayout:
    """The requests of a batch. natively: by the C routine, where all of them were measured."""
    if natively:
        native = [layout.native for layout in layouts if layout.native is not None]
        if len(native) == len(layouts):
            return NativeBatchLayout(
                native, [*extras] if any(extras) else None, [*stays] if any(stays) else None
            )
    return BatchLayout(layouts, extras, stays, device)


def _outputs_at(layouts: Sequence[Layout], stays: Sequence[bool]) -> tuple[int, list[int]]:
    """Returns the output bytes that stay on the device, and the start of each request's outputs."""
    at, found = 0, [0] * len(layouts)
    for wanted in (True, False):
        for n, layout in enumerate(layouts):
            if stays[n] is wanted:
                found[n] = at
                at += layout.out_bytes
    return sum(layout.out_bytes for layout, one in zip(layouts, stays, strict=True) if one), found
