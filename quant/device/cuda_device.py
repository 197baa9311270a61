"""A GPU. A copy is one call of CUDA's driver; torch makes several, and other threads may take the GIL at
each."""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import triton

from tableside.quant.contract import HANDLE_BYTES
from tableside.quant.device.cuda import (
    VirtualMemory,
    clear_error,
    driver,
    host_function_launcher,
    pci_address_of,
)
from tableside.quant.device.device import Device
from tableside.quant.errors import MissingBackend, QuantError

_PORTABLE = 1  # cudaHostRegisterPortable: for every context
_WITH_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another GPU is read over the bus between them
_here = threading.local()


class CudaDevice(Device):
    """name: "cuda:0". MissingBackend: CUDA has no such device here."""

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available():
            raise MissingBackend(
                f"device {name!r} was asked for, and torch {torch.__version__} finds no CUDA device here; "
                "check the driver (nvidia-smi) and that torch was built for CUDA"
            )
        if name not in (known := [f"cuda:{n}" for n in range(torch.cuda.device_count())]):
            raise MissingBackend(f"device {name!r} is unknown; this machine has: {', '.join(known)}")
        self.torch_device = torch.device(name)
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        self.architecture = 10 * major + minor
        self._index: int = self.torch_device.index
        # Triton's own way to the handle: torch's makes an object of it, which takes as long as a launch.
        self._handle_of: Any = triton.runtime.driver.active.get_current_stream

    @property
    def description(self) -> str:
        return f"{torch.cuda.get_device_name(self.torch_device)}, {self.torch_device}"

    @property
    def memory_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    @property
    def pci_address(self) -> str | None:
        return pci_address_of(self.torch_device)

    def trim(self) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)  # which makes the stream's device the current one, too

    def switch(self) -> Any:
        return None if torch._C._cuda_getDevice() == self._index else torch.cuda.device(self._index)

    def stream(self, priority: int = 0) -> Any:
        return torch.cuda.Stream(self.torch_device, priority)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self._index)

    def current_handle(self) -> int | None:
        return int(self._handle_of(self._index))

    def event(self, *, blocking: bool = False, timed: bool = False) -> Any:
        return torch.cuda.Event(timed, blocking)  # type: ignore[no-untyped-call]

    def wait(self, event: Any, stream: Any = None) -> None:
        if not torch.cuda.is_current_stream_capturing():
            event.wait(stream)

    is_capturing = staticmethod(torch.cuda.is_current_stream_capturing)

    def capture(self, stream: Any, launch: Callable[[], None]) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph

    def host_launcher(self) -> Callable[[int | None, int, int], None]:
        enqueue = host_function_launcher()

        def launch(stream: int | None, function: int, address: int) -> None:
            if code := enqueue(ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(address)):
                raise QuantError(
                    f"cudaLaunchHostFunc failed (error {code}); set gather_threads to 0, and the GPU reads "
                    "rows itself"
                )

        return launch

    def pinned(self, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def page_lock(self, address: int, size: int) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.synchronize(self.torch_device)  # makes the context
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if code := int(cudart.cudaHostRegister(address, size, _PORTABLE)):
                clear_error(cudart)
                raise QuantError(
                    f"CUDA does not lock {size:,} bytes of this process's memory (error {code}); free "
                    "memory, let more be "
                    "locked (ulimit -l), or ask for less"
                )

    def page_unlock(self, address: int, owner: Any) -> None:
        """Unlocks on another thread: it takes milliseconds, and the memory's last view may go during a
        request."""
        threading.Thread(target=self._unlock, args=(address, owner), name="tableside-unlock").start()

    def _unlock(self, address: int, owner: Any) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def memory(self, size: int) -> VirtualMemory:
        return VirtualMemory(size, self.torch_device)

    def open_shared(self, owner: Any, handle: bytes) -> tuple[int, int]:
        library, address = driver(), ctypes.c_uint64()
        with torch.cuda.device(self.torch_device):
            torch.cuda.current_stream(self.torch_device).query()  # makes the context this thread's
            if code := library.cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _Handle.from_buffer_copy(handle), _WITH_PEERS
            ):
                raise QuantError(
                    f"CUDA does not open the memory that its handle names (error {code}); expected the "
                    "handle of memory that a "
                    f"living process of this user allocated with cudaMalloc, on a GPU that {self} reaches"
                )
            weakref.finalize(owner, _close, library, address.value, self.torch_device)
            base, size = ctypes.c_uint64(), ctypes.c_size_t()
            if code := library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address):
                raise QuantError(
                    f"CUDA does not say how large the memory is that its handle names (error {code})"
                )
        return address.value, base.value + size.value - address.value

    def copy(self, stream: int | None, target: int, source: int, size: int) -> None:
        if code := _copier()(target, source, size, stream):
            raise QuantError(f"cuMemcpyAsync failed (error {code})")

    def copy_to_host(self, target: int, source: int, size: int) -> None:
        if code := driver().cuMemcpyDtoH_v2(
            ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(size)
        ):
            raise QuantError(f"cuMemcpyDtoH failed (error {code})")


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


def _close(library: ctypes.CDLL, address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        library.cuIpcCloseMemHandle(ctypes.c_uint64(address))


@functools.cache
def _library() -> ctypes.PyDLL:
    """CUDA's driver, whose calls keep Python's lock: they only enqueue."""
    library = ctypes.PyDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return library


def _copier() -> Any:
    """The driver's copy, once the context of torch's device is this thread's: the driver makes none by
    itself."""
    try:
        return _here.copy
    except AttributeError:
        torch.cuda.current_stream().query()
        _here.copy = _library().cuMemcpyAsync
        return _here.copy
