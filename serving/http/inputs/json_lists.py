"""JSON lists of numbers as arrays, flattened and checked in C without a Python step per number. The fast
checks only detect errors; a slower one finds and names them."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.serving.errors import ApiError, bad_request, short
from tableside.serving.http.inputs.tensors import DTYPES

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class FeatureLists:
    """The numbers of all features in order. ids: int64. lengths: int32 [bags]. weights: fp32 [ids] or empty.
    id_counts, bag_counts: per feature. are_sums: each feature's lengths add up to its ids."""

    ids: bytes
    lengths: bytes
    weights: bytes
    id_counts: Counts
    bag_counts: Counts
    are_sums: bool


def are_all(kind: type, values: Iterable[Any]) -> bool:
    """Returns whether all values have exactly this type."""
    return set(map(type, values)) <= {kind}


def chained(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def packed(code: str, numbers: Sequence[Any]) -> bytes | None:
    """Packs numbers: code "q" int64, "i" int32, "f" fp32. None: a value is no such number or out of range.
    Rejects 1.0 and "1" as integers but takes booleans as 1 and 0: the caller excludes those."""
    try:
        found = struct.pack(f"{len(numbers)}{code}", *numbers)
    except (struct.error, OverflowError):
        return None
    if code == "f" and not np.isfinite(np.frombuffer(found, np.float32)).all():
        return None
    return found


def bags_of(features: dict[str, Any]) -> FeatureLists | None:
    """Reads features that are all lists of bags, [[id, ...], ...]; None: one is something else."""
    lists = list(features.values())
    if not are_all(list, lists):
        return None
    bags = chained(lists)
    if not are_all(list, bags) or (ids := packed("q", chained(bags))) is None:
        return None
    lengths = np.fromiter(map(len, bags), np.int32, len(bags))
    bag_counts = _lengths(lists)
    id_counts = np.diff(starts_of(lengths)[starts_of(bag_counts)])
    return FeatureLists(ids, lengths.tobytes(), b"", id_counts, bag_counts, True)


def jagged_of(features: dict[str, Any]) -> FeatureLists | None:
    """Reads features that all have values, lengths and (all or none) weights; None: one is something else."""
    objects = list(features.values())
    if not are_all(dict, objects):
        return None
    forms = set(map(frozenset, objects))
    if forms not in ({frozenset(("values", "lengths"))}, {frozenset(("values", "lengths", "weights"))}):
        return None
    has_weights = "weights" in objects[0]
    values, lengths = (list(map(itemgetter(part), objects)) for part in ("values", "lengths"))
    weights = list(map(itemgetter("weights"), objects)) if has_weights else []
    if not are_all(list, [*values, *lengths, *weights]) or (
        has_weights and list(map(len, values)) != list(map(len, weights))
    ):
        return None
    ids, bag_lengths = packed("q", chained(values)), packed("i", chained(lengths))
    if ids is None or bag_lengths is None or (fp32 := packed("f", chained(weights))) is None:
        return None
    return FeatureLists(ids, bag_lengths, fp32, _lengths(values), _lengths(lengths), False)


def _lengths(lists: list[list[Any]]) -> Counts:
    return np.fromiter(map(len, lists), np.int64, len(lists))


def starts_of(counts: NDArray[Any]) -> Counts:
    """Returns the start of each run of so many items, and the end of the last: [n + 1]."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def from_list(name: str, datatype: str, data: Any) -> np.ndarray[Any, Any]:
    """Makes an array of JSON numbers. Ids and lengths must be integers; FP32 takes any numbers."""
    flat = flatten(data)
    kinds = set(map(type, flat))
    allowed = {int, float} if datatype == "FP32" else {int}
    dtype = DTYPES[datatype]
    if not kinds <= allowed:
        at = next(i for i, x in enumerate(flat) if type(x) not in allowed)
        # what the parser makes of an integer that int64 does not hold
        if type(flat[at]) is float and abs(flat[at]) >= 2.0**63:
            raise _outside(name, datatype, flat, at)
        expected = "a number" if datatype == "FP32" else "an integer"
        raise bad_request(f"{short(name)}: value {short(flat[at])} at position {at} is not {expected}")
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
        return chained(data)
    return data
