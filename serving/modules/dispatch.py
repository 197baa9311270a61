"""Calls of a module on the device of its tables, and `padding_idx`.

Padding ids are removed from the input before the lookup, as torch.nn.EmbeddingBag excludes them from sums and
the counts of means. On a GPU this waits for the device, and cannot be captured.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from tableside.quant import BadIds
from tableside.quant.errors import Problem
from tableside.serving.modules.inputs import (
    BadFeatureIds,
    FeatureTensors,
    Form,
    ModuleError,
    PackedInput,
    check_memory,
    offsets_of,
)
from tableside.serving.modules.lookups import HostLookup
from tableside.serving.modules.published import AttachedVersion

if TYPE_CHECKING:
    from tableside.serving.modules.device import DeviceLookup


Padding = tuple[int | None, ...]  # of each feature of a call; empty: no feature has one


class Call(NamedTuple):
    """The constant part of a module's calls. dims: per feature; output: name of a torch dtype. padding: the
    `padding_idx` per feature."""

    source: str
    names: tuple[str, ...]
    dims: tuple[int, ...]
    output: str
    padding: Padding = ()

    def to_string(self) -> str:
        return json.dumps(self._asdict())

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.output)
        assert isinstance(dtype, torch.dtype)
        return dtype


@cache
def call_of(text: str) -> Call:
    """ModuleError: the text is none that `Call.to_string` gave."""
    try:
        raw = json.loads(text)
        names, dims, padding = tuple(raw["names"]), tuple(raw["dims"]), tuple(raw.get("padding", ()))
        return Call(raw["source"], names, dims, raw["output"], padding)
    except (ValueError, TypeError, KeyError) as error:
        raise ModuleError(
            f"an operator's call is unreadable ({error!r}); export the program again with this release"
        ) from error


def without_padding(
    name: str, one: FeatureTensors, padding: int | None
) -> tuple[FeatureTensors, torch.Tensor | None]:
    """Removes ids equal to `padding`; returns the input and a mask of kept ids, None: all. Invalid input
    comes back unchanged, for the lookup to refuse. NotInMemory: as of lookups."""
    form, values, bags, weights = one
    if padding is None or values.is_meta or (weights is not None and weights.numel() != values.numel()):
        return one, None
    check_memory(name, values)
    kept = values != padding
    if kept.all() or (bags is not None and not _are_bags(form, bags, values.numel())):
        return one, None
    flat = kept.flatten()
    if bags is None:
        form, bags = Form.LENGTHS, kept.sum(1)
    else:
        starts = offsets_of(flat)[offsets_of(bags) if form is Form.LENGTHS else bags.long()]
        bags = starts.diff() if form is Form.LENGTHS else starts
    return FeatureTensors(
        form, values[kept], bags, None if weights is None else weights.flatten()[flat]
    ), flat


def apart(packed: PackedInput) -> list[FeatureTensors] | None:
    """The input of each of the module's features. None: the bags are not those of the ids."""
    order, features, values, form, bags, weights = packed
    if not _are_bags(form, bags, values.numel()):
        return None
    ends = offsets_of(bags) if form is Form.LENGTHS else bags
    count, rest = divmod(ends.numel() - 1, features)
    if rest:
        return None
    found = []
    for at in order or range(features):
        of_it = ends[at * count : (at + 1) * count + 1]
        ids = slice(int(of_it[0]), int(of_it[-1]))
        found.append(
            FeatureTensors(
                Form.ENDS, values[ids], of_it - of_it[0], None if weights is None else weights[ids]
            )
        )
    return found


def in_the_whole(error: BadFeatureIds, kept: torch.Tensor | None) -> BadFeatureIds:
    """An error over the ids that stayed, with the position that its id has among all."""
    if kept is None or error.problem not in (Problem.ID, Problem.MISSING):
        return error
    position = int(kept.nonzero()[error.position])
    return BadFeatureIds(error.feature, BadIds(error.problem, 0, position, error.value, error.bound))


def _are_bags(form: Form, bags: torch.Tensor, ids: int) -> bool:
    """Whether these lengths or offsets are those of so many ids."""
    if (
        not isinstance(bags, torch.Tensor)
        or bags.dtype not in (torch.int64, torch.int32)
        or bags.dim() != 1
        or not bags.numel()
    ):
        return False
    starts = offsets_of(bags) if form is Form.LENGTHS else bags
    is_right = (
        (starts[0] == 0)
        & (starts.diff() >= 0).all()
        & (starts[-1] <= ids if form is Form.OFFSETS else starts[-1] == ids)
    )
    return bool(is_right)


def look_up(attached: AttachedVersion, call: str, given: Sequence[FeatureTensors]) -> list[torch.Tensor]:
    """Returns a tensor per feature. ModuleError, BadFeatureIds: as `HostLookup`."""
    c = call_of(call)
    if not c.padding:
        return lookup_of(attached, call)(given)
    found = [without_padding(*one) for one in zip(c.names, given, c.padding, strict=True)]
    try:
        return lookup_of(attached, call)([one for one, _ in found])
    except BadFeatureIds as error:
        if attached.on_gpu:  # it is of a call before
            raise
        raise in_the_whole(error, found[c.names.index(error.feature)][1]) from None


def look_up_packed(attached: AttachedVersion, call: str, packed: PackedInput) -> torch.Tensor:
    """[bags, sum of dims]. Raises as `look_up`."""
    if call_of(call).padding and (given := apart(packed)) is not None:
        found = look_up(attached, call, given)
        # autocast, which refuses fp16 on the CPU, leaves `out` alone
        return torch.cat(found, 1, out=found[0].new_empty(0))
    return lookup_of(attached, call).packed(packed)


def lookup_of(attached: AttachedVersion, call: str) -> "HostLookup | DeviceLookup":
    """The lookup of a call's features, made once for each version."""
    if (found := attached.lookups.get(call)) is None:
        c = call_of(call)
        if attached.on_gpu:
            # Triton is imported where a GPU is used
            from tableside.serving.modules.device import DeviceLookup

            found = DeviceLookup(attached, c.names, c.dtype)
        else:
            found = HostLookup(attached, c.names, c.dtype)
        attached.lookups[call] = found
    lookup: HostLookup | DeviceLookup = found
    return lookup
