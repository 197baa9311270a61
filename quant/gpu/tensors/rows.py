"""Vectors of single ids of one table by the gather kernel: one launch, nothing sent."""

from contextlib import nullcontext
from typing import Any

import torch

from tableside.quant.device.launch import Kernel
from tableside.quant.errors import QuantError
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.layout import DeviceKind, columns
from tableside.quant.gpu.kernels import compiled as kernels
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.residence.tables import DeviceTable

# From so many ids on, and in tables of so many bytes, rows of host memory are read in the order of their
# addresses: a GPU translates addresses of host memory by pages, and few of them at once.
_ORDERED_IDS, _ORDERED_BYTES = 1 << 16, 2 << 30
# Programs that read host memory beside other work: enough for the bus, and few enough for that work.
_BESIDE_PROGRAMS = 16


class RowGatherer:
    """Gathers rows of a table that the device reads where they lie. name: its number in reports."""

    def __init__(
        self, backend: GpuBackend, kind: DeviceKind, table: DeviceTable, reports: Reports, name: int
    ) -> None:
        self._device, self._launcher = backend.device, backend.launcher
        self._kind, self._table = kind, table
        self._columns, self._rows = columns(table), (kind.table, kind.rows, table.row_bytes)
        self._report = reports.address, name
        self._reads_host = table.residence.reads_host
        self._is_far = self._reads_host and table.rows * table.row_bytes >= _ORDERED_BYTES
        self._kernels: dict[tuple[bool, bool, bool], Kernel] = {}

    @staticmethod
    def takes(kind: DeviceKind) -> bool:
        """Whether rows of this kind are read by their number, at one place, and as they are."""
        is_simple = not kind.row_map and kind.cache_table < 0 and not kind.hbm_share
        return is_simple and not kind.is_pooled and bool(kind.is_on_device)

    def __call__(
        self, ids: torch.Tensor, out: torch.Tensor, bounds: torch.Tensor | None = None, beside: Any = None
    ) -> int | None:
        """Writes the vectors of ids, [..., dim] of the kind's precision; returns the stream's handle. ids:
        int64 or int32 [..., heads], contiguous on the device. bounds: int64 [2, heads], first rows and ends
        of heads; None: ids are row numbers. beside: a stream beside other work; None: the current one. Wrong
        ids are reported and read as zeros. QuantError: during a graph capture, if no such call ran before."""
        count = ids.numel()
        is_ordered = self._is_far and count >= _ORDERED_IDS
        variant = ids.dtype is torch.int32, is_ordered, bounds is not None
        kernel = self._kernels.get(variant) or self._compiled(variant)
        self._launcher.await_tables()
        handle = self._device.current_handle() if beside is None else beside.cuda_stream
        order = self._order(ids, bounds, beside) if is_ordered else None
        programs = -(-count * self._columns // kernels.GATHER_COLUMNS)
        kernel(
            programs if beside is None or not self._reads_host else min(programs, _BESIDE_PROGRAMS),
            handle,
            ids.data_ptr(),
            0 if order is None else order.data_ptr(),
            0 if bounds is None else bounds.data_ptr(),
            1 if bounds is None else bounds.shape[1],
            count,
            *self._rows,
            out.data_ptr(),
            *self._report,
        )
        return handle

    def _order(self, ids: torch.Tensor, bounds: torch.Tensor | None, beside: Any) -> torch.Tensor:
        with nullcontext() if beside is None else self._device.on(beside):
            rows = ids.view(-1) if bounds is None else (ids + bounds[0]).view(-1)
            return torch.argsort(rows if self._table.rows > 2**31 else rows.to(torch.int32))

    def _compiled(self, variant: tuple[bool, bool, bool]) -> Kernel:
        if self._device.is_capturing():
            raise QuantError("a call of a new kind cannot be captured; call once like this before")
        kind, (ids_32, is_ordered, has_heads) = self._kind, variant
        self._kernels[variant] = kernels.gather(
            kind.dim,
            kind.row_format,
            kind.precision,
            ids_32=ids_32,
            is_ordered=is_ordered,
            has_heads=has_heads,
        )
        return self._kernels[variant]
