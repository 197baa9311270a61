"""What torch lacks of CUDA: driver and runtime through ctypes, and tensors over addresses. Libraries load on
first use, so a machine without a GPU can import this module."""

import ctypes
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tableside.quant.device.memory import DeviceMemory
from tableside.quant.errors import QuantError

_READ_ONLY_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_DEVICE, _PINNED, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2


def driver() -> ctypes.CDLL:
    """CUDA's driver. OSError: this machine has none."""
    return ctypes.CDLL("libcuda.so.1")


def runtimes() -> list[ctypes.CDLL]:
    """Returns the CUDA runtimes that this process has loaded: none, one or several, depending on torch's
    build."""
    loaded = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line
    }
    return [ctypes.CDLL(path) for path in sorted(loaded)]


def host_function_launcher() -> Any:
    """Returns cudaLaunchHostFunc of torch's runtime. QuantError: no library of this process has it."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    found = runtimes()
    if not found:
        raise QuantError(
            "torch's CUDA runtime is not among this process's libraries; set gather_threads to 0, and the "
            "GPU reads rows itself"
        )
    return found[0].cudaLaunchHostFunc


def clear_error(cudart: Any) -> None:
    """Clears this thread's last CUDA error; otherwise the next caller, such as torch, would see it."""
    if hasattr(cudart, "cudaGetLastError"):
        cudart.cudaGetLastError()
        return
    for runtime in runtimes():
        runtime.cudaGetLastError()


def registers_read_only(device: torch.device) -> bool:
    """True if a device can register host memory that is mapped read-only."""
    value = ctypes.c_int(0)
    return (
        driver().cuDeviceGetAttribute(ctypes.byref(value), _READ_ONLY_SUPPORTED, device.index or 0) == 0
        and value.value == 1
    )


def pci_address_of(device: torch.device) -> str | None:
    """Returns the name of a device below /sys/bus/pci/devices; None: the driver does not tell."""
    text = ctypes.create_string_buffer(32)
    if driver().cuDeviceGetPCIBusId(text, len(text), device.index or 0):
        return None
    return text.value.decode().lower()


class _CudaArray:
    """An address range that torch accepts as an array. The tensor keeps this object and thus `owner`
    alive."""

    def __init__(self, address: int, size: int, owner: Any) -> None:
        self._owner = owner
        # The second value says that it may be written to: torch knows no read-only arrays.
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def tensor_over(address: int, size: int, device: torch.device, owner: Any) -> torch.Tensor:
    """Returns uint8 [size] over an address that `device` can read; the tensor keeps `owner` alive."""
    return torch.as_tensor(_CudaArray(address, size, owner), device=device)


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


class VirtualMemory(DeviceMemory):
    """A range of GPU addresses with memory that can be unmapped and mapped again (cuMemAddressReserve,
    cuMemCreate, cuMemMap). QuantError: the GPU has no room."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._driver = driver()
        self.size, self._device = size, device
        location = _Location(_DEVICE, device.index or 0)
        self._properties, self._access = _Properties(_PINNED, 0, location), _Access(location, _READ_WRITE)
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # makes the context
            unit = ctypes.c_size_t()
            self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), 0)
            self._mapped_size = ctypes.c_size_t(-(-max(1, size) // unit.value) * unit.value)
            self._at = ctypes.c_uint64()
            self._call(
                "cuMemAddressReserve",
                ctypes.byref(self._at),
                self._mapped_size,
                ctypes.c_size_t(0),
                ctypes.c_uint64(0),
                0,
            )
        self._mapped: list[ctypes.c_uint64] = []
        array = _CudaArray(self._at.value, size, None)  # which the tensor keeps
        weakref.finalize(array, _free, self._driver, self._at, self._mapped_size, self._mapped, device)
        self.take()
        self.tensor = torch.as_tensor(array, device=device)

    def _map(self) -> None:
        handle = ctypes.c_uint64()
        with torch.cuda.device(self._device), ExitStack() as undo:
            arguments = (
                ctypes.byref(handle),
                self._mapped_size,
                ctypes.byref(self._properties),
                ctypes.c_uint64(0),
            )
            code = self._driver.cuMemCreate(*arguments)
            if code == _OUT_OF_MEMORY:
                torch.cuda.empty_cache()
                code = self._driver.cuMemCreate(*arguments)
            if code:
                free, _ = torch.cuda.mem_get_info(self._device)
                raise QuantError(
                    f"{self._device} has no room for {self._mapped_size.value:,} bytes of tables ({free:,} "
                    "are free, error "
                    f"{code}); free some, or take smaller batches"
                )
            undo.callback(self._driver.cuMemRelease, handle)
            self._call(
                "cuMemMap", self._at, self._mapped_size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0)
            )
            undo.callback(self._driver.cuMemUnmap, self._at, self._mapped_size)
            access = ctypes.byref(self._access), ctypes.c_size_t(1)
            self._call("cuMemSetAccess", self._at, self._mapped_size, *access)
            undo.pop_all()  # it stays
        self._mapped.append(handle)

    def _unmap(self) -> None:
        with torch.cuda.device(self._device):
            self._call("cuMemUnmap", self._at, self._mapped_size)
            self._call("cuMemRelease", self._mapped.pop())

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise QuantError(f"{name} failed on {self._device} (error {code})")


def _free(
    library: Any,
    at: ctypes.c_uint64,
    size: ctypes.c_size_t,
    mapped: list[ctypes.c_uint64],
    device: torch.device,
) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        if mapped:
            library.cuMemUnmap(at, size)
            library.cuMemRelease(mapped.pop())
        library.cuMemAddressFree(at, size)
