"""The address space as one buffer, for inputs and outputs that lie apart: places (`quant.contract.Place`) are
offsets into one buffer each."""

import ctypes
from typing import Any

import numpy as np

from tableside.quant.rows.ids import array_address

BASE = 4096  # nothing lies below: an offset of 0 would begin at a null pointer
MEMORY = (ctypes.c_char * (1 << 62)).from_address(BASE)


def offset_of(buffer: Any) -> int:
    """Returns where a buffer begins in `MEMORY`; it must live while that is used."""
    return array_address(np.ndarray(0, np.uint8, buffer)) - BASE
