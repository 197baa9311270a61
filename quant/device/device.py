"""The device that runs the kernels: a GPU (`CudaDevice`), or Triton's interpreter (`InterpretedDevice`) for
tests, which does everything at once. Streams and events are torch's."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tableside.quant.device.memory import DeviceMemory


class Device(ABC):
    """A device. torch_device: its torch device. A handle is what a launch takes for a stream.
    architecture: 90 for sm_90; 0: none. compiles: False: a program takes milliseconds at any width.
    reads_all_memory: kernels can read unregistered host memory."""

    torch_device: torch.device
    architecture = 0
    compiles = True
    reads_all_memory = False

    def __str__(self) -> str:
        return str(self.torch_device)

    @property
    @abstractmethod
    def description(self) -> str:
        """Name for people."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of its memory."""

    @property
    def pci_address(self) -> str | None:
        """Its name below /sys/bus/pci/devices; None: it has none."""
        return None

    def is_lost(self) -> bool:
        """True if this process can no longer use the device, as after most kernel errors. Waits for all
        work."""
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False

    @abstractmethod
    def trim(self) -> None:
        """Gives the device's memory that nothing uses back to it, for other processes."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work."""

    # ---- launches ----

    def block(self, elements: int) -> int:
        """Elements that a program takes, where it takes so many on a GPU."""
        return elements

    def programs(self, most: int) -> int:
        """Programs of a kernel that shares its work among any number of them, `most` at most."""
        return most

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes the device, and this stream of it, the current ones."""

    @abstractmethod
    def switch(self) -> AbstractContextManager[Any] | None:
        """Context manager that makes the device current."""

    @abstractmethod
    def stream(self, priority: int = 0) -> Any:
        """A stream of its own."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The device's current stream."""

    @abstractmethod
    def current_handle(self) -> int | None:
        """The handle of the device's current stream."""

    @abstractmethod
    def event(self, *, blocking: bool = False, timed: bool = False) -> Any:
        """Returns an event. blocking: waiting threads sleep. timed: `elapsed_time` gives milliseconds."""

    @abstractmethod
    def wait(self, event: Any, stream: Any = None) -> None:
        """Makes a stream wait for `event`; None: the current stream, which torch takes longer to find. Does
        nothing during a graph capture: whoever replays the graph orders it."""

    @staticmethod
    @abstractmethod
    def is_capturing() -> bool:
        """True if a CUDA graph is being captured on the current stream."""

    @abstractmethod
    def capture(self, stream: Any, launch: Callable[[], None]) -> Any:
        """Returns the graph of what `launch` launches on a stream; None: the device has no graphs, nothing
        was launched."""

    @abstractmethod
    def host_launcher(self) -> Callable[[int | None, int, int], None]:
        """Returns f(stream, function, address), which makes CUDA call a C function when the stream gets
        there. QuantError: torch's CUDA runtime is not found."""

    # ---- memory ----

    @abstractmethod
    def pinned(self, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Page-locked memory of the host; torch's allocator hands it out again once it is let go."""

    @abstractmethod
    def page_lock(self, address: int, size: int) -> None:
        """Registers memory for direct copies; it must stay mapped until `page_unlock` or exit. QuantError:
        CUDA refuses."""

    @abstractmethod
    def page_unlock(self, address: int, owner: Any) -> None:
        """Undoes `page_lock`, possibly on another thread. No copy may use the memory. owner: keeps it mapped
        meanwhile."""

    @abstractmethod
    def memory(self, size: int) -> DeviceMemory:
        """Memory that can be given back. QuantError: there is no room."""

    @abstractmethod
    def open_shared(self, owner: Any, handle: bytes) -> tuple[int, int]:
        """Opens another process's memory for the life of `owner`; returns address and size. QuantError: it
        does not open."""

    @abstractmethod
    def copy(self, stream: int | None, target: int, source: int, size: int) -> None:
        """Copies bytes between addresses of the device or of page-locked memory, in the order of a stream."""

    @abstractmethod
    def copy_to_host(self, target: int, source: int, size: int) -> None:
        """Copies bytes to the host, and waits for them."""
