"""Memory of a device that another process allocated and passed on by a handle (CUDA IPC)."""

from tableside.quant.contract import HANDLE_BYTES
from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError


class SharedDeviceMemory:
    """Another process's device memory, open for the life of this object. address: on the device; size: in
    bytes. handle: HANDLE_BYTES bytes. QuantError: CUDA does not open it, or it has fewer than `least`
    bytes."""

    def __init__(self, handle: bytes, least: int, device: Device) -> None:
        assert len(handle) == HANDLE_BYTES, "whoever took it in has counted"
        self.address, self.size = device.open_shared(self, handle)
        if self.size < least:
            raise QuantError(
                f"the memory that its handle names has {self.size:,} bytes; expected {least:,} or more"
            )
