"""`padding_idx`: an id that is left out of sums and of the counts of means, as torch.nn.EmbeddingBag leaves
it out.

Such ids are taken out of the input before anything is looked up, so every backend computes what it computes
without them, bit for bit. On a GPU this waits for the device, and cannot be captured.
"""

import torch

from tableside.quant import BadIds
from tableside.quant.errors import Problem
from tableside.serving.modules.errors import BadFeatureIds
from tableside.serving.modules.inputs import FeatureTensors, Form, PackedInput, offsets_of
from tableside.serving.modules.tracers import check_memory

Padding = tuple[int | None, ...]  # of each feature of a call; empty: no feature has one


def without_padding(
    name: str, one: FeatureTensors, padding: int | None
) -> tuple[FeatureTensors, torch.Tensor | None]:
    """A feature's input without the ids that are `padding`, and a mask of those that stay; None: all do.

    What cannot be looked up comes back as it is, so that the lookup says why. NotInMemory: as of lookups.
    """
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
