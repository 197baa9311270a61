"""Calls of a module on the device of its tables, `padding_idx`, and operators.

Padding ids are removed from the input before the lookup, as torch.nn.EmbeddingBag excludes them from sums and
the counts of means. On a GPU this waits for the device, and cannot be captured.

In compiled and exported programs calls become custom operators:

    tableside::look_up(str call, str forms, Tensor[] inputs) -> Tensor[]
    tableside::look_up_keyed(str call, str how, Tensor[] inputs) -> Tensor

call: a `Call` as JSON. forms: two characters per feature: its `Form`'s digit, then `w` for weights or `-`.
inputs: per feature its ids, lengths or offsets, and weights. how: numbers separated by blanks: the `Form` of
the bags, the number of features, and ours among those, if the order differs; its inputs are ids, bags,
weights. Each argument costs a call half a microsecond. A loaded program attaches the model by name, after an
import of `tableside.torch`. There is no gradient.
"""

import json
import weakref
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
    check_constant,
    check_memory,
    offsets_of,
)
from tableside.serving.modules.lookups import HostLookup
from tableside.serving.modules.published import AttachedVersion, PublishedTables, published_by_string

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


_FORMS_WITH_BAGS = (Form.LENGTHS, Form.OFFSETS, Form.ENDS)
# by calls that were held against it
_attached: "weakref.WeakValueDictionary[str, PublishedTables]" = weakref.WeakValueDictionary()


def traced(call: str, names: Sequence[str], given: Sequence[FeatureTensors]) -> list[torch.Tensor]:
    """The operator over a module's inputs, for who traces a call."""
    for name, one in zip(names, given, strict=True):
        check_constant(name, one.weights)
    forms = "".join([f"{int(g.form)}{'-' if g.weights is None else 'w'}" for g in given])
    found: list[torch.Tensor] = _LOOK_UP(call, forms, [t for g in given for t in g[1:] if t is not None])
    return found


@cache
def _forms_of(text: str) -> tuple[tuple[Form, bool, bool], ...]:
    """The form of each feature, whether it has lengths or offsets, and whether it has weights."""
    forms = [Form(int(digit)) for digit in text[::2]]
    return tuple(
        (form, form in _FORMS_WITH_BAGS, w == "w") for form, w in zip(forms, text[1::2], strict=True)
    )


def _given(forms: str, inputs: Sequence[torch.Tensor]) -> list[FeatureTensors]:
    tensors = iter(inputs)
    return [
        FeatureTensors(
            form, next(tensors), next(tensors) if has_bags else None, next(tensors) if has_weights else None
        )
        for form, has_bags, has_weights in _forms_of(forms)
    ]


def _look_up(call: str, forms: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return look_up(attachment(call), call, _given(forms, inputs))


def _look_up_fake(call: str, forms: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    c = call_of(call)
    given = zip(c.dims, _given(forms, inputs), strict=True)
    return [one.values.new_empty(one.shape(dim), dtype=c.dtype) for dim, one in given]


def traced_packed(call: str, names: Sequence[str], packed: PackedInput) -> torch.Tensor:
    """The operator over the ids of all features in one tensor."""
    order, features, values, form, bags, weights = packed
    check_constant(", ".join(names), weights)
    how = " ".join([str(number) for number in (int(form), features, *order)])
    found: torch.Tensor = _LOOK_UP_KEYED(
        call, how, [values, bags] if weights is None else [values, bags, weights]
    )
    return found


@cache
def _how_of(text: str) -> tuple[Form, int, list[int]]:
    """The form of the bags, the number of features, and their order."""
    form, features, *order = map(int, text.split(" "))
    return Form(form), features, order


def _look_up_keyed(call: str, how: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    form, features, order = _how_of(how)
    values, bags, *weights = inputs
    packed = PackedInput(order, features, values, form, bags, weights[0] if weights else None)
    return look_up_packed(attachment(call), call, packed)


def _look_up_keyed_fake(call: str, how: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    c, (form, features, _) = call_of(call), _how_of(how)
    offsets = inputs[1].shape[0] - (form is Form.ENDS)
    return inputs[0].new_empty((offsets // features, sum(c.dims)), dtype=c.dtype)


def attachment(call: str) -> AttachedVersion:
    """The version of this call. ModuleError: it has other features or dims than the program was made for."""
    if (one := _attached.get(call)) is None:
        one = published_by_string(call_of(call).source)
        _check(call_of(call), one)
        _attached[call] = one
    return one.now()


def _check(c: Call, one: PublishedTables) -> None:
    """Holds the features of a call against the model, once for each attachment."""
    served = one.now().served
    for name, dim in zip(c.names, c.dims, strict=True):
        bound = served.features.get(name)
        if bound is None or bound.table.dim != dim:
            found = "no such feature" if bound is None else f"dim {bound.table.dim}"
            raise ModuleError(
                f"the program was made for feature {name!r} of dim {dim}; model {one.source.model!r} version "
                f"{served.version} "
                f"has {found}; export the program again, or publish the model that it was made for"
            )
    one.require({name: served.features[name] for name in c.names})


_NAME = "tableside::look_up"
torch.library.define(_NAME, "(str call, str forms, Tensor[] inputs) -> Tensor[]")
torch.library.impl(_NAME, ("cpu", "cuda"))(_look_up)
torch.library.register_fake(_NAME)(_look_up_fake)
_KEYED = "tableside::look_up_keyed"
torch.library.define(_KEYED, "(str call, str how, Tensor[] inputs) -> Tensor")
torch.library.impl(_KEYED, ("cpu", "cuda"))(_look_up_keyed)
torch.library.register_fake(_KEYED)(_look_up_keyed_fake)
# A compiled call guards less than by way of torch.ops.
_LOOK_UP, _LOOK_UP_KEYED = torch.ops.tableside.look_up.default, torch.ops.tableside.look_up_keyed.default
