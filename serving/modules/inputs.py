"""What a module is called with, feature by feature: ids, which of them make a bag, and weights.

    tensor [bags, n]            bags of n ids each                     (pooled)
    tensor of any shape         one vector an id                       (not pooled)
    (values, offsets)           as torch.nn.EmbeddingBag takes them    (pooled); a third element: weights
    Bags(values, lengths=…)     by lengths; Bags has offsets and weights too

ids: int64 or int32; lengths and offsets alike. weights: floats, one an id. Values stay where they are:
nothing is copied but what has another type or is not contiguous.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from tableside.serving.modules.errors import ModuleError, NotATensor
from tableside.serving.modules.tracers import check_constant


class Bags(NamedTuple):
    """Ids of one feature in bags. values: [ids]. offsets: where each bag begins, [bags], or [bags + 1] in
    modules with `include_last_offset`; lengths: ids of each bag, [bags]; one of the two. weights: [ids]."""

    values: torch.Tensor
    offsets: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    weights: torch.Tensor | None = None


class Form(IntEnum):
    """How ids make bags. The values are part of exported programs."""

    IDS = 0  # not pooled: one vector an id
    FIXED = 1  # [bags, n]
    LENGTHS = 2
    OFFSETS = 3
    ENDS = 4  # offsets with the end of the last bag


class FeatureTensors(NamedTuple):
    """One feature's input. bags: its lengths or offsets, where `form` has some."""

    form: Form
    values: torch.Tensor
    bags: torch.Tensor | None
    weights: torch.Tensor | None


class PackedInput(NamedTuple):
    """The input of all pooled features in one tensor, as a KeyedJaggedTensor has it.

    order: where each of the module's features is among the `features` of values and bags; empty: in the same
    places. values: [ids], those of the first feature first. bags: by `form` lengths [features * bags], or
    offsets [features * bags + 1]. weights: [ids].
    """

    order: list[int]
    features: int
    values: torch.Tensor
    form: Form
    bags: torch.Tensor
    weights: torch.Tensor | None


_IDS, _FIXED, _LENGTHS, _OFFSETS, _ENDS = Form  # a name is found sooner than an attribute of an enum
_INTEGERS = (torch.int64, torch.int32)
_SEQUENCES = (tuple, list)  # a union would be made anew by each call
FeatureInput = torch.Tensor | Bags | Sequence[torch.Tensor | None]


def given_bags(name: str, value: FeatureInput, include_last_offset: bool) -> FeatureTensors:
    """The input of a pooled feature. ModuleError: it says nothing about bags, or too much.
    NotATensor: the ids are none."""
    if isinstance(value, torch.Tensor):
        if value.dim() != 2:
            raise ModuleError(
                f"feature {name!r} is pooled and came as a tensor of {value.dim()} dimensions; expected "
                "[bags, ids of a bag], "
                "(values, offsets), or Bags(values, lengths=...)"
            )
        return FeatureTensors(_FIXED, value, None, None)
    values, offsets, lengths, weights = value if isinstance(value, Bags) else _as_torch_takes(name, value)
    if not isinstance(values, torch.Tensor):
        check_tensor(name, values)
    if offsets is None and lengths is None:
        if values.dim() != 2:
            raise ModuleError(
                f"feature {name!r} has neither offsets nor lengths; give one of them, or ids [bags, ids of a "
                "bag]"
            )
        return FeatureTensors(_FIXED, values, None, weights)
    if values.dim() != 1 or (offsets is not None and lengths is not None):
        raise ModuleError(
            f"feature {name!r} has values of {values.dim()} dimensions"
            f"{' with offsets and lengths' if offsets is not None and lengths is not None else ''}; expected "
            "values [ids] with "
            "offsets or lengths"
        )
    if lengths is not None:
        return FeatureTensors(_LENGTHS, values, lengths, weights)
    return FeatureTensors(_ENDS if include_last_offset else _OFFSETS, values, offsets, weights)


def given_ids(name: str, value: FeatureInput) -> FeatureTensors:
    """The input of a feature that is not pooled. NotATensor: it is none."""
    return FeatureTensors(_IDS, check_tensor(name, value), None, None)


def check_tensor(name: str, value: object) -> torch.Tensor:
    """The value. NotATensor: a feature's ids, bags or weights are a list, an array, a number."""
    if not isinstance(value, torch.Tensor):
        raise NotATensor(
            f"feature {name!r} came with {type(value).__name__}; expected a torch.Tensor (torch.tensor of a "
            "list, "
            "torch.from_numpy of an array)"
        )
    return value


def as_ids(name: str, values: torch.Tensor) -> torch.Tensor:
    """Ids as int64, contiguous. ModuleError: they are no integers of 32 or 64 bits."""
    if values.dtype not in _INTEGERS:
        raise ModuleError(f"feature {name!r}: ids are {values.dtype}; expected torch.int64 or torch.int32")
    return values.to(torch.int64).contiguous()


def as_weights(name: str, weights: torch.Tensor, count: int) -> torch.Tensor:
    """Weights as fp32, contiguous. ModuleError: there are not `count`, they are no floats, or want a
    gradient."""
    if weights.numel() != count or not weights.is_floating_point():
        raise ModuleError(
            f"feature {name!r}: weights are {weights.dtype} {list(weights.shape)}; expected {count} floats, "
            "one an id"
        )
    check_constant(name, weights)
    return weights.detach().to(torch.float32).contiguous()


def as_bags(name: str, bags: torch.Tensor) -> torch.Tensor:
    """Lengths or offsets, contiguous. ModuleError: they are no integers of 32 or 64 bits, or have several
    dimensions."""
    if bags.dtype not in _INTEGERS or bags.dim() != 1:
        raise ModuleError(
            f"feature {name!r}: lengths or offsets are {bags.dtype} {list(bags.shape)}; expected int64 or "
            "int32 [bags]"
        )
    return bags.contiguous()


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Where bags of these lengths begin, and where the last one ends: int64 [bags + 1], on the device of
    the lengths."""
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def _as_torch_takes(
    name: str, value: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The fields of `Bags`, of (values, offsets, weights)."""
    if not isinstance(value, _SEQUENCES) or not 1 <= len(value) <= 3:
        raise NotATensor(
            f"feature {name!r} came as {type(value).__name__}; expected a torch.Tensor, or (values, offsets) "
            "or (…, …, weights) "
            "of tensors"
        )
    return value[0], value[1] if len(value) > 1 else None, None, value[2] if len(value) > 2 else None
