"""Memory of tables: in HBM, page-locked, or the host's, and copies between them."""

import ctypes
from enum import IntEnum
from typing import Any

import torch
from numpy.typing import NDArray

from tableside.quant.contract import Table
from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError
from tableside.quant.row_format import device_row_bytes

_COPY_CHUNK = 64 << 20  # bytes


def device_bytes(table: Table) -> int:
    """Returns the bytes of a whole table's rows in HBM."""
    return table.rows * device_row_bytes(table.row_bytes)


def array_bytes(array: NDArray[Any]) -> torch.Tensor:
    """Returns a contiguous nonempty array's memory as uint8 [bytes]. The caller keeps the array alive and
    does not write."""
    # torch warns of arrays that say they are read-only, as a segment's do.
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


class InHost(IntEnum):
    """Parts of a delta or index in page-locked host memory instead of HBM. SOME: a delta's rows; an index's
    ids."""

    NOTHING = 0
    SOME = 1
    ALL = 2


def allocate_for(size: int, device: Device, what: str, in_host: bool) -> torch.Tensor:
    """Returns uint8 [size] on the device or in page-locked host memory. QuantError: no room for `what`."""
    if not in_host:
        return allocate(size, device, what)
    try:
        return device.pinned(size)
    except RuntimeError as error:
        raise QuantError(
            f"{size:,} bytes of {what} cannot be page-locked; the machine has too little memory ({error})"
        ) from error


def fill(target: torch.Tensor, array: NDArray[Any], in_host: bool) -> None:
    """Copies an array to memory of `allocate_for`, and waits for it."""
    if not array.nbytes:
        return
    if in_host:
        target.copy_(array_bytes(array))
    else:
        copy_from_host(target, array_bytes(array), is_pinned=False)


def allocate(size: int, device: Device, what: str) -> torch.Tensor:
    """uint8 [size] on a device. QuantError: there is no room for `what`."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device.torch_device)
    except torch.OutOfMemoryError as error:
        raise QuantError(
            f"{what} of {size:,} bytes does not fit on {device}; keep fewer rows in HBM, or read them in "
            f"host memory ({error})"
        ) from error


def copy_rows(target: torch.Tensor, source: torch.Tensor, row_bytes: int, is_pinned: bool) -> None:
    """Copies packed rows from host memory to HBM, padded there, and waits. is_pinned: as for
    `copy_from_host`."""
    if (padded := device_row_bytes(row_bytes)) == row_bytes:
        copy_from_host(target, source, is_pinned)
        return
    rows, padded_rows = source.view(-1, row_bytes), target.view(-1, padded)
    step = max(1, _COPY_CHUNK // padded)
    for start in range(0, len(rows), step):
        part = torch.nn.functional.pad(rows[start : start + step], (0, padded - row_bytes))
        copy_from_host(padded_rows[start : start + step].view(-1), part.view(-1), is_pinned)


def copy_from_host(target: torch.Tensor, source: torch.Tensor, is_pinned: bool) -> None:
    """Copies a host tensor to the device and waits; unpinned memory goes through two page-locked chunks in
    turn."""
    if target.device.type != "cuda":
        target.copy_(source)
        return
    with torch.cuda.device(target.device):
        if is_pinned:
            target.copy_(source)
            torch.cuda.current_stream().synchronize()
            return
        size = min(_COPY_CHUNK, source.numel())
        chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copied: list[Any] = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        for n, start in enumerate(range(0, source.numel(), size)):
            count = min(size, source.numel() - start)
            copied[n % 2].synchronize()
            chunks[n % 2][:count].copy_(source[start : start + count])
            target[start : start + count].copy_(chunks[n % 2][:count], non_blocking=True)
            copied[n % 2].record()
        torch.cuda.current_stream().synchronize()
