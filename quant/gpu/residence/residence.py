"""Residences: where a table's rows live for one device. A new tier or placement is a new class here.
A residence owns its rows' device memory, fills in the jobs of lookups, and says what must run first: a gather
by the CPU, or a cache probe. No other code asks for its kind; the kernel's `_row_address`
(`quant.gpu.kernels.lookup`) turns job and id into an address.
    InHbm      all rows were copied to HBM
    Stashable  InHbm in memory that can be freed and refilled at its address (`quant.gpu.residence.stashable`)
    Mapped     rows in registered host memory, read by the GPU or, for many ids, gathered by the CPU
    Cached     rows read through the device's cache; misses come from host memory
    Split      some rows of each block were copied to HBM, the others are read in host memory
    OnHost     the CPU looks the rows up
"""

import ctypes
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.cache import Cache
from tableside.quant.contract import Table
from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError
from tableside.quant.gpu.kernels.job import SPLIT_BLOCK, split_rows
from tableside.quant.row_format import GPU_ALIGNMENT, device_row_bytes

_COPY_CHUNK = 64 << 20  # bytes


class Residence:
    """One table's rows for one device, as its jobs need them."""

    is_on_device = True
    """False: the CPU looks the rows up."""
    is_gathered = False
    """Whether the CPU gathers the rows of requests with many ids."""
    address = 0
    """Of row 0 as jobs have it, whether or not row 0 is read there."""
    hbm_address = 0
    """Of row 0, where all rows lie in HBM as they do on the host; 0: they do not."""
    host_rows: torch.Tensor | None = None
    """The rows in host memory as the device reads them, uint8 [bytes]; None: it does not."""
    hbm_rows = 0
    """Address of slot 0 of the cache, or of the first HBM row of a split table."""
    hbm_share = 0
    """Rows of each SPLIT_BLOCK that are in HBM; 0: the table is not split."""
    cache_table = -1
    """The table's number in the cache; -1: it is not read through one."""

    def hot(self) -> NDArray[np.int64]:
        """Returns ids with rows in HBM because of use, int64 [n], hottest first. Waits for the device."""
        return np.zeros(0, np.int64)

    def warm(self, ids: NDArray[np.int64]) -> None:
        """Brings rows [n], int64, to HBM for later lookups, if the residence can. Does not wait."""

    def take_over(self, before: "Residence", rows: NDArray[np.int64], successors: NDArray[np.int64]) -> None:
        """Keeps cached rows of another table that equal rows of this one. rows, successors: int64 [n] numbers
        in the other table and in this. The other table has to fetch them again. Waits for the device."""


class OnHost(Residence):
    """The CPU looks the rows up."""

    is_on_device = False


class InHbm(Residence):
    """All rows were copied to HBM: uint8 [bytes] in `memory`."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.address = self.hbm_address = memory.data_ptr()

    @classmethod
    def copy_of(cls, table: Table, device: Device, registered: torch.Tensor | None = None) -> "InHbm":
        """Copies a table and waits. registered: as for `Mapped`, for a faster copy. QuantError: no room."""
        memory = allocate(device_bytes(table), device, "a table")
        source = host_bytes(table) if registered is None else registered
        copy_rows(memory, source, table.row_bytes, is_pinned=registered is not None)
        return cls(memory)


class _InHostMemory(Residence):
    """Rows in host memory. rows: uint8 [bytes] on the device over registered memory; None: the table's memory
    (interpreter). QuantError: rows are not padded for a device that reads them there."""

    def __init__(self, table: Table, rows: torch.Tensor | None) -> None:
        if table.row_bytes % GPU_ALIGNMENT:
            raise QuantError(
                f"a GPU does not read rows of {table.row_bytes} bytes in host memory; expected a multiple of "
                f"{GPU_ALIGNMENT}: load the table with row_alignment = {GPU_ALIGNMENT}, or copy it to HBM"
            )
        self._table = table  # keeps the memory of `host_rows` alive
        self.host_rows = host_bytes(table) if rows is None else rows
        self.address = self.host_rows.data_ptr()


class Mapped(_InHostMemory):
    """Rows are read in host memory, or gathered there by the CPU."""

    is_gathered = True


class Cached(_InHostMemory):
    """Rows read through the device's cache until this object goes. name: for statistics. QuantError: the
    cache cannot hold rows of this size."""

    def __init__(self, table: Table, rows: torch.Tensor | None, cache: Cache, name: str) -> None:
        super().__init__(table, rows)
        self._cache = cache
        self._registered = cache.registered(self.address, table.rows, table.row_bytes, name)
        self.hbm_rows, self.cache_table = cache.slots_address, self._registered.number

    def hot(self) -> NDArray[np.int64]:
        return self._cache.hot(self.cache_table)

    def warm(self, ids: NDArray[np.int64]) -> None:
        self._cache.warm(self.cache_table, ids)

    def take_over(self, before: Residence, rows: NDArray[np.int64], successors: NDArray[np.int64]) -> None:
        if isinstance(before, Cached) and before._cache is self._cache:
            self._cache.hand_over(before.cache_table, self.cache_table, rows, successors)


class Split(_InHostMemory):
    """The first `share` rows of each SPLIT_BLOCK, dense in HBM; the others in host memory."""

    def __init__(self, table: Table, rows: torch.Tensor | None, share: int, device: Device) -> None:
        """Copies the HBM rows, and waits for it. QuantError: `share` splits nothing, or there is no room."""
        if not 0 < share < SPLIT_BLOCK:
            raise QuantError(
                f"a share of {share} of {SPLIT_BLOCK} rows; expected 1 to {SPLIT_BLOCK - 1}; "
                "copy the whole table (to_hbm), or read it in place (map_host)"
            )
        super().__init__(table, rows)
        assert self.host_rows is not None, "they are in host memory"
        self._memory = allocate(
            split_rows(table.rows, share) * table.row_bytes, device, f"{share} of {SPLIT_BLOCK} rows"
        )
        self.hbm_rows, self.hbm_share = self._memory.data_ptr(), share
        self._fill(table, self.host_rows)
        device.current_stream().synchronize()

    def _fill(self, table: Table, source: torch.Tensor) -> None:
        blocks, size = table.rows // SPLIT_BLOCK, table.row_bytes
        whole = blocks * SPLIT_BLOCK * size
        of_blocks, rest = (
            self._memory[: blocks * self.hbm_share * size],
            self._memory[blocks * self.hbm_share * size :],
        )
        every_block = source[:whole].view(blocks, SPLIT_BLOCK * size)
        of_blocks.view(blocks, self.hbm_share * size).copy_(every_block[:, : self.hbm_share * size])
        rest.copy_(source[whole : whole + rest.numel()])


def device_bytes(table: Table) -> int:
    """Returns the bytes of a whole table's rows in HBM."""
    return table.rows * device_row_bytes(table.row_bytes)


def host_bytes(table: Table) -> torch.Tensor:
    """Returns a table's memory as uint8 [bytes]. The caller keeps the table alive and does not write."""
    return array_bytes(table.packed)


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
