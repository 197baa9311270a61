"""The devices by their names."""

from tableside.quant.contract import INTERPRETER
from tableside.quant.device.cuda_device import CudaDevice
from tableside.quant.device.device import Device
from tableside.quant.device.interpreter import InterpretedDevice
from tableside.quant.errors import MissingBackend


def open_device(name: str, is_compiled: bool) -> Device:
    """Opens "cuda:N" or INTERPRETER. is_compiled: whether the imported kernels are compiled. MissingBackend:
    no such device."""
    if (name == INTERPRETER) is is_compiled:
        raise MissingBackend(
            f"device {name!r} was asked for, and TRITON_INTERPRET was {'not ' if is_compiled else ''}set "
            "when "
            f"the kernels were imported; {'set it to 1' if is_compiled else 'unset it'}"
        )
    return CudaDevice(name) if is_compiled else InterpretedDevice()
