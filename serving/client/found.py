"""Found masks: which ids of a request the tables have, cut up by feature and shaped as the ids were."""

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

from tableside.serving.client.errors import ClientError
from tableside.serving.client.features import Array, Columns
from tableside.serving.client.messages import FOUND

V = TypeVar("V")


class LookedUp(NamedTuple, Generic[V]):
    """The answer to a lookup with `found=True`.

    vectors: what the lookup gives without it. found: feature -> which of its ids the table has, bool: [bags,
    ids a bag] where the ids came so, else [ids], bag after bag. An id that it lacks got the table's default
    row.
    """

    vectors: V
    found: dict[str, Any]


def take_masks(arrays: dict[str, Any], given: Columns) -> dict[str, Any]:
    """Takes the masks out of the outputs of a request of the named form; by feature. ClientError: one has
    another size."""
    shapes = dict(zip(given.names, (v.shape for v in given.values), strict=True))
    masks = {name: name.removesuffix(FOUND) for name in arrays if name.endswith(FOUND)}
    return {feature: _shaped(name, arrays.pop(name), [shapes[feature]])[0] for name, feature in masks.items()}


def cut(
    mask: Array,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    wanted: Collection[str],
    as_torch: bool,
) -> dict[str, Any]:
    """The mask of all ids of a compact request, [ids], cut up by feature: those that are wanted. shapes: of
    each feature's ids.

    ClientError: it has another size.
    """
    parts = {n: p for n, p in zip(names, _shaped(f"kjt{FOUND}", mask, shapes), strict=True) if n in wanted}
    if not as_torch:
        return parts
    import torch

    return {name: torch.from_numpy(part) for name, part in parts.items()}


def _shaped(name: str, mask: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Parts of a mask, numpy's or torch's, one after another, in these shapes."""
    ends = [0, *accumulate(map(prod, shapes))]
    if tuple(mask.shape) != (ends[-1],):
        raise ClientError(
            200, f"output {name} has shape {list(mask.shape)}; expected [{ends[-1]}], one an id"
        )
    return [mask[a:b].reshape(shape) for (a, b), shape in zip(pairwise(ends), shapes, strict=True)]
