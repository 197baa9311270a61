"""JSON lists of numbers and of string ids as arrays; what is wrong with one is found and named."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from tableside.loader.string_ids import string_ids
from tableside.serving.errors import ApiError, bad_request, short
from tableside.serving.http.inputs.tensors import DTYPES, STRINGS

_ALLOWED: dict[str, tuple[set[type], str]] = {
    "FP32": ({int, float}, "a number"),
    STRINGS: ({str}, "a string"),
}


def are_all(kind: type, values: Iterable[Any]) -> bool:
    """Returns whether all values have exactly this type."""
    return set(map(type, values)) <= {kind}


def from_list(name: str, datatype: str, data: Any) -> np.ndarray[Any, Any]:
    """Makes an array of JSON numbers; of BYTES, the ids of strings. Other ids and lengths must be integers;
    FP32 takes any numbers."""
    flat = flatten(data)
    kinds = set(map(type, flat))
    allowed, expected = _ALLOWED.get(datatype, ({int}, "an integer"))
    if not kinds <= allowed:
        at = next(i for i, x in enumerate(flat) if type(x) not in allowed)
        # what the parser makes of an integer that int64 does not hold
        if type(flat[at]) is float and abs(flat[at]) >= 2.0**63 and datatype != STRINGS:
            raise _outside(name, datatype, flat, at)
        raise bad_request(f"{short(name)}: value {short(flat[at])} at position {at} is not {expected}")
    if datatype == STRINGS:
        return string_ids(flat)
    dtype = DTYPES[datatype]
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, dtype)
        if datatype == "FP32" and not np.isfinite(array).all():
            at = int(np.flatnonzero(~np.isfinite(array))[0])
            raise bad_request(f"{short(name)}: value {short(flat[at])} at position {at} is not a finite FP32")
        return array
    except OverflowError:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        at = next(i for i, x in enumerate(flat) if not low <= x <= high)
        raise _outside(name, datatype, flat, at) from None


def _outside(name: str, datatype: str, flat: list[Any], at: int) -> ApiError:
    info = np.iinfo(DTYPES[datatype])
    return bad_request(
        f"{short(name)}: value {short(flat[at])} at position {at} is outside {datatype}'s [{info.min}, "
        f"{info.max}]"
    )


def flatten(data: Any) -> list[Any]:
    """Flattens a list, or a list of lists in row-major order, the protocol's two forms."""
    if not isinstance(data, list):
        raise bad_request(f"data is {short(data)}; expected a list of numbers")
    if data and isinstance(data[0], list):
        if not are_all(list, data):
            row = next(row for row in data if not isinstance(row, list))
            raise bad_request(f"data mixes lists and {short(row)}; expected lists of numbers")
        return list(chain.from_iterable(data))
    return data
