"""Triton's interpreter, in which tests run the GPU's kernels synchronously in host memory.
Patching it halves the time of a launch: Triton 3.9 looks for language functions to replace at each call
between kernel functions; here a launch does so once per language module. Launches of several threads run one
after another, since each undoes its replacements. Unknown forms of the interpreter stay unpatched."""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from tableside.quant.device.device import Device
from tableside.quant.device.memory import DeviceMemory
from tableside.quant.errors import QuantError

_BLOCK = 1024  # elements of a program, whose width costs nothing


class InterpretedDevice(Device):
    """Runs copies and launches synchronously. The handle of shared memory is the name of a file in
    /dev/shm."""

    torch_device = torch.device("cpu")
    description = "Triton's interpreter"
    compiles = False
    reads_all_memory = True

    def __init__(self) -> None:
        _replace_once_a_launch()

    @property
    def memory_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def trim(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def block(self, elements: int) -> int:
        return max(elements, _BLOCK)

    def programs(self, most: int) -> int:
        return 1

    def on(self, stream: Any) -> Any:
        return np.errstate(all="ignore")  # a GPU does not warn either

    def switch(self) -> Any:
        return np.errstate(all="ignore")

    def stream(self, priority: int = 0) -> "_Immediate":
        return _Immediate()

    def current_stream(self) -> "_Immediate":
        return _Immediate()

    def current_handle(self) -> int | None:
        return None

    def event(self, *, blocking: bool = False, timed: bool = False) -> "_Immediate":
        return _Immediate()

    def wait(self, event: Any, stream: Any = None) -> None:
        pass

    @staticmethod
    def is_capturing() -> bool:
        return False

    def capture(self, stream: Any, launch: Callable[[], None]) -> Any:
        return None

    def host_launcher(self) -> Callable[[int | None, int, int], None]:
        return lambda stream, function, address: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(address)

    def pinned(self, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def page_lock(self, address: int, size: int) -> None:
        pass

    def page_unlock(self, address: int, owner: Any) -> None:
        pass

    def memory(self, size: int) -> "_AnonymousMemory":
        return _AnonymousMemory(size)

    def open_shared(self, owner: Any, handle: bytes) -> tuple[int, int]:
        name = handle.rstrip(b"\0").decode(errors="replace")
        try:
            with (Path("/dev/shm") / name).open("r+b") as file:
                owner.pages = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
        except (OSError, ValueError) as error:
            raise QuantError(f"the interpreter finds no memory that its handle names ({error})") from error
        return np.frombuffer(owner.pages, np.uint8).ctypes.data, len(owner.pages)

    def copy(self, stream: int | None, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def copy_to_host(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)


class _Immediate:
    """A stream, on which all is done, or an event, which has happened."""

    cuda_stream = None
    priority = 0
    _recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, later: "_Immediate") -> float:
        return 1e3 * (later._recorded_s - self._recorded_s)

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def _is_done(self, *_: Any) -> None:
        pass

    synchronize = wait = wait_stream = _is_done


class _AnonymousMemory(DeviceMemory):
    def __init__(self, size: int) -> None:
        self.size = size
        self._pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)[:size]
        self.take()

    def _map(self) -> None:
        """The operating system maps pages as they are touched."""

    def _unmap(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)


class _ReplaceOnce:
    """Wraps Triton's function that replaces what a kernel sees; calls it once a launch."""

    def __init__(self, replace: Any) -> None:
        self._replace, self._lock = replace, threading.RLock()
        self._replaced: frozenset[str] = frozenset()

    def __call__(self, fn: Any) -> Any:
        """Returns the replacements that the caller must undo; those of an outer function stay its own."""
        seen = _languages(fn)
        if seen <= self._replaced:
            return interpreter._LangPatchScope()
        self._replaced |= seen
        return self._replace(fn)

    @contextmanager
    def launch(self) -> Iterator[None]:
        with self._lock:
            before, self._replaced = self._replaced, frozenset()
            try:
                yield
            finally:
                self._replaced = before


@cache
def _languages(fn: Any) -> frozenset[str]:
    """The names of the language's modules that a function sees."""
    modules = (interpreter.tl, interpreter.tl.core)
    return frozenset(m.__name__ for m in modules if any(value is m for value in fn.__globals__.values()))


def _replace_once_a_launch() -> None:
    """Patches this process's interpreter to replace functions once a launch. Idempotent."""
    replace = getattr(interpreter, "_patch_lang", None)
    if isinstance(replace, _ReplaceOnce) or not hasattr(interpreter, "_LangPatchScope"):
        return
    once, run = _ReplaceOnce(replace), interpreter.GridExecutor.__call__

    def launched(executor: Any, *arguments: Any, **constants: Any) -> None:
        with once.launch():
            run(executor, *arguments, **constants)

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = launched
