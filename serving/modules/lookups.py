"""Lookups of tensors on the CPU, where they lie: the kernel gets their addresses, and nothing is copied.

The kernel takes places as offsets into one buffer (`quant.contract.Place`). Here that buffer is the whole
address space, from `BASE` on, so tensors that were made apart need not be brought together.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch

from tableside.quant import BadIds, LookupKind, Precision
from tableside.quant.contract import Place
from tableside.quant.cpu.bags import MOST_IDS, lengths_of, tensor_places
from tableside.quant.errors import Problem
from tableside.serving.modules.errors import BadFeatureIds, ModuleError
from tableside.serving.modules.inputs import FeatureTensors, Form, as_bags, as_ids, as_weights, check_tensor
from tableside.serving.modules.published import AttachedVersion
from tableside.serving.modules.tracers import check_memory

BASE = 4096  # nothing lies below: an offset of 0 would begin at a null pointer
MEMORY = (ctypes.c_char * (1 << 62)).from_address(BASE)
_FIELDS = len(Place._fields)
EXCHANGE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch 2.11 and later

OUTPUTS = {torch.float32: Precision.FP32, torch.float16: Precision.FP16, torch.bfloat16: Precision.FP32}


class HostLookup:
    """Lookups of some features of a version. output: of the vectors; bfloat16 is rounded from fp32."""

    def __init__(self, attached: AttachedVersion, names: Sequence[str], output: torch.dtype) -> None:
        bound = [attached.served.features[name] for name in names]
        kinds = [LookupKind(b.table, b.pooling, OUTPUTS[output]) for b in bound]
        self._planner = attached.served.backend.planner(kinds, attached.threads)
        self._names, self._output, self._missing = tuple(names), output, attached.missing
        self._written = torch.float16 if output is torch.float16 else torch.float32
        # Sooner than torch.empty, whatever the defaults are.
        self._new = torch.empty(0, dtype=self._written, device="cpu").new_empty
        self._dims = tuple(b.table.dim for b in bound)
        self._pack = struct.Struct(f"={len(names) * _FIELDS}q").pack

    def __call__(self, given: Sequence[FeatureTensors]) -> list[torch.Tensor]:
        """A tensor for each feature: [bags, dim], or [*shape of its ids, dim] where it is not pooled.

        ModuleError: a tensor is of another type, shape or device. BadFeatureIds: an id or a length is wrong.
        """
        places, outputs, held = tensor_places(EXCHANGE, given, self._dims, self._new, BASE) or self._convert(
            given
        )
        try:
            unfound = self._planner.run(places, MEMORY, MEMORY)
        except BadIds as error:
            raise BadFeatureIds(self._names[error.job], error) from None
        del held  # what was converted has been read
        if unfound is not None:
            self._missing.add(self._names, unfound)
        if self._written is not self._output:
            return [out.to(self._output) for out in outputs]
        return outputs

    def _convert(self, given: Sequence[FeatureTensors]) -> tuple[bytes, list[torch.Tensor], list[object]]:
        """As `tensor_places`, of tensors of any types and strides. ModuleError, BadFeatureIds: one cannot
        be looked up."""
        places: list[int] = []
        outputs: list[torch.Tensor] = []
        held: list[object] = []
        for name, dim, one in zip(self._names, self._dims, given, strict=True):
            form, values, bags, weights = one
            if values.dtype is not torch.int64 or not values.is_cpu or not values.is_contiguous():
                values = host_ids(name, values)
                held.append(values)
            else:
                check_memory(name, values)
            count = values.numel()
            lengths_at, bag_length, bag_count, weights_at = -1, 0, count, -1
            if form is Form.FIXED:
                bag_count, bag_length = values.shape
            elif bags is not None:
                lengths, address, bag_count = host_lengths(name, form, bags, count)
                held.append(lengths)
                lengths_at = address - BASE
            if weights is not None:
                weights = host_weights(name, weights, count)
                held.append(weights)
                weights_at = weights.data_ptr() - BASE
            out = self._new(*values.shape, dim) if form is Form.IDS else self._new(bag_count, dim)
            outputs.append(out)
            ids_at, out_at = (
                values.data_ptr() - BASE if count else 0,
                out.data_ptr() - BASE if bag_count else 0,
            )
            places += (ids_at, count, lengths_at, bag_length, bag_count, weights_at, out_at, -1)
        return self._pack(*places), outputs, held


def host_lookup(
    attached: AttachedVersion, key: str, names: tuple[str, ...], output: torch.dtype
) -> HostLookup:
    """The lookup of these features, made once for each version, under its key."""
    if (found := attached.lookups.get(key)) is None:
        found = attached.lookups[key] = HostLookup(attached, names, output)
    assert isinstance(found, HostLookup)
    return found


def host_ids(name: str, values: torch.Tensor) -> torch.Tensor:
    """Ids as int64, contiguous. ModuleError: they are no integers of 32 or 64 bits, or not on the CPU."""
    _check_host(name, "ids", values)
    return as_ids(name, values)


def host_weights(name: str, weights: torch.Tensor, count: int) -> torch.Tensor:
    """Weights as fp32, contiguous. ModuleError: there are not `count`, they are no floats, or want a
    gradient."""
    _check_host(name, "weights", weights)
    return as_weights(name, weights, count)


def host_lengths(name: str, form: Form, bags: torch.Tensor, count: int) -> tuple[object, int, int]:
    """Lengths int32 of `count` ids, from lengths or offsets of any integer type: what holds them, their
    address, how many bags.

    ModuleError: they are no integers, or offsets do not begin at 0. BadFeatureIds: a length is negative, or
    above `count`.
    """
    _check_host(name, "lengths and offsets", bags)
    bags = as_bags(name, bags)
    items = bags.numel()
    if not items and form is Form.ENDS:
        raise ModuleError(
            f"feature {name!r}: there are no offsets; with include_last_offset expected [bags + 1]"
        )
    at, item_bytes = bags.data_ptr() - BASE if items else 0, 8 if bags.dtype is torch.int64 else 4
    found = lengths_of(MEMORY, at, item_bytes, items, count, form)
    if found is None:
        raise wrong_bags(name, form, bags.tolist(), count)
    return *found, items - (form is Form.ENDS)


def wrong_bags(name: str, form: Form, bags: list[int], count: int) -> BadFeatureIds | ModuleError:
    """What is wrong with lengths or offsets of which one is negative or above the number of ids."""
    if count > MOST_IDS:
        return ModuleError(
            f"feature {name!r} has {count:,} ids; a call takes {MOST_IDS:,} of a feature; make smaller "
            "batches"
        )
    if form is Form.LENGTHS:
        if negative := [at for at, length in enumerate(bags) if length < 0]:
            return BadFeatureIds(name, BadIds(Problem.LENGTH, 0, negative[0], bags[negative[0]], 0))
        return BadFeatureIds(name, BadIds(Problem.SUM, 0, len(bags), sum(bags), count))
    if bags[0]:
        return ModuleError(
            f"feature {name!r}: the first offset is {bags[0]}; expected 0, where the first bag begins"
        )
    at = next(at for at, offset in enumerate(bags) if not 0 <= offset <= count)
    return ModuleError(
        f"feature {name!r}: the offset {bags[at]} at position {at} is outside the ids [0, {count}]"
    )


def _check_host(name: str, what: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        check_tensor(name, tensor)
    if not tensor.is_cpu:
        raise ModuleError(
            f"feature {name!r}: {what} are on {tensor.device}, the module's tables on the CPU; send them "
            "there, or make a module "
            f"with device='{tensor.device}'"
        )
    check_memory(name, tensor)
