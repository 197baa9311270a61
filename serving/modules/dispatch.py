"""Calls of a module on the device of its tables, and `padding_idx`.

Padding ids are removed from the input before the lookup, as torch.nn.EmbeddingBag excludes them from sums and
the counts of means. On a GPU this waits for the device, and cannot be captured.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tableside.quant import BadIds
from tableside.quant.errors import Problem
from tableside.serving.modules.inputs import (
    BadFeatureIds,
    FeatureTensors,
    Form,
    PackedInput,
    check_memory,
    is_traced,
    offsets_of,
)
from tableside.serving.modules.lookups import host_jagged, host_keyed, host_lookup
from tableside.serving.modules.published import AttachedVersion

if TYPE_CHECKING:
    from tableside.serving.modules.device import DeviceLookup


Padding = tuple[int | None, ...]  # of each feature of a call; empty: no feature has one


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


def look_up(
    attached: AttachedVersion,
    key: str,
    names: tuple[str, ...],
    output: torch.dtype,
    given: Sequence[FeatureTensors],
    padding: Padding = (),
) -> list[torch.Tensor]:
    """Returns a tensor per feature. key: of the lookup in the version. ModuleError, BadFeatureIds: as
    `HostLookup`."""
    if padding:
        found = [
            without_padding(name, one, of_it) for name, one, of_it in zip(names, given, padding, strict=True)
        ]
        try:
            return look_up(attached, key, names, output, [one for one, _ in found])
        except BadFeatureIds as error:
            if attached.on_gpu:  # it is of a call before
                raise
            raise in_the_whole(error, found[names.index(error.feature)][1]) from None
    if attached.on_gpu:
        return _device_lookup(attached, key, names, output)(given)
    return host_lookup(attached, key, names, output)(given)


def prefetch(
    attached: AttachedVersion,
    key: str,
    names: tuple[str, ...],
    output: torch.dtype,
    given: Sequence[FeatureTensors],
) -> None:
    """Brings the rows of a call with these tensors to the GPU's cache. Nothing to do on the CPU."""
    if attached.on_gpu and not is_traced():
        _device_lookup(attached, key, names, output).prefetch(given)


def look_up_packed(
    attached: AttachedVersion,
    key: str,
    names: tuple[str, ...],
    output: torch.dtype,
    packed: PackedInput,
    padding: Padding = (),
) -> torch.Tensor:
    """[bags, sum of dims]. Raises as `look_up`."""
    if padding and (given := apart(packed)) is not None:
        found = look_up(attached, key, names, output, given, padding)
        # autocast, which refuses fp16 on the CPU, leaves `out` alone
        return torch.cat(found, 1, out=found[0].new_empty(0))
    if attached.on_gpu:
        return _device_lookup(attached, key, names, output).packed(packed)
    return host_keyed(attached, key, names, output)(
        host_jagged(", ".join(names), packed), packed.order or None
    )


def prefetch_packed(
    attached: AttachedVersion, key: str, names: tuple[str, ...], output: torch.dtype, packed: PackedInput
) -> None:
    """As `prefetch`, for a call of `look_up_packed`."""
    if attached.on_gpu:
        _device_lookup(attached, key, names, output).prefetch_packed(packed)


def _device_lookup(
    attached: AttachedVersion, key: str, names: tuple[str, ...], output: torch.dtype
) -> "DeviceLookup":
    """The lookup of these features on the version's GPU, made once for each version, under its key."""
    if (found := attached.lookups.get(key)) is None:
        from tableside.serving.modules.device import DeviceLookup  # Triton is imported where a GPU is used

        found = attached.lookups[key] = DeviceLookup(attached, names, output)
    lookup: DeviceLookup = found
    return lookup
