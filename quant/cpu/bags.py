"""Bags as lookups take them: int32 lengths, made of lengths or offsets of any integers, and the places of features whose bags lie
one after another, as in TorchRec's KeyedJaggedTensor.

The extension does this (`_native_bags.c`), or numpy where it was not built. Neither copies ids, nor looks at them. The extension
also reads tensors (`_native_tensors.c`), by a table of C functions that DLPack 1.3 describes and torch has from 2.11 on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Place

try:
    from tableside.quant.cpu import _native
except ImportError:  # it was not built
    _native = None  # type: ignore[assignment]

MOST_IDS = 2**31 - 1  # that bags can have together: lengths are int32
IDS, FIXED, LENGTHS, OFFSETS, ENDS = range(5)  # how ids make bags: not at all, so many each, or as other integers say
_UNSIGNED = {4: np.uint32, 8: np.uint64}  # in which a negative number becomes one above any count of ids


def lengths_of(memory: Any, at: int, item_bytes: int, items: int, ids: int, form: int) -> tuple[object, int] | None:
    """Lengths [bags], int32, and their address, which is theirs as long as they live.

    memory, at: where `items` integers of `item_bytes` 4 or 8 lie, in any memory that has the buffer protocol. form: they are
    `LENGTHS`, or where each bag begins among the `ids` (`OFFSETS`), and where the last one ends (`ENDS`, of which there is one).

    None: one is negative or above `ids`, the first offset is not 0, or `ids` is above `MOST_IDS`. The lookup refuses lengths that
    do not add up, and the negative ones of offsets that descend. ValueError: the integers do not lie in `memory`.
    """
    if _native is not None:
        return _native.lengths_of(memory, at, item_bytes, items, ids, form)
    if items < (form == ENDS) or form not in (LENGTHS, OFFSETS, ENDS):
        raise ValueError(f"{items} items or the form {form} are out of range")
    found: NDArray[Any] = np.frombuffer(memory, _UNSIGNED[item_bytes], items, at) if items else np.empty(0, np.uint64)
    if ids > MOST_IDS or (items and (found.max() > ids or (form != LENGTHS and found[0]))):
        return None
    numbers = found.astype(np.int64)
    if form != LENGTHS:
        numbers = np.diff(numbers) if form == ENDS else np.diff(numbers, append=ids)
    lengths = numbers.astype(np.int32)
    return lengths, lengths.ctypes.data


def parts_of(memory: Any, lengths_at: int, features: int, bags: int, ids: int) -> bytes | None:
    """The first id of each feature, and how many it has: int64 [2, features], of lengths int32 [features, bags] in `memory`.

    None: a length is negative or above `ids`, they do not add up to `ids`, or those are more than `MOST_IDS`. ValueError: they do
    not lie in `memory`, or there is no feature.
    """
    if _native is not None:
        return _native.parts_of(memory, lengths_at, features, bags, ids)
    if features < 1:
        raise ValueError(f"{features} features; expected at least one")
    count = features * bags
    lengths = np.frombuffer(memory, np.int32, count, lengths_at) if count else np.empty(0, np.int32)
    counts = lengths.reshape(features, -1).sum(1, np.int64) if count else np.zeros(features, np.int64)
    if ids > MOST_IDS or (count and lengths.min() < 0) or counts.sum() != ids:
        return None
    return np.stack([np.cumsum(counts) - counts, counts]).tobytes()


def feature_places(
    parts: bytes, order: list[int] | None, columns: bytes, ids_at: int, lengths_at: int, bags: int, weights_at: int, out_at: int
) -> bytes:
    """Places of lookups, int64 [lookups, fields of `Place`], over features of `bags` bags each.

    parts: as of `parts_of`. order: where the feature of each lookup is among those; None: they are the same. columns: int64
    [lookups], bytes from `out_at` to the first vector of each. ids_at, lengths_at, weights_at: of the first feature; -1: there
    are no weights. ValueError: `order` names no feature, or is not one for each lookup.
    """
    if _native is not None:
        return _native.feature_places(parts, order, columns, ids_at, lengths_at, bags, weights_at, out_at)
    starts, counts = np.frombuffer(parts, np.int64).reshape(2, -1)
    chosen = np.arange(starts.size) if order is None else np.array(order, np.int64)
    at = np.frombuffer(columns, np.int64)
    if chosen.size != at.size or (chosen.size and not 0 <= chosen.min() <= chosen.max() < starts.size):
        raise ValueError(f"order is {order}; expected one of {starts.size} features for each of {at.size} lookups")
    starts, counts = starts[chosen], counts[chosen]
    nothing = np.zeros_like(starts)
    of_each = Place(
        ids_at + 8 * starts,
        counts,
        lengths_at + 4 * bags * chosen,
        nothing,
        nothing + bags,
        nothing - 1 if weights_at < 0 else weights_at + 4 * starts,
        out_at + at if bags else nothing,
        nothing - 1,
    )
    return np.stack(of_each, 1).tobytes()


def tensor_places(
    exchange: Any, given: Sequence[Any], dims: tuple[int, ...], new: Callable[..., Any], base: int
) -> tuple[bytes, list[Any], list[object]] | None:
    """Places over tensors where they lie, int64 [lookups, fields of `Place`], their vectors, and what holds lengths meanwhile.

    exchange: `__dlpack_c_exchange_api__` of the tensors' type, or None where it has none. given: (form, ids, lengths or offsets,
    weights) of each lookup, with None for what is not there. dims: of its vectors. new: makes a contiguous tensor of a shape.
    base: the address that places count from. The vectors are [bags, dim], or [*shape of the ids, dim] of `IDS`.

    None: a tensor is not int64 ids, or not lengths or offsets of those ids, or not contiguous in host memory; or there are
    weights, no table, or no extension. The caller converts what it can, and refuses the rest.
    """
    if _native is None or exchange is None:
        return None
    return _native.tensor_places(exchange, given, dims, new, base)


def tensor_parts(exchange: Any, ids: Any, lengths: Any, features: int, base: int) -> tuple[object, int, int, int, bytes] | None:
    """What holds int32 lengths, where ids and lengths lie, counted from `base`, the bags of a feature, and what `parts_of` says.

    ids: int64; lengths: int64 or int32 [features * bags]. None: they are of other types, not contiguous in host memory, or do not
    fit together; or there is no table or no extension, as for `tensor_places`. Where there is nothing the place is 0.
    """
    if _native is None or exchange is None:
        return None
    return _native.tensor_parts(exchange, ids, lengths, features, base)
