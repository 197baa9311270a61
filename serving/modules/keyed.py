"""TorchRec's KeyedJaggedTensor as a module's input, and its KeyedTensor and JaggedTensor as outputs. TorchRec
is optional.

A KeyedJaggedTensor of F features and B bags each has lengths [F * B], those of its first feature first, and
values in the same order. Its pooled vectors lie side by side, [B, sum of dims], as a KeyedTensor has them.
Nothing is copied.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from tableside.quant import BadIds, LookupKind
from tableside.quant.cpu.bags import MOST_IDS, feature_places, parts_of, tensor_parts
from tableside.serving.modules.errors import BadFeatureIds, ModuleError
from tableside.serving.modules.inputs import FeatureTensors, Form, PackedInput
from tableside.serving.modules.lookups import (
    BASE,
    EXCHANGE,
    MEMORY,
    OUTPUTS,
    host_ids,
    host_lengths,
    host_weights,
    wrong_bags,
)
from tableside.serving.modules.published import AttachedVersion


class JaggedFeatures(NamedTuple):
    """The parts of a KeyedJaggedTensor on the CPU. values: int64 [ids]; lengths: what holds int32
    [features, bags]; ids_at, lengths_at: where they lie in `MEMORY`. parts: int64 [2, features], the first
    id of each feature, and how many it has. weights: fp32 [ids]."""

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
    """Where each feature is among the keys; None: they are the same. ModuleError: one is not there."""
    if list(keys) == list(names):
        return None
    if missing := [name for name in names if name not in keys]:
        raise ModuleError(f"the KeyedJaggedTensor lacks {', '.join(missing)}; it has: {', '.join(keys)}")
    return [list(keys).index(name) for name in names]


def packed_of(
    keyed: Any, order: list[int] | None, *, by_offsets: bool, is_weighted: bool = True
) -> PackedInput:
    """The parts of a KeyedJaggedTensor. by_offsets: with its offsets, which it computes once, in place of its
    lengths.

    ModuleError: features have several numbers of bags.
    """
    if keyed.variable_stride_per_key() or keyed.inverse_indices_or_none() is not None:
        raise ModuleError(
            "the KeyedJaggedTensor has several numbers of bags (variable stride) or inverse indices; give a "
            "dict of features"
        )
    form, bags = (Form.ENDS, keyed.offsets()) if by_offsets else (Form.LENGTHS, keyed.lengths())
    weights = keyed.weights_or_none() if is_weighted else None
    return PackedInput(order or [], len(keyed.keys()), keyed.values(), form, bags, weights)


def host_jagged(name: str, packed: PackedInput) -> JaggedFeatures:
    """The parts of a KeyedJaggedTensor, checked; name: for errors.

    ModuleError: they are of other types, or do not fit together. BadFeatureIds: a length is negative or too
    large.
    """
    _, features, values, form, bags, weights = packed
    if weights is not None:
        weights = host_weights(name, weights, values.numel())
    if form is Form.LENGTHS and (found := tensor_parts(EXCHANGE, values, bags, features, BASE)) is not None:
        return JaggedFeatures(values, *found, weights)
    values = host_ids(name, values)
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
    """What is wrong with lengths that are not those of `count` ids."""
    if count > MOST_IDS or not all(0 <= length <= count for length in lengths):
        return wrong_bags(name, Form.LENGTHS, lengths, count)
    return ModuleError(f"the lengths of {name} add up to {sum(lengths)}, but there are {count} ids")


class HostKeyed:
    """Pooled lookups of a KeyedJaggedTensor's features on the CPU, for one version."""

    def __init__(self, attached: AttachedVersion, names: tuple[str, ...], output: torch.dtype) -> None:
        bound = [attached.served.features[name] for name in names]
        dims = [b.table.dim for b in bound]
        self._names, self._output, self._missing = names, output, attached.missing
        self._written = torch.float16 if output is torch.float16 else torch.float32
        item = OUTPUTS[output].bytes
        kinds = [LookupKind(b.table, b.pooling, OUTPUTS[output], sum(dims) * item) for b in bound]
        self._planner = attached.served.backend.planner(kinds, attached.threads)
        self._new = torch.empty(0, dtype=self._written, device="cpu").new_empty
        self._width = sum(dims)
        self._columns = np.array([at * item for at in accumulate(dims[:-1], initial=0)], np.int64).tobytes()

    def __call__(self, jagged: JaggedFeatures, order: list[int] | None) -> torch.Tensor:
        """[bags, sum of dims]. order: of the features among those of `jagged`; None: the same.
        BadFeatureIds: an id is wrong."""
        _, _, ids_at, lengths_at, bags, parts, weights = jagged
        out = self._new(bags, self._width)
        weights_at = -1 if weights is None or not weights.numel() else weights.data_ptr() - BASE
        out_at = out.data_ptr() - BASE if bags else 0
        places = feature_places(parts, order, self._columns, ids_at, lengths_at, bags, weights_at, out_at)
        try:
            unfound = self._planner.run(places, MEMORY, MEMORY)
        except BadIds as error:
            raise BadFeatureIds(self._names[error.job], error) from None
        if unfound is not None:
            self._missing.add(self._names, unfound)
        return out if self._written is self._output else out.to(self._output)


def host_keyed(attached: AttachedVersion, key: str, names: tuple[str, ...], output: torch.dtype) -> HostKeyed:
    """The lookup of these features, made once for each version, under its key."""
    if (found := attached.keyed.get(key)) is None:
        found = attached.keyed[key] = HostKeyed(attached, names, output)
    assert isinstance(found, HostKeyed)
    return found


def ids_of(jagged: JaggedFeatures, order: list[int] | None) -> list[FeatureTensors]:
    """The ids of each feature, for a lookup that is not pooled. Weights are left aside, as by TorchRec's
    EmbeddingCollection."""
    starts, _ = np.frombuffer(jagged.parts, np.int64).reshape(2, -1).tolist()
    return ids_between(jagged.values, [*starts, jagged.values.numel()], order)


def ids_between(values: torch.Tensor, bounds: Sequence[int], order: list[int] | None) -> list[FeatureTensors]:
    """As `ids_of`, on any device. bounds: where the ids of each feature begin, and where the last one's
    end."""
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
    """A TorchRec JaggedTensor for each feature, with the lengths that it came with. ids: what is to be
    their weights."""
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
