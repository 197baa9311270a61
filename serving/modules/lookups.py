"""Lookups of tensors on the CPU, where they lie: the kernel gets their addresses, and nothing is copied.

The kernel takes places as offsets into one buffer (`quant.contract.Place`). Here that buffer is the whole address space, from
`BASE` on, so tensors that were made apart need not be brought together.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant import BadIds, LookupKind, Precision
from tableside.quant.contract import Lengths, Place
from tableside.quant.errors import Problem
from tableside.serving.modules.errors import BadFeatureIds, ModuleError
from tableside.serving.modules.inputs import Form, Given
from tableside.serving.modules.published import Attached

BASE = 4096  # nothing lies below: an offset of 0 would begin at a null pointer
MEMORY = (ctypes.c_char * (1 << 62)).from_address(BASE)
_ADDRESSES: Any = MEMORY  # numpy's stubs know no ctypes
_FIELDS = len(Place._fields)
_IDS, _FIXED, _LENGTHS, _OFFSETS = Form.IDS, Form.FIXED, Form.LENGTHS, Form.OFFSETS
_MOST_IDS = 2**31 - 1  # of one feature: lengths are int32

OUTPUTS = {torch.float32: Precision.FP32, torch.float16: Precision.FP16, torch.bfloat16: Precision.FP32}


class HostLookup:
    """Lookups of some features of a version. output: of the vectors; bfloat16 is rounded from fp32."""

    def __init__(self, attached: Attached, names: Sequence[str], output: torch.dtype) -> None:
        bound = [attached.served.features[name] for name in names]
        kinds = [LookupKind(b.table, b.pooling, OUTPUTS[output]) for b in bound]
        self._planner = attached.served.backend.planner(kinds, attached.threads)
        self._names, self._output, self._missing = tuple(names), output, attached.missing
        self._written = torch.float16 if output is torch.float16 else torch.float32
        self._new = torch.empty(
            0, dtype=self._written, device="cpu"
        ).new_empty  # sooner than torch.empty, whatever the defaults are
        self._dims = [b.table.dim for b in bound]
        self._pack = struct.Struct(f"={len(names) * _FIELDS}q").pack

    def __call__(self, given: Sequence[Given]) -> list[torch.Tensor]:
        """A tensor for each feature: [bags, dim], or [*shape of its ids, dim] where it is not pooled.

        ModuleError: a tensor is of another type, shape or device. BadFeatureIds: an id or a length is wrong.
        """
        places: list[int] = []
        outputs: list[torch.Tensor] = []
        held: list[object] = []  # what was converted, until it is read
        for name, dim, one in zip(self._names, self._dims, given, strict=True):
            self._add(name, dim, one, places, outputs, held)
        try:
            unfound = self._planner.plan(self._pack(*places)).run(MEMORY, MEMORY)
        except BadIds as error:
            raise BadFeatureIds(self._names[error.job], error) from None
        if unfound is not None:
            self._missing.add(self._names, unfound)
        if self._written is not self._output:
            return [out.to(self._output) for out in outputs]
        return outputs

    def _add(self, name: str, dim: int, one: Given, places: list[int], outputs: list[torch.Tensor], held: list[object]) -> None:
        form, values, bags, weights = one
        if values.dtype is not torch.int64 or not values.is_cpu or not values.is_contiguous():
            values = host_ids(name, values)
            held.append(values)
        count = values.numel()
        lengths_at, bag_length, bag_count, weights_at = -1, 0, 0, -1
        if form is _FIXED:
            bag_count, bag_length = values.shape
        elif bags is not None:
            bag_count = bags.numel()
            if form is _LENGTHS and bags.dtype is torch.int32 and bags.is_cpu and bags.is_contiguous():
                lengths_at = bags.data_ptr() - BASE
            elif form is _OFFSETS and bag_count == 1 and bags.is_cpu and bags.item() == 0:
                bag_length = count
            else:
                lengths = host_lengths(name, form, bags, count)
                held.append(lengths)
                lengths_at, bag_count = address_of(lengths) - BASE, lengths.size
        if weights is not None:
            weights = host_weights(name, weights, count)
            held.append(weights)
            weights_at = weights.data_ptr() - BASE
        out = self._new(*values.shape, dim) if form is _IDS else self._new(bag_count, dim)
        outputs.append(out)
        ids_at, out_at = values.data_ptr() - BASE if count else 0, out.data_ptr() - BASE if out.numel() else 0
        places += (ids_at, count, lengths_at, bag_length, bag_count, weights_at, out_at, -1)


def host_lookup(attached: Attached, key: str, names: tuple[str, ...], output: torch.dtype) -> HostLookup:
    """The lookup of these features, made once for each version, under its key."""
    if (found := attached.lookups.get(key)) is None:
        found = attached.lookups[key] = HostLookup(attached, names, output)
    assert isinstance(found, HostLookup)
    return found


def host_ids(name: str, values: torch.Tensor) -> torch.Tensor:
    """Ids as int64, contiguous. ModuleError: they are no integers of 32 or 64 bits, or not on the CPU."""
    _check_host(name, "ids", values)
    if values.dtype not in (torch.int64, torch.int32):
        raise ModuleError(f"feature {name!r}: ids are {values.dtype}; expected torch.int64 or torch.int32")
    return values.to(torch.int64).contiguous()


def host_weights(name: str, weights: torch.Tensor, count: int) -> torch.Tensor:
    """Weights as fp32, contiguous. ModuleError: there are not `count`, they are no floats, or want a gradient."""
    _check_host(name, "weights", weights)
    if weights.numel() != count or not weights.is_floating_point():
        raise ModuleError(
            f"feature {name!r}: weights are {weights.dtype} {list(weights.shape)}; expected {count} floats, one an id"
        )
    if weights.requires_grad and torch.is_grad_enabled():
        raise ModuleError(
            f"feature {name!r}: weights require a gradient, and published tables have none; "
            "detach them, or call under torch.no_grad"
        )
    return weights.detach().to(torch.float32).contiguous()


def host_lengths(name: str, form: Form, bags: torch.Tensor, count: int) -> Lengths:
    """Lengths int32 [bags] of `count` ids, from lengths or offsets of any integer type.

    ModuleError: they are no integers, or offsets do not begin at 0. BadFeatureIds: a length is negative, or they do not add up.
    """
    _check_host(name, "lengths and offsets", bags)
    if (unsigned := _UNSIGNED.get(bags.dtype)) is None or bags.dim() != 1:
        raise ModuleError(
            f"feature {name!r}: lengths or offsets are {bags.dtype} {list(bags.shape)}; expected int64 or int32 [bags]"
        )
    if not bags.is_contiguous():
        bags = bags.contiguous()
    if not (size := bags.numel()):
        if form is Form.ENDS:
            raise ModuleError(f"feature {name!r}: there are no offsets; with include_last_offset expected [bags + 1]")
        return np.empty(0, np.int32)
    found: NDArray[Any] = np.frombuffer(_ADDRESSES, unsigned, size, bags.data_ptr() - BASE)
    if count > _MOST_IDS or np.maximum.reduce(found) > count or (form is not Form.LENGTHS and found[0]):
        raise _wrong_bags(name, form, bags.tolist(), count)
    if form is Form.LENGTHS:
        return found.astype(np.int32)
    lengths = np.empty(size - (form is Form.ENDS), np.int32)
    lengths[: size - 1] = found[1:] - found[:-1]  # below 2**31, as both are; the kernel sees one that is negative
    if form is Form.OFFSETS:
        lengths[-1] = count - int(found[-1])
    return lengths


# A negative number becomes one above any count of ids.
_UNSIGNED: dict[torch.dtype, type[np.unsignedinteger[Any]]] = {torch.int32: np.uint32, torch.int64: np.uint64}


def address_of(array: NDArray[np.int32]) -> int:
    """Where the first value of an array lies that can be written; any address where it has none."""
    buffer: Any = array  # which ctypes' stubs do not know as one
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if array.size else BASE


def _wrong_bags(name: str, form: Form, bags: list[int], count: int) -> BadFeatureIds | ModuleError:
    """What is wrong with lengths or offsets of which one is negative or above the number of ids."""
    if count > _MOST_IDS:
        return ModuleError(f"feature {name!r} has {count:,} ids; a call takes {_MOST_IDS:,} of a feature; make smaller batches")
    if form is Form.LENGTHS:
        if negative := [at for at, length in enumerate(bags) if length < 0]:
            return BadFeatureIds(name, BadIds(Problem.LENGTH, 0, negative[0], bags[negative[0]], 0))
        return BadFeatureIds(name, BadIds(Problem.SUM, 0, len(bags), sum(bags), count))
    if bags[0]:
        return ModuleError(f"feature {name!r}: the first offset is {bags[0]}; expected 0, where the first bag begins")
    at = next(at for at, offset in enumerate(bags) if not 0 <= offset <= count)
    return ModuleError(f"feature {name!r}: the offset {bags[at]} at position {at} is outside the ids [0, {count}]")


def _check_host(name: str, what: str, tensor: torch.Tensor) -> None:
    if not tensor.is_cpu:
        raise ModuleError(
            f"feature {name!r}: {what} are on {tensor.device}, the module's tables on the CPU; send them there, or make a module "
            f"with device='{tensor.device}'"
        )
