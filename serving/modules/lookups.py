"""Lookups of tensors on the CPU, in place: the kernel gets their addresses. Also TorchRec's
KeyedJaggedTensor.

The kernel takes offsets into one buffer (`quant.contract.Place`); here the buffer is the address space, so
separate tensors need no copy.
"""

import struct
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from tableside.quant import BadIds, CpuBackend, LookupKind, Precision
from tableside.quant.contract import Place
from tableside.quant.cpu.address_space import BASE, MEMORY
from tableside.quant.cpu.bags import (
    MOST_IDS,
    feature_places,
    lengths_of,
    parts_of,
    tensor_parts,
    tensor_places,
)
from tableside.quant.errors import Problem
from tableside.serving.modules.inputs import (
    BadFeatureIds,
    Bags,
    FeatureTensors,
    Form,
    ModuleError,
    PackedInput,
    as_bags,
    as_ids,
    as_weights,
)
from tableside.serving.modules.published import AttachedVersion

_CPU = torch.device("cpu")
_FIELDS = len(Place._fields)
BY_INPUT = -1  # a form of inputs that say theirs themselves
EXCHANGE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch 2.11 and later

OUTPUTS = {torch.float32: Precision.FP32, torch.float16: Precision.FP16, torch.bfloat16: Precision.BF16}


class HostLookup:
    """Lookups of some features of a version. output: of the vectors."""

    def __init__(self, attached: AttachedVersion, names: Sequence[str], output: torch.dtype) -> None:
        bound = [attached.served.features[name] for name in names]
        backend = attached.served.backend
        assert isinstance(backend, CpuBackend), "the source is on the CPU"
        rounds = output is torch.bfloat16 and not backend.writes_bf16
        self._written = torch.float32 if rounds else output
        kinds = [LookupKind(b.table, b.pooling, OUTPUTS[self._written]) for b in bound]
        self._planner = backend.planner(kinds, attached.threads)
        self._names, self._output, self._missing = tuple(names), output, attached.missing
        # Sooner than torch.empty, whatever the defaults are.
        self._new = torch.empty(0, dtype=self._written, device="cpu").new_empty
        self._dims = tuple(b.table.dim for b in bound)
        self._pack = struct.Struct(f"={len(names) * _FIELDS}q").pack
        item = OUTPUTS[self._written].bytes
        self._width, self._row_bytes = sum(self._dims), sum(self._dims) * item
        self._columns = np.array(
            [at * item for at in accumulate(self._dims[:-1], initial=0)], np.int64
        ).tobytes()

    def __call__(self, given: Sequence[FeatureTensors]) -> list[torch.Tensor]:
        """Returns a tensor per feature: [bags, dim], or [*shape of its ids, dim] if not pooled. ModuleError:
        a tensor has another type, shape or device. BadFeatureIds: an id or a length is wrong."""
        found = self.plain(given, BY_INPUT)
        return self._vectors(*self._convert(given)) if found is None else found

    def plain(self, values: Sequence[Any], form: int) -> list[torch.Tensor] | None:
        """The same of what a caller's dict has, as `tensor_places` takes it. None: it must be converted."""
        placed = tensor_places(EXCHANGE, values, self._dims, self._new, BASE, form, Bags)
        return None if placed is None else self._vectors(*placed)

    def _vectors(self, places: bytes, outputs: list[torch.Tensor], held: object) -> list[torch.Tensor]:
        """held: what was converted, until it has been read."""
        self._run(places)
        return outputs if self._written is self._output else [out.to(self._output) for out in outputs]

    def packed(self, packed: PackedInput) -> torch.Tensor:
        """[bags, sum of dims]. Raises as a call."""
        jagged = host_jagged(", ".join(self._names), packed)
        _, _, ids_at, lengths_at, bags, parts, weights = jagged
        out = self._new(bags, self._width)
        weights_at = -1 if weights is None or not weights.numel() else weights.data_ptr() - BASE
        out_at = out.data_ptr() - BASE if bags else 0
        order = packed.order or None
        self._run(
            feature_places(
                parts, order, self._columns, ids_at, lengths_at, bags, weights_at, out_at, self._row_bytes
            )
        )
        return out if self._written is self._output else out.to(self._output)

    def _run(self, places: bytes) -> None:
        try:
            unfound = self._planner.run(places, MEMORY, MEMORY)
        except BadIds as error:
            raise BadFeatureIds(self._names[error.job], error) from None
        if unfound is not None:
            self._missing.add(self._names, unfound)

    def _convert(self, given: Sequence[FeatureTensors]) -> tuple[bytes, list[torch.Tensor], list[object]]:
        """As `tensor_places`, of any types and strides. ModuleError, BadFeatureIds: one cannot be looked
        up."""
        places: list[int] = []
        outputs: list[torch.Tensor] = []
        held: list[object] = []
        for name, dim, one in zip(self._names, self._dims, given, strict=True):
            form, values, bags, weights = one
            values = as_ids(_CPU, name, values)
            held.append(values)
            count = values.numel()
            lengths_at, bag_length, bag_count, weights_at = -1, 0, count, -1
            if form is Form.FIXED:
                bag_count, bag_length = values.shape
            elif bags is not None:
                lengths, address, bag_count = host_lengths(name, form, bags, count)
                held.append(lengths)
                lengths_at = address - BASE
            if weights is not None:
                weights = as_weights(_CPU, name, weights, count)
                held.append(weights)
                weights_at = weights.data_ptr() - BASE
            out = self._new(*values.shape, dim) if form is Form.IDS else self._new(bag_count, dim)
            outputs.append(out)
            ids_at, out_at = (
                values.data_ptr() - BASE if count else 0,
                out.data_ptr() - BASE if bag_count else 0,
            )
            places += Place(
                len(outputs) - 1, ids_at, count, lengths_at, bag_length, bag_count, weights_at, out_at
            )
        return self._pack(*places), outputs, held


