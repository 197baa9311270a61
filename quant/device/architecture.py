"""Asks CUDA's driver for the GPUs' architectures, without torch or a context. A process runs this file alone,
so it must not import our modules."""

import ctypes
import subprocess
import sys
from collections.abc import Sequence

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def architectures(devices: Sequence[int] = (0,)) -> list[int]:
    """Returns the architecture of each device, as 90 for sm_90; empty if the driver lacks one of them."""
    asked = subprocess.run(
        [sys.executable, "-I", __file__, *map(str, devices)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return [] if asked.returncode else [int(found) for found in asked.stdout.split()]


def _ask(devices: Sequence[int]) -> None:
    """Prints them. OSError: there is no driver, or no such device."""
    cuda = ctypes.CDLL("libcuda.so.1")
    _check(cuda.cuInit(0))
    for number in devices:
        device, found = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
        _check(cuda.cuDeviceGet(ctypes.byref(device), number))
        for value, attribute in zip(found, (_MAJOR, _MINOR), strict=True):
            _check(cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        print(10 * found[0].value + found[1].value)


def _check(code: int) -> None:
    if code:
        raise OSError(f"CUDA's driver says {code}")


if __name__ == "__main__":
    _ask([int(number) for number in sys.argv[1:]])
