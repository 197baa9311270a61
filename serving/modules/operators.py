"""The custom operators that modules become in compiled and exported programs.

    tableside::look_up(str call, int[] forms, Tensor[] values, Tensor[] bags, int[] weighted, Tensor[] weights) -> Tensor[]
    tableside::look_up_keyed(str call, int[] order, int features, Tensor values, int form, Tensor bags, Tensor[] weights)
        -> Tensor

call: a `Call` as JSON; it names the source, the features and their dims, and holds no rows. forms: one `Form` for each feature.
bags: of those features whose form has some. weighted: 1 for each feature that has weights. order: where each feature is among
those of the KeyedJaggedTensor. A program that is loaded in another process attaches the model there, by its name. It must have
imported `tableside.torch` first, which registers the operators. There is no gradient.
"""

import json
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from tableside.serving.modules.dispatch import look_up, look_up_keyed
from tableside.serving.modules.errors import ModuleError
from tableside.serving.modules.inputs import Form, Given
from tableside.serving.modules.published import Attached, Published, published_by_string

_FORMS = tuple(Form)
_FORMS_WITH_BAGS = (Form.LENGTHS, Form.OFFSETS, Form.ENDS)
_attached: "weakref.WeakValueDictionary[str, Published]" = weakref.WeakValueDictionary()  # by calls that were held against it


class Call(NamedTuple):
    """What stays the same of a module's calls. dims: of the vectors of each feature; output: name of a torch dtype."""

    source: str
    names: tuple[str, ...]
    dims: tuple[int, ...]
    output: str

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
        return Call(raw["source"], tuple(raw["names"]), tuple(raw["dims"]), raw["output"])
    except (ValueError, TypeError, KeyError) as error:
        raise ModuleError(f"an operator's call is unreadable ({error!r}); export the program again with this release") from error


def traced(call: str, given: Sequence[Given]) -> list[torch.Tensor]:
    """The operator over a module's inputs, for torch.compile and torch.export."""
    found: list[torch.Tensor] = torch.ops.tableside.look_up(
        call,
        [int(g.form) for g in given],
        [g.values for g in given],
        [g.bags for g in given if g.bags is not None],
        [int(g.weights is not None) for g in given],
        [g.weights for g in given if g.weights is not None],
    )
    return found


def _given(
    forms: Sequence[int],
    values: Sequence[torch.Tensor],
    bags: Sequence[torch.Tensor] | None,
    weighted: Sequence[int],
    weights: Sequence[torch.Tensor] | None,
) -> list[Given]:
    of_bags, of_weights = iter(bags or ()), iter(weights or ())  # AOTInductor gives None for an empty list
    return [
        Given(_FORMS[form], of_it, next(of_bags) if form in _FORMS_WITH_BAGS else None, next(of_weights) if has_weights else None)
        for form, of_it, has_weights in zip(forms, values, weighted, strict=True)
    ]


def _look_up(
    call: str,
    forms: Sequence[int],
    values: Sequence[torch.Tensor],
    bags: Sequence[torch.Tensor] | None,
    weighted: Sequence[int],
    weights: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    c = call_of(call)
    return look_up(attachment(call), call, c.names, c.dtype, _given(forms, values, bags, weighted, weights))


def _look_up_fake(
    call: str,
    forms: Sequence[int],
    values: Sequence[torch.Tensor],
    bags: Sequence[torch.Tensor] | None,
    weighted: Sequence[int],
    weights: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    c = call_of(call)
    outputs = []
    for dim, one in zip(c.dims, _given(forms, values, bags, weighted, weights), strict=True):
        if one.form is Form.IDS:
            shape: tuple[Any, ...] = (*one.values.shape, dim)
        elif one.bags is None:
            shape = (one.values.shape[0], dim)
        else:
            shape = (one.bags.shape[0] - (one.form is Form.ENDS), dim)
        outputs.append(one.values.new_empty(shape, dtype=c.dtype))
    return outputs


def _look_up_keyed(
    call: str,
    order: Sequence[int] | None,
    features: int,
    values: torch.Tensor,
    form: int,
    bags: torch.Tensor,
    weights: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    c = call_of(call)
    weights_of = weights[0] if weights else None
    of_bags = _FORMS[form], bags
    return look_up_keyed(attachment(call), call, c.names, c.dtype, list(order or ()), features, values, *of_bags, weights_of)


def _look_up_keyed_fake(
    call: str,
    order: Sequence[int] | None,
    features: int,
    values: torch.Tensor,
    form: int,
    bags: torch.Tensor,
    weights: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    c = call_of(call)
    return values.new_empty(((bags.shape[0] - (_FORMS[form] is Form.ENDS)) // features, sum(c.dims)), dtype=c.dtype)


def attachment(call: str) -> Attached:
    """The version of this call. ModuleError: it has other features or dims than the program was made for."""
    if (one := _attached.get(call)) is None:
        one = published_by_string(call_of(call).source)
        _check(call_of(call), one)
        _attached[call] = one
    return one.now()


def _check(c: Call, one: Published) -> None:
    """Holds the features of a call against the model, once for each attachment."""
    served = one.now().served
    for name, dim in zip(c.names, c.dims, strict=True):
        bound = served.features.get(name)
        if bound is None or bound.table.dim != dim:
            found = "no such feature" if bound is None else f"dim {bound.table.dim}"
            raise ModuleError(
                f"the program was made for feature {name!r} of dim {dim}; model {one.source.model!r} version {served.version} "
                f"has {found}; export the program again, or publish the model that it was made for"
            )
    one.require({name: served.features[name] for name in c.names})


_NAME = "tableside::look_up"
torch.library.define(
    _NAME, "(str call, int[] forms, Tensor[] values, Tensor[] bags, int[] weighted, Tensor[] weights) -> Tensor[]"
)
torch.library.impl(_NAME, ("cpu", "cuda"))(_look_up)
torch.library.register_fake(_NAME)(_look_up_fake)
_KEYED = "tableside::look_up_keyed"
torch.library.define(
    _KEYED, "(str call, int[] order, int features, Tensor values, int form, Tensor bags, Tensor[] weights) -> Tensor"
)
torch.library.impl(_KEYED, ("cpu", "cuda"))(_look_up_keyed)
torch.library.register_fake(_KEYED)(_look_up_keyed_fake)
