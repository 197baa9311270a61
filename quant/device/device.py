"""The device that runs the kernels: a GPU (`CudaDevice`), or Triton's interpreter on the CPU
(`InterpretedDevice`), for tests.

Streams and events are torch's. The interpreter does everything at once, and its streams and events do
nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tableside.quant.device.memory import DeviceMemory


class Device(ABC):
    """A device. torch_device: as torch names it.

    architecture: as 90 of sm_90; 0: it has none. compiles: it compiles kernels; else a program takes
    milliseconds, whatever its width. reads_all_memory: its kernels read host memory that is not registered,
    too. A handle is what a launch takes for a stream.
    """

    torch_device: torch.device
    architecture = 0
    compiles = True
    reads_all_memory = False

    def __str__(self) -> str:
        return str(self.torch_device)

    @property
    @abstractmethod
    def description(self) -> str:
        """What people call it."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of its memory."""

    def is_lost(self) -> bool:
        """Whether this process cannot use the device any more, as after most errors of a kernel. Waits for
        all work."""
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

    @abstractmethod
    def block(self, elements: int) -> int:
        """Elements that a program takes, where it takes so many on a GPU."""

    @abstractmethod
    def programs(self, most: int) -> int:
        """Programs of a kernel that shares its work among any number of them, `most` at most."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes the device, and this stream of it, the current ones."""

    @abstractmethod
    def switch(self) -> AbstractContextManager[Any] | None:
        """What makes the device the current one; None: it is."""

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
        """An event. blocking: whoever waits for it sleeps. timed: `elapsed_time` tells the milliseconds
        between two."""

    @abstractmethod
    def wait(self, event: Any, stream: Any = None) -> None:
        """What comes next on a stream comes after `event`; None: on the current one, which takes torch longer
        to find.

        Not where a graph is captured: it may not wait for what came before it, and whoever replays it orders
        it.
        """

    @staticmethod
    @abstractmethod
    def is_capturing() -> bool:
        """Whether a CUDA graph is captured on the current stream."""

    @abstractmethod
    def capture(self, stream: Any, launch: Callable[[], None]) -> Any:
        """What `launch` launches on a stream, as a graph; None: the device has none, and nothing was
        launched."""

    @abstractmethod
    def host_launcher(self) -> Callable[[int | None, int, int], None]:
        """What takes (stream, function, address), and has CUDA call a C function with it once the stream has
        come to this point.

        QuantError: torch's CUDA runtime is not found.
        """

    # ---- memory ----

    @abstractmethod
    def pinned(self, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Page-locked memory of the host; torch's allocator hands it out again once it is let go."""

    @abstractmethod
    def page_lock(self, address: int, size: int) -> None:
        """Registers memory of this process, which stays mapped until it ends or `page_unlock`: copies need no
        staging.

        QuantError: CUDA refuses, as where more may not be locked.
        """

    @abstractmethod
    def page_unlock(self, address: int, owner: Any) -> None:
        """Undoes `page_lock`, beside the caller. owner: keeps the memory mapped. Nothing is copied from it
        or to it any more."""

    @abstractmethod
    def memory(self, size: int) -> DeviceMemory:
        """Memory that can be given back. QuantError: there is no room."""

    @abstractmethod
    def open_shared(self, owner: Any, handle: bytes) -> tuple[int, int]:
        """Opens another process's memory as long as `owner` lives. Returns its address and size.
        QuantError: it does not open."""

    @abstractmethod
    def copy(self, stream: int | None, target: int, source: int, size: int) -> None:
        """Copies bytes between addresses of the device or of page-locked memory, in the order of a stream."""

    @abstractmethod
    def copy_to_host(self, target: int, source: int, size: int) -> None:
        """Copies bytes to the host, and waits for them."""