def host_lengths(name: str, form: Form, bags: torch.Tensor, count: int) -> tuple[object, int, int]:
    """Converts lengths or offsets to int32 lengths of `count` ids; returns their holder, address and number.
    ModuleError: no integers, or offsets do not begin at 0. BadFeatureIds: a length is not in [0, count]."""
    bags = as_bags(_CPU, name, bags)
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
    """Makes the error for lengths or offsets that are negative or beyond the ids."""
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


class JaggedFeatures(NamedTuple):
    """A KeyedJaggedTensor's parts on the CPU. values: int64 [ids]. lengths: holds int32 [features, bags].
    ids_at, lengths_at: places in `MEMORY`. parts: int64 [2, features], first id and count. weights: fp32
    [ids]."""

    values: torch.Tensor
    lengths: object
    ids_at: int
    lengths_at: int
    bags: int
    parts: bytes
    weights: torch.Tensor | None


def is_keyed(value: Any) -> bool:
    """Whether this is a KeyedJaggedTensor, of whatever package."""
    return hasattr(value, "weights_or_none") and hasattr(value, "keys") and hasattr(value, "stride")


def places_of(names: Sequence[str], keys: Sequence[str]) -> list[int] | None:
    """Returns each feature's index among the keys; None: they are equal. ModuleError: one is missing."""
    if list(keys) == list(names):
        return None
    if missing := [name for name in names if name not in keys]:
        raise ModuleError(f"the KeyedJaggedTensor lacks {', '.join(missing)}; it has: {', '.join(keys)}")
    return [list(keys).index(name) for name in names]


def packed_of(
    keyed: Any, order: list[int] | None, *, by_offsets: bool, is_weighted: bool = True
) -> PackedInput:
    """Returns a KeyedJaggedTensor's parts. by_offsets: with its cached offsets instead of lengths.
    ModuleError: features have several numbers of bags."""
    if keyed.variable_stride_per_key() or keyed.inverse_indices_or_none() is not None:
        raise ModuleError(
            "the KeyedJaggedTensor has several numbers of bags (variable stride) or inverse indices; give a "
            "dict of features"
        )
    form, bags = (Form.ENDS, keyed.offsets()) if by_offsets else (Form.LENGTHS, keyed.lengths())
    weights = keyed.weights_or_none() if is_weighted else None
    return PackedInput(order or [], len(keyed.keys()), keyed.values(), form, bags, weights)


