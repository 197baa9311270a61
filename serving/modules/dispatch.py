"""A call of a module on the device that its tables are on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tableside.serving.modules.errors import BadFeatureIds
from tableside.serving.modules.inputs import FeatureTensors, PackedInput
from tableside.serving.modules.keyed import host_jagged, host_keyed
from tableside.serving.modules.lookups import host_lookup
from tableside.serving.modules.padding import Padding, apart, in_the_whole, without_padding
from tableside.serving.modules.published import AttachedVersion
from tableside.serving.modules.tracers import is_traced

if TYPE_CHECKING:
    from tableside.serving.modules.device import DeviceLookup


def look_up(
    attached: AttachedVersion,
    key: str,
    names: tuple[str, ...],
    output: torch.dtype,
    given: Sequence[FeatureTensors],
    padding: Padding = (),
) -> list[torch.Tensor]:
    """A tensor for each feature. key: of the lookup among those of the version. ModuleError,
    BadFeatureIds: as `HostLookup`."""
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
        return torch.cat(
            found, 1, out=found[0].new_empty(0)
        )  # autocast, which refuses fp16 on the CPU, leaves `out` alone
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
