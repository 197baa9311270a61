"""Where a table's rows live for one device. A new tier or placement is a new class here.

A residence owns the memory that its rows need on the device. When a request is laid out, it writes where the rows of a lookup
are into the lookup's job, and says what must happen before the kernel runs: ids staged, rows gathered by the CPU, or ids
probed in the cache. Nobody else asks which kind it is. The kernel turns a job and an id into an address in one function,
`_row_address` of `quant.gpu.lookup_kernel`.

    InHbm      all rows were copied to HBM
    Stashable  as InHbm, in memory that can be given back and filled again at the same address
    Mapped     rows are read in host memory that is registered with CUDA, by the GPU or, for many ids, gathered by the CPU
    Cached     rows are read through the device's cache; misses come from host memory
    Split      some rows of each block were copied to HBM, the others are read in host memory
    OnHost     the CPU looks the rows up; the device never sees them
"""

import ctypes
from abc import ABC, abstractmethod
from dataclasses import replace
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.cache import Cache
from tableside.quant.contract import Lookup, Table
from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError
from tableside.quant.gpu.job import SPLIT_BLOCK, Job, JobField, split_rows

_COPY_CHUNK = 64 << 20  # bytes


class Preparation(Protocol):
    """What a residence may ask a request's layout to do before the lookup."""

    def stage_ids(self, job: Job, lookup: Lookup) -> int:
        """Has the ids sent to the device, and notes it in the job; returns their offset in the request's staged inputs."""

    def gathers(self, lookup: Lookup) -> bool:
        """Whether the CPU is to gather the rows of this lookup, because the request has many ids and there is room for them."""

    def gather(self, lookup: Lookup, table: Table) -> int:
        """Has the CPU gather the rows of this lookup; returns their offset among the request's gathered rows."""

    def probe(self, table: int, ids_at: int, ids: int) -> int:
        """Has the cache find staged ids of its table number `table`; returns the offset of their locations."""

    def leave_to_host(self, lookup: Lookup, table: Table) -> None:
        """Has the CPU's backend run this lookup."""


class Residence(ABC):
    """Where the rows of one table live for one device."""

    is_steady = False
    """Whether what it writes into jobs is the same for every lookup of the table, but for where ids and locations are staged."""
    hbm_address = 0
    """Of row 0, where all rows lie in HBM as they do on the host; 0: they do not."""
    host_rows: torch.Tensor | None = None
    """The rows in host memory as the device reads them, uint8 [bytes]; None: it does not."""

    @property
    def address(self) -> int:
        """Of row 0 as jobs have it, whether or not row 0 is read there."""
        return self.hbm_address if self.host_rows is None else self.host_rows.data_ptr()

    @abstractmethod
    def write(self, job: Job, lookup: Lookup, preparation: Preparation) -> bool:
        """Writes where the lookup's rows are found into `job`, and asks for what must happen before.

        Returns whether the device runs the lookup.
        """

    def ids_in_host_memory(self, lookup: Lookup) -> int:
        """Ids of a lookup whose rows the GPU would read in host memory, unless the CPU gathers them."""
        return 0

    def hot(self) -> NDArray[np.int64]:
        """Ids whose rows are in HBM because they were used, int64 [n], the hottest first. Waits for the device."""
        return np.zeros(0, np.int64)

    def warm(self, ids: NDArray[np.int64]) -> None:  # noqa: B027  (most residences have nothing to bring)
        """Brings rows to HBM for lookups to come, where that can be chosen. ids: int64 [n], of rows. Waits for nothing."""

    def take_over(self, before: "Residence", rows: NDArray[np.int64], successors: NDArray[np.int64]) -> None:  # noqa: B027  (as `warm`)
        """Keeps rows that another table's residence holds in the cache that both share, and that are rows of this table with the
        same bytes: int64 [n] each, numbers of its rows and of this one's. That table has to fetch them again. Waits for the
        device."""