def host_jagged(name: str, packed: PackedInput) -> JaggedFeatures:
    """Returns a KeyedJaggedTensor's checked parts; name: for errors. ModuleError: they have other types, or
    do not fit together. BadFeatureIds: a length is wrong."""
    _, features, values, form, bags, weights = packed
    if weights is not None:
        weights = as_weights(_CPU, name, weights, values.numel())
    if form is Form.LENGTHS and (found := tensor_parts(EXCHANGE, values, bags, features, BASE)) is not None:
        return JaggedFeatures(values, *found, weights)
    values = as_ids(_CPU, name, values)
    count = values.numel()
    held, address, size = host_lengths(name, form, bags, count)
    if not features or size % features:
        raise ModuleError(
            f"there are {size} lengths for {features} features ({name}); expected as many for each feature"
        )
    of_feature, lengths_at = size // features, address - BASE if size else 0
    if (parts := parts_of(MEMORY, lengths_at, features, of_feature, count)) is None:
        raise _wrong_lengths(name, (bags if form is Form.LENGTHS else bags.diff()).tolist(), count)
    return JaggedFeatures(
        values, held, values.data_ptr() - BASE if count else 0, lengths_at, of_feature, parts, weights
    )


def _wrong_lengths(name: str, lengths: list[int], count: int) -> BadFeatureIds | ModuleError:
    """Makes the error for lengths that do not sum to `count`."""
    if count > MOST_IDS or not all(0 <= length <= count for length in lengths):
        return wrong_bags(name, Form.LENGTHS, lengths, count)
    return ModuleError(f"the lengths of {name} add up to {sum(lengths)}, but there are {count} ids")


def ids_of(jagged: JaggedFeatures, order: list[int] | None) -> list[FeatureTensors]:
    """Returns each feature's ids, for an unpooled lookup; ignores weights, as TorchRec's
    EmbeddingCollection."""
    starts, _ = np.frombuffer(jagged.parts, np.int64).reshape(2, -1).tolist()
    return ids_between(jagged.values, [*starts, jagged.values.numel()], order)


def ids_between(values: torch.Tensor, bounds: Sequence[int], order: list[int] | None) -> list[FeatureTensors]:
    """As `ids_of`, on any device. bounds: the offsets of the features' ids, and the end."""
    places = range(len(bounds) - 1) if order is None else order
    return [FeatureTensors(Form.IDS, values[bounds[at] : bounds[at + 1]], None, None) for at in places]


def keyed_tensor(names: Sequence[str], dims: Sequence[int], values: torch.Tensor) -> Any:
    """A TorchRec KeyedTensor over [bags, sum of dims]."""
    return _torchrec().KeyedTensor(list(names), list(dims), values, key_dim=1)


def jagged_tensors(
    names: Sequence[str],
    vectors: Sequence[torch.Tensor],
    keyed: Any,
    order: list[int] | None,
    ids: Sequence[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Returns a JaggedTensor per feature with the input's lengths. ids: become weights."""
    lengths = keyed.lengths().view(len(keyed.keys()), -1)
    places = range(len(names)) if order is None else order
    return {
        name: _torchrec().JaggedTensor(
            values=of_it, lengths=lengths[at], weights=None if ids is None else ids[n]
        )
        for n, (name, of_it, at) in enumerate(zip(names, vectors, places, strict=True))
    }


@cache
def _torchrec() -> Any:
    try:
        from torchrec.sparse import jagged_tensor
    except ImportError as error:
        raise ModuleError(
            f"a KeyedJaggedTensor came, and TorchRec does not import ({error}); install torchrec"
        ) from error
    return jagged_tensor
