"""Memory of a device that another process allocated and passed on by a handle (CUDA IPC), and copies within a device.

In Triton's interpreter a device's memory is the host's. There a handle is the name of an object in /dev/shm, and zeros.
"""

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tableside.quant.device.cuda import driver
from tableside.quant.errors import QuantError

HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
_library = functools.cache(driver)  # loading it takes longer than a copy
_WITH_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another GPU is read over the bus between them


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class SharedDeviceMemory:
    """Memory of another process, open as long as this object lives. address: on the device. size: bytes from there on.

    handle: its HANDLE_BYTES bytes. QuantError: CUDA does not open it, or there are fewer than `least` bytes.
    """

    def __init__(self, handle: bytes, least: int, device: torch.device) -> None:
        assert len(handle) == HANDLE_BYTES, "whoever took it in has counted"
        self.address, self.size = _opened(self, handle, device) if device.type == "cuda" else _mapped(self, handle)
        if self.size < least:
            raise QuantError(f"the memory that its handle names has {self.size:,} bytes; expected {least:,} or more")


def _opened(owner: SharedDeviceMemory, handle: bytes, device: torch.device) -> tuple[int, int]:
    library, address = _library(), ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # makes the context this thread's
        if code := library.cuIpcOpenMemHandle_v2(ctypes.byref(address), _Handle.from_buffer_copy(handle), _WITH_PEERS):
            raise QuantError(
                f"CUDA does not open the memory that its handle names (error {code}); expected the handle of memory that a "
                f"living process of this user allocated with cudaMalloc, on a GPU that {device} reaches"
            )
        weakref.finalize(owner, _close, library, address.value, device)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        if code := library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address):
            raise QuantError(f"CUDA does not say how large the memory is that its handle names (error {code})")
    return address.value, base.value + size.value - address.value


def _close(library: ctypes.CDLL, address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        library.cuIpcCloseMemHandle(ctypes.c_uint64(address))


def _mapped(owner: SharedDeviceMemory, handle: bytes) -> tuple[int, int]:
    name = handle.rstrip(b"\0").decode(errors="replace")
    try:
        with (Path("/dev/shm") / name).open("r+b") as file:
            pages = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as error:
        raise QuantError(f"the interpreter finds no memory that its handle names ({error})") from error
    owner.__dict__["_pages"] = pages
    return np.frombuffer(pages, np.uint8).ctypes.data, len(pages)


def copy_within(stream: Any, target: int, source: int, size: int) -> None:
    """Copies bytes between addresses of the device, in the order of a stream (its handle); None: at once, in the interpreter."""
    if stream is None:
        ctypes.memmove(target, source, size)
    elif code := _library().cuMemcpyDtoDAsync_v2(
        ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), ctypes.c_void_p(stream)
    ):
        raise QuantError(f"cuMemcpyDtoDAsync failed (error {code})")


def copy_to_host(stream: Any, target: Any, source: int) -> None:
    """Fills uint8 [n] from an address of the device, and waits for it."""
    address = target.ctypes.data
    if stream is None:
        ctypes.memmove(address, source, target.size)
    elif code := _library().cuMemcpyDtoH_v2(ctypes.c_void_p(address), ctypes.c_uint64(source), ctypes.c_size_t(target.size)):
        raise QuantError(f"cuMemcpyDtoH failed (error {code})")
