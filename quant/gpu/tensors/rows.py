"""Vectors of single ids of one table by the gather kernel: one launch, nothing sent."""

from typing import NamedTuple

import torch

from tableside.quant.device.launch import Kernel
from tableside.quant.errors import QuantError
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.layout import columns
from tableside.quant.gpu.batch.steady import SteadyKind
from tableside.quant.gpu.kernels import compiled as kernels
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.residence.tables import DeviceTable

# From so many ids on, and in tables of so many bytes, rows of host memory are read in the order of their
# addresses: a GPU translates addresses of host memory by pages, and few of them at once.
_ORDERED_IDS, _ORDERED_BYTES = 1 << 16, 2 << 30


class _Variant(NamedTuple):
    ids_32: bool
    is_ordered: bool
    has_heads: bool


class RowGatherer:
    """Gathers rows of a table that the device reads where they lie. name: its number in reports."""

    def __init__(
        self, backend: GpuBackend, kind: SteadyKind, table: DeviceTable, reports: Reports, name: int
    ) -> None:
        self._device, self._launcher, self._reports = backend.device, backend.launcher, reports
        self._kind, self._table, self._name = kind, table, name
        self._columns = columns(table)
        self._is_far = table.residence.reads_host and table.rows * table.row_bytes >= _ORDERED_BYTES
        self._kernels: dict[_Variant, Kernel] = {}

    @staticmethod
    def takes(kind: SteadyKind) -> bool:
        """Whether rows of this kind are read by their number, at one place, and as they are."""
        is_simple = not kind.row_map and kind.cache_table < 0 and not kind.hbm_share
        return is_simple and not kind.is_pooled and bool(kind.is_on_device)

    def __call__(self, ids: torch.Tensor, out: torch.Tensor, bounds: torch.Tensor | None = None) -> None:
        """Writes the vectors of ids, [ids, dim] of the kind's precision, on the current stream. ids: int64 or
        int32 [..., heads], contiguous on the device. bounds: int64 [2, heads], first rows and ends of heads;
        None: ids are row numbers. Wrong ids are reported and read as zeros. QuantError: during a graph
        capture, if no such call ran before."""
        count = ids.numel()
        is_ordered = self._is_far and count >= _ORDERED_IDS
        variant = _Variant(ids.dtype is torch.int32, is_ordered, bounds is not None)
        kernel = self._kernels.get(variant) or self._compiled(variant)
        order = None
        if is_ordered:
            rows = ids.view(-1) if bounds is None else (ids + bounds[0]).view(-1)
            order = torch.argsort(rows if self._table.rows > 2**31 else rows.to(torch.int32))
        self._launcher.await_tables()
        kind = self._kind
        kernel(
            -(-count * self._columns // kernels.GATHER_COLUMNS),
            self._device.current_handle(),
            ids.data_ptr(),
            0 if order is None else order.data_ptr(),
            0 if bounds is None else bounds.data_ptr(),
            1 if bounds is None else bounds.shape[1],
            count,
            kind.table,
            kind.rows,
            self._table.row_bytes,
            out.data_ptr(),
            self._reports.address,
            self._name,
        )

    def _compiled(self, variant: _Variant) -> Kernel:
        if self._device.is_capturing():
            raise QuantError("a call of a new kind cannot be captured; call once like this before")
        kind = self._kind
        kernel = kernels.gather(kind.dim, kind.row_format, kind.precision, **variant._asdict())
        self._kernels[variant] = kernel
        return kernel