class OnHost(Residence):
    """The CPU looks the rows up."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def write(self, job: Job, lookup: Lookup, preparation: Preparation) -> bool:
        preparation.leave_to_host(lookup, self._table)
        return False


class InHbm(Residence):
    """All rows were copied to HBM: uint8 [bytes] in `memory`."""

    is_steady = True

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.hbm_address = memory.data_ptr()

    @classmethod
    def copy_of(cls, table: Table, device: Device, registered: torch.Tensor | None = None) -> "InHbm":
        """Copies a table, and waits for it. registered: as for `Mapped`, from which copies are faster. QuantError: no room."""
        memory = allocate(table.packed.size, device, "a table")
        copy_from_host(memory, host_bytes(table) if registered is None else registered, is_pinned=registered is not None)
        return cls(memory)

    def write(self, job: Job, lookup: Lookup, preparation: Preparation) -> bool:
        preparation.stage_ids(job, lookup)
        job[JobField.TABLE] = self.hbm_address
        return True


class Stashable(InHbm):
    """All rows were copied to HBM, and the memory can be given back. Nothing is copied then: the host keeps the rows."""

    def __init__(self, table: Table, device: Device, registered: torch.Tensor | None = None) -> None:
        self._pages = device.memory(table.packed.size)
        self._source = host_bytes(table) if registered is None else registered
        self._table = table  # keeps the memory of `_source` alive
        copy_from_host(self._pages.tensor, self._source, is_pinned=registered is not None)
        super().__init__(self._pages.tensor)

    @property
    def bytes(self) -> int:
        """HBM that it takes when it is not away."""
        return self._pages.size

    @property
    def is_away(self) -> bool:
        """Whether its memory is given back."""
        return not self._pages.is_taken

    def give_back(self) -> None:
        """Gives the memory back. No lookup may be under way."""
        self._pages.give_back()

    def bring_back(self) -> None:
        """Begins to copy the rows back, on the current stream. QuantError: the device has no room."""
        self._pages.take()
        try:
            self._pages.tensor.copy_(self._source, non_blocking=True)
        except BaseException:
            self._pages.give_back()
            raise


class Mapped(Residence):
    """Rows are read in host memory.

    rows: uint8 [bytes] on the device, over registered memory; None: the table's own memory, which only the interpreter reads.
    """

    def __init__(self, table: Table, rows: torch.Tensor | None) -> None:
        self.host_rows = host_bytes(table) if rows is None else rows
        self._table = replace(table, row_map=None)  # the CPU gathers by row numbers
        self._address = self.host_rows.data_ptr()

    def ids_in_host_memory(self, lookup: Lookup) -> int:
        return lookup.ids

    def write(self, job: Job, lookup: Lookup, preparation: Preparation) -> bool:
        if preparation.gathers(lookup):
            job.offset(JobField.TABLE, preparation.gather(lookup, self._table))
            job[JobField.ROWS] = lookup.ids
        else:
            preparation.stage_ids(job, lookup)
            job[JobField.TABLE] = self._address
        return True


class Cached(Residence):
    """Rows are read through the device's cache. The table leaves the cache with this object.

    rows: as for `Mapped`. name: for statistics. QuantError: the cache cannot hold rows of this size.
    """

    is_steady = True

    def __init__(self, table: Table, rows: torch.Tensor | None, cache: Cache, name: str) -> None:
        self._table = table  # keeps the memory of `host_rows` alive
        self.host_rows = host_bytes(table) if rows is None else rows
        self._cache = cache
        self._address = self.host_rows.data_ptr()
        self._registered = cache.registered(self._address, table.rows, table.row_bytes, name)

    def write(self, job: Job, lookup: Lookup, preparation: Preparation) -> bool:
        ids_at = preparation.stage_ids(job, lookup)
        job[JobField.TABLE] = self._address
        job[JobField.HBM_ROWS] = self._cache.slots_address
        job.offset(JobField.LOCATIONS_AT, preparation.probe(self._registered.number, ids_at, lookup.ids))
        return True

    def hot(self) -> NDArray[np.int64]:
        return self._cache.hot(self._registered.number)

    def warm(self, ids: NDArray[np.int64]) -> None:
        self._cache.warm(self._registered.number, ids)

    def take_over(self, before: Residence, rows: NDArray[np.int64], successors: NDArray[np.int64]) -> None:
        if isinstance(before, Cached) and before._cache is self._cache:
            self._cache.hand_over(before._registered.number, self._registered.number, rows, successors)


class Split(Residence):
    """The first `share` rows of each SPLIT_BLOCK lie in HBM one after another; the others are read in host memory.

    rows: as for `Mapped`.
    """

    is_steady = True

    def __init__(self, table: Table, rows: torch.Tensor | None, share: int, device: Device) -> None:
        """Copies the HBM rows, and waits for it. QuantError: there is no room."""
        assert 0 < share < SPLIT_BLOCK, "see check_share"
        self._table, self._share = table, share  # the table keeps the memory of `host_rows` alive
        self.host_rows = host_bytes(table) if rows is None else rows
        self._address = self.host_rows.data_ptr()
        self._memory = allocate(split_rows(table.rows, share) * table.row_bytes, device, f"{share} of {SPLIT_BLOCK} rows")
        self._fill(table, self.host_rows)
        device.current_stream().synchronize()

    def _fill(self, table: Table, source: torch.Tensor) -> None:
        blocks, size = table.rows // SPLIT_BLOCK, table.row_bytes
        whole = blocks * SPLIT_BLOCK * size
        of_blocks, rest = self._memory[: blocks * self._share * size], self._memory[blocks * self._share * size :]
        every_block = source[:whole].view(blocks, SPLIT_BLOCK * size)
        of_blocks.view(blocks, self._share * size).copy_(every_block[:, : self._share * size])
        rest.copy_(source[whole : whole + rest.numel()])

    def write(self, job: Job, lookup: Lookup, preparation: Preparation) -> bool:
        preparation.stage_ids(job, lookup)
        job[JobField.TABLE] = self._address
        job[JobField.HBM_ROWS] = self._memory.data_ptr()
        job[JobField.HBM_SHARE] = self._share
        return True


def check_share(share: int) -> None:
    """QuantError: a table cannot be split so that `share` rows of each SPLIT_BLOCK are in HBM."""
    if not 0 < share < SPLIT_BLOCK:
        raise QuantError(
            f"a share of {share} of {SPLIT_BLOCK} rows; expected 1 to {SPLIT_BLOCK - 1}; "
            "copy the whole table (to_hbm), or read it in place (map_host)"
        )


def host_bytes(table: Table) -> torch.Tensor:
    """A table's memory as a tensor, uint8 [bytes]. The caller keeps the table alive, and must not write to the tensor."""
    return array_bytes(table.packed)


def array_bytes(array: NDArray[Any]) -> torch.Tensor:
    """A contiguous array's memory, of a byte at least, as a tensor, uint8 [bytes]. The caller keeps the array alive, and must not
    write to the tensor."""
    # torch warns of arrays that say they are read-only, as a segment's do.
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


class InHost(IntEnum):
    """What of a delta, or of a table's index, lies in page-locked memory of the host, where the device reads it; it takes no HBM.

    SOME: a delta's rows; the ids that an index keeps.
    """

    NOTHING = 0
    SOME = 1
    ALL = 2


def allocate_for(size: int, device: Device, what: str, in_host: bool) -> torch.Tensor:
    """uint8 [size] that a device reads, on it or in page-locked memory of the host. QuantError: there is no room for `what`."""
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
            f"{what} of {size:,} bytes does not fit on {device}; keep fewer rows in HBM, or read them in host memory ({error})"
        ) from error


def copy_from_host(target: torch.Tensor, source: torch.Tensor, is_pinned: bool) -> None:
    """Fills a tensor on a device from the host, and waits for it.

    Memory that is not page-locked goes through two page-locked chunks in turn.
    """
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
