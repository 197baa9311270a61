"""The address space as one buffer, for inputs and outputs that lie apart: places (`quant.contract.Place`) are
offsets into one buffer each."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import FIELD, Place
from tableside.quant.rows.ids import array_address

BASE = 4096  # nothing lies below: an offset of 0 would begin at a null pointer
MEMORY = (ctypes.c_char * (1 << 62)).from_address(BASE)
# Whether a field is an offset into the inputs, or into the outputs
_OF_INPUTS = np.array([name in ("ids_at", "lengths_at", "weights_at") for name in Place._fields], np.int64)
_OF_OUTPUTS = np.array([name in ("out_at", "found_at") for name in Place._fields], np.int64)


def offset_of(buffer: Any) -> int:
    """Returns where a buffer begins in `MEMORY`; it must live while that is used."""
    return array_address(np.ndarray(0, np.uint8, buffer)) - BASE


def places_in_memory(
    places: NDArray[np.int64], inputs: Any, outputs: Any, numbers_at: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns places [n, fields of `Place`] as offsets into `MEMORY`. numbers_at: [n] addresses of what
    lookups read instead of ids, or 0."""
    starts = offset_of(inputs) * _OF_INPUTS + offset_of(outputs) * _OF_OUTPUTS
    places = places + (places >= 0) * starts
    ids_at = places[:, FIELD["ids_at"]]
    np.copyto(ids_at, numbers_at - BASE, where=numbers_at != 0)
    return places
