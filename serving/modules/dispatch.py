"""A call of a module on the device that its tables are on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tableside.serving.modules.inputs import Form, Given, offsets_of
from tableside.serving.modules.keyed import host_jagged, host_keyed
from tableside.serving.modules.lookups import host_lookup
from tableside.serving.modules.published import Attached

if TYPE_CHECKING:
    from tableside.serving.modules.device import DeviceLookup


def look_up(
    attached: Attached, key: str, names: tuple[str, ...], output: torch.dtype, given: Sequence[Given]
) -> list[torch.Tensor]:
    """A tensor for each feature. key: of the lookup among those of the version. ModuleError, BadFeatureIds: as `HostLookup`."""
    if attached.on_gpu:
        return _device_lookup(attached, key, names, output)(given)
    return host_lookup(attached, key, names, output)(given)


def prefetch(attached: Attached, key: str, names: tuple[str, ...], output: torch.dtype, given: Sequence[Given]) -> None:
    """Brings the rows of a call with these tensors to the GPU's cache. Nothing to do on the CPU."""
    if attached.on_gpu:
        _device_lookup(attached, key, names, output).prefetch(given)


def look_up_keyed(
    attached: Attached,
    key: str,
    names: tuple[str, ...],
    output: torch.dtype,
    order: list[int],
    features: int,
    values: torch.Tensor,
    form: Form,
    bags: torch.Tensor,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """[bags, sum of dims]. order: where each feature is among the `features` of values and bags; empty: the same. bags: by `form`
    lengths [features * bags], or offsets with the end of the last bag."""
    if attached.on_gpu:
        offsets = offsets_of(bags) if form is Form.LENGTHS else bags
        return _device_lookup(attached, key, names, output).packed(order, features, values, offsets, weights)
    name = ", ".join(names)
    jagged = host_jagged(name, values, form, bags, weights, features)
    return host_keyed(attached, key, names, output)(jagged, order or None)


def prefetch_keyed(
    attached: Attached,
    key: str,
    names: tuple[str, ...],
    output: torch.dtype,
    order: list[int],
    features: int,
    values: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
) -> None:
    """As `prefetch`, for a call of `look_up_keyed` by offsets."""
    if attached.on_gpu:
        _device_lookup(attached, key, names, output).prefetch_packed(order, features, values, offsets, weights)


def _device_lookup(attached: Attached, key: str, names: tuple[str, ...], output: torch.dtype) -> "DeviceLookup":
    """The lookup of these features on the version's GPU, made once for each version, under its key."""
    if (found := attached.lookups.get(key)) is None:
        from tableside.serving.modules.device import DeviceLookup  # Triton is imported where a GPU is used

        found = attached.lookups[key] = DeviceLookup(attached, names, output)
    lookup: DeviceLookup = found
    return lookup
