"""The custom operators that modules become in compiled and exported programs.

    tableside::look_up(str call, str forms, Tensor[] inputs) -> Tensor[]
    tableside::look_up_keyed(str call, str how, Tensor[] inputs) -> Tensor

call: a `Call` as JSON. forms: two characters per feature: its `Form`'s digit, then `w` for weights or `-`.
inputs: per feature its ids, lengths or offsets, and weights. how: numbers separated by blanks: the `Form` of
the bags, the number of features, and ours among those, if the order differs; its inputs are ids, bags,
weights. Each argument costs a call half a microsecond. A loaded program attaches the model by name, after an
import of `tableside.torch`. There is no gradient.
"""

import weakref
from collections.abc import Sequence
from functools import cache

import torch

from tableside.serving.modules.dispatch import Call, call_of, look_up, look_up_packed
from tableside.serving.modules.inputs import FeatureTensors, Form, ModuleError, PackedInput, check_constant
from tableside.serving.modules.published import AttachedVersion, PublishedTables, published_by_string

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
