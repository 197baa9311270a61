"""Copies between host and device in the order of a stream, by one call of CUDA's driver each.

torch makes several calls for one, at each of which other threads may take Python's lock. In Triton's interpreter the device's
memory is the host's, and a copy is made at once.
"""

import ctypes
import functools
import threading
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.device.cuda import page_lock, page_unlock
from tableside.quant.errors import QuantError

_here = threading.local()


@functools.cache
def _library() -> ctypes.PyDLL:
    """CUDA's driver, whose calls keep Python's lock: they only enqueue."""
    library = ctypes.PyDLL("libcuda.so.1")
    for call in (library.cuMemcpyHtoDAsync_v2, library.cuMemcpyDtoHAsync_v2):
        call.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)  # both addresses have 64 bits
    return library


def _driver() -> ctypes.PyDLL:
    """The same, once the context of torch's device is this thread's: the driver makes none by itself."""
    if not hasattr(_here, "has_context"):
        torch.cuda.current_stream().query()
        _here.has_context = True
    return _library()


def copy_in(stream: int | None, target: int, source: int, size: int) -> None:
    """Copies bytes to the device. source: in page-locked memory. stream: its handle; None: in the interpreter."""
    if stream is None:
        ctypes.memmove(target, source, size)
    elif code := _driver().cuMemcpyHtoDAsync_v2(target, source, size, stream):
        raise QuantError(f"cuMemcpyHtoDAsync failed (error {code})")


def copy_out(stream: int | None, target: int, source: int, size: int) -> None:
    """Copies bytes to the host. target: in page-locked memory."""
    if stream is None:
        ctypes.memmove(target, source, size)
    elif code := _driver().cuMemcpyDtoHAsync_v2(target, source, size, stream):
        raise QuantError(f"cuMemcpyDtoHAsync failed (error {code})")


class LockedMemory:
    """Parts of this process's memory that a device copies from by itself: page-locked as long as they are mapped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: dict[int, int] = {}  # where each begins and ends

    def add(self, memory: NDArray[np.uint8]) -> None:
        """Takes a part, until the last view of it goes. QuantError: CUDA does not lock it."""
        address, is_cuda = int(memory.ctypes.data), self._device.type == "cuda"
        if is_cuda:
            page_lock(address, memory.size, self._device)
        self._parts[address] = address + memory.size
        # The array's memory is an argument so that it cannot be unmapped before.
        weakref.finalize(memory, _let_go, self._parts, address, memory.base, self._device if is_cuda else None).atexit = False

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Where each part begins and ends."""
        return list(self._parts.items())


def _let_go(parts: dict[int, int], address: int, owner: Any, device: torch.device | None) -> None:
    """On a thread where CUDA has locked the part: that takes milliseconds, and the last view may go in the midst of a request."""
    del parts[address]
    if device is not None:
        threading.Thread(target=_unlock, args=(address, owner, device), name="tableside-unlock").start()


def _unlock(address: int, owner: Any, device: torch.device) -> None:
    page_unlock(address, device)
