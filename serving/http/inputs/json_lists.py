"""Lists of JSON numbers as arrays: flattened and checked by functions in C, without a step of Python for each
number.

The checks that are fast say only that something is wrong. What is wrong, and where, is looked for by a slower
one.
"""

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
    """The numbers of all features, one feature after another.

    ids: int64. lengths: int32, one a bag. weights: fp32, one an id, or none. id_counts, bag_counts: of each
    feature. are_sums: whether the lengths of each feature are known to add up to its ids.
    """

    ids: bytes
    lengths: bytes
    weights: bytes
    id_counts: Counts
    bag_counts: Counts
    are_sums: bool


def are_all(kind: type, values: Iterable[Any]) -> bool:
    """Whether all values are of this type, and none of a type below it. True where there are none."""
    return set(map(type, values)) <= {kind}


def chained(lists: Iterable[list[Any]]) -> list[Any]:
    """The items of lists, one list after another."""
    return list(chain.from_iterable(lists))


def packed(code: str, numbers: Sequence[Any]) -> bytes | None:
    """Numbers of JSON as C has them: code "q" int64, "i" int32, "f" fp32. None: one is no such number, or
    outside its range.

    Integers are no 1.0 or "1". What `true` and `false` became counts as 1 and 0; the caller must have seen
    that there is none.
    """
    try:
        found = struct.pack(f"{len(numbers)}{code}", *numbers)
    except (struct.error, OverflowError):
        return None
    if code == "f" and not np.isfinite(np.frombuffer(found, np.float32)).all():
        return None
    return found


def bags_of(features: dict[str, Any]) -> FeatureLists | None:
    """The numbers of features that all are lists of bags, [[id, ...], ...]; None: one is something else."""
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
    """The numbers of features that all are objects of values and lengths, or that and weights; None: one
    is something else."""
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
    """Where each run of so many items begins, and the last one ends."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def from_list(name: str, datatype: str, data: Any) -> np.ndarray[Any, Any]:
    """An array of JSON numbers. Ids and lengths must be integers, not true, "1" or 1.0; weights and dense
    values any numbers."""
    flat = flatten(data)
    kinds = set(map(type, flat))
    allowed = {int, float} if datatype == "FP32" else {int}
    dtype = DTYPES[datatype]
    if not kinds <= allowed:
        at = next(i for i, x in enumerate(flat) if type(x) not in allowed)
        if (
            type(flat[at]) is float and abs(flat[at]) >= 2.0**63
        ):  # what the parser makes of an integer that int64 does not hold
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
    """The numbers of a list, or of a list of lists in row-major order. The protocol allows both; no input
    is nested deeper."""
    if not isinstance(data, list):
        raise bad_request(f"data is {short(data)}; expected a list of numbers")
    if data and isinstance(data[0], list):
        if not are_all(list, data):
            row = next(row for row in data if not isinstance(row, list))
            raise bad_request(f"data mixes lists and {short(row)}; expected lists of numbers")
        return chained(data)
    return data
