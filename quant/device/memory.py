"""Memory of a device at an address that stays while the memory itself is given back and taken again.

CUDA's virtual memory (cuMemCreate, cuMemMap); on the CPU, where Triton's interpreter runs, pages of an anonymous mapping. What is
given back is anybody's: torch's allocator, or another process. What is taken again holds anything.
"""

import ctypes
import mmap
import weakref
from typing import Any

import torch

from tableside.quant.errors import QuantError


class DeviceMemory:
    """`size` bytes, taken. tensor: uint8 [size] over them, which must not be used while they are given back.

    QuantError: the device has no room.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._pages: _CudaPages | _HostPages = _CudaPages(size, device) if device.type == "cuda" else _HostPages(size)
        self.is_taken = False
        self.take()
        self.tensor = _as_tensor(self._pages, size, device)

    def take(self) -> None:
        """Takes memory again. QuantError: the device has no room, not even once torch gave back what it keeps for later."""
        if not self.is_taken:
            self._pages.take()
            self.is_taken = True

    def give_back(self) -> None:
        """Gives the memory back; nothing on the device may be using it."""
        if self.is_taken:
            self._pages.give_back()
            self.is_taken = False


class _HostPages:
    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def take(self) -> None:
        pass

    def give_back(self) -> None:
        self.memory.madvise(mmap.MADV_DONTNEED)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_DEVICE, _PINNED, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2


class _CudaPages:
    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._device = device
        location = _Location(_DEVICE, device.index or 0)
        self._properties, self._access = _Properties(_PINNED, 0, location), _Access(location, _READ_WRITE)
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # makes the context
            unit = ctypes.c_size_t()
            self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), 0)
            self._size = ctypes.c_size_t(-(-max(1, size) // unit.value) * unit.value)
            self._at = ctypes.c_uint64()
            self._call("cuMemAddressReserve", ctypes.byref(self._at), self._size, ctypes.c_size_t(0), ctypes.c_uint64(0), 0)
        self._taken: list[ctypes.c_uint64] = []
        self.address = self._at.value
        weakref.finalize(self, _let_go, self._driver, self._at, self._size, self._taken, device)

    def take(self) -> None:
        handle = ctypes.c_uint64()
        with torch.cuda.device(self._device):
            arguments = (ctypes.byref(handle), self._size, ctypes.byref(self._properties), ctypes.c_uint64(0))
            code = self._driver.cuMemCreate(*arguments)
            if code == _OUT_OF_MEMORY:
                torch.cuda.empty_cache()
                code = self._driver.cuMemCreate(*arguments)
            if code:
                free, _ = torch.cuda.mem_get_info(self._device)
                raise QuantError(
                    f"{self._device} has no room for {self._size.value:,} bytes of tables ({free:,} are free, error {code}); "
                    "free some, or take smaller batches"
                )
            try:
                self._call("cuMemMap", self._at, self._size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
                try:
                    self._call("cuMemSetAccess", self._at, self._size, ctypes.byref(self._access), ctypes.c_size_t(1))
                except BaseException:
                    self._driver.cuMemUnmap(self._at, self._size)
                    raise
            except BaseException:
                self._driver.cuMemRelease(handle)
                raise
        self._taken.append(handle)

    def give_back(self) -> None:
        with torch.cuda.device(self._device):
            self._call("cuMemUnmap", self._at, self._size)
            self._call("cuMemRelease", self._taken.pop())

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise QuantError(f"{name} failed on {self._device} (error {code})")


def _let_go(driver: Any, at: ctypes.c_uint64, size: ctypes.c_size_t, taken: list[ctypes.c_uint64], device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        if taken:
            driver.cuMemUnmap(at, size)
            driver.cuMemRelease(taken.pop())
        driver.cuMemAddressFree(at, size)


class _View:
    """What torch makes a tensor of; the tensor keeps it, and with it the pages."""

    def __init__(self, pages: _CudaPages, size: int) -> None:
        self._pages = pages
        self.__cuda_array_interface__ = {"data": (pages.address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _as_tensor(pages: _CudaPages | _HostPages, size: int, device: torch.device) -> torch.Tensor:
    if isinstance(pages, _HostPages):
        return torch.frombuffer(pages.memory, dtype=torch.uint8)[:size]
    return torch.as_tensor(_View(pages, size), device=device)
