"""TorchRec's KeyedJaggedTensor as a module's input, and its KeyedTensor and JaggedTensor as outputs. TorchRec is optional.

A KeyedJaggedTensor of F features and B bags each has lengths [F * B], those of its first feature first, and values in the same
order. Its pooled vectors lie side by side, [B, sum of dims], as a KeyedTensor has them. Nothing is copied.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant import BadIds, LookupKind
from tableside.quant.contract import Lengths, Place
from tableside.serving.modules.errors import BadFeatureIds, ModuleError
from tableside.serving.modules.inputs import Form, Given
from tableside.serving.modules.lookups import BASE, MEMORY, OUTPUTS, address_of, host_ids, host_lengths, host_weights
from tableside.serving.modules.published import Attached

_IDS_AT, _IDS, _LENGTHS_AT, _BAGS, _WEIGHTS_AT, _OUT_AT = map(
    Place._fields.index, ("ids_at", "ids", "lengths_at", "bags", "weights_at", "out_at")
)


class Jagged(NamedTuple):
    """The parts of a KeyedJaggedTensor on the CPU. values int64 [ids]; lengths int32 [features, bags]; starts, counts int64
    [features]: the first id of each feature, and how many it has; weights fp32 [ids]."""

    values: torch.Tensor
    lengths: Lengths
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
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


def parts(keyed: Any, by_offsets: bool) -> tuple[torch.Tensor, Form, torch.Tensor, torch.Tensor | None, int]:
    """Values, lengths or offsets and which of them, weights and the number of features.

    ModuleError: features have several numbers of bags.
    """
    if keyed.variable_stride_per_key() or keyed.inverse_indices_or_none() is not None:
        raise ModuleError(
            "the KeyedJaggedTensor has several numbers of bags (variable stride) or inverse indices; give a dict of features"
        )
    form, bags = (Form.ENDS, keyed.offsets()) if by_offsets else (Form.LENGTHS, keyed.lengths())
    return keyed.values(), form, bags, keyed.weights_or_none(), len(keyed.keys())


def host_jagged(name: str, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, features: int) -> Jagged:
    """The parts of a KeyedJaggedTensor, checked; name: for errors.

    ModuleError: they are of other types, or do not fit together. BadFeatureIds: a length is negative or too large.
    """
    if values.dtype is not torch.int64 or not values.is_cpu or not values.is_contiguous():
        values = host_ids(name, values)
    count = values.numel()
    of_bags = host_lengths(name, Form.LENGTHS, lengths, count)
    if not features or of_bags.size % features:
        raise ModuleError(f"there are {of_bags.size} lengths for {features} features ({name}); expected as many for each feature")
    of_bags = of_bags.reshape(features, -1)
    counts = np.add.reduce(of_bags, 1, np.int64)
    ends = np.add.accumulate(counts)
    if int(ends[-1]) != count:
        raise ModuleError(f"the lengths of {name} add up to {int(ends[-1])}, but there are {count} ids")
    return Jagged(values, of_bags, ends - counts, counts, None if weights is None else host_weights(name, weights, count))


class HostKeyed:
    """Pooled lookups of a KeyedJaggedTensor's features on the CPU, for one version."""

    def __init__(self, attached: Attached, names: tuple[str, ...], output: torch.dtype) -> None:
        bound = [attached.served.features[name] for name in names]
        dims = [b.table.dim for b in bound]
        self._names, self._output, self._missing = names, output, attached.missing
        self._written = torch.float16 if output is torch.float16 else torch.float32
        item = OUTPUTS[output].bytes
        kinds = [LookupKind(b.table, b.pooling, OUTPUTS[output], sum(dims) * item) for b in bound]
        self._planner = attached.served.backend.planner(kinds, attached.threads)
        self._columns = (np.cumsum(dims) - dims) * item
        self._width = sum(dims)
        self._places = np.full((len(names), len(Place._fields)), -1, np.int64)
        self._places[:, Place._fields.index("bag_length")] = 0
        self._all = np.arange(len(names))

    def __call__(self, jagged: Jagged, order: list[int] | None) -> torch.Tensor:
        """[bags, sum of dims]. order: of the features among those of `jagged`; None: the same. BadFeatureIds: an id is wrong."""
        values, lengths, starts, counts, weights = jagged
        bags = lengths.shape[1]
        chosen = self._all if order is None else np.array(order)
        if order is not None:
            starts, counts = starts[chosen], counts[chosen]
        out = torch.empty((bags, self._width), dtype=self._written)
        places = self._places.copy()
        places[:, _IDS_AT] = starts * 8 + (values.data_ptr() - BASE if values.numel() else 0)
        places[:, _IDS] = counts
        places[:, _LENGTHS_AT] = chosen * (4 * bags) + (address_of(lengths) - BASE)
        places[:, _BAGS] = bags
        if weights is not None and weights.numel():
            places[:, _WEIGHTS_AT] = starts * 4 + (weights.data_ptr() - BASE)
        places[:, _OUT_AT] = self._columns + (out.data_ptr() - BASE) if bags else 0
        try:
            unfound = self._planner.plan(places).run(MEMORY, MEMORY)
        except BadIds as error:
            raise BadFeatureIds(self._names[error.job], error) from None
        if unfound is not None:
            self._missing.add(self._names, unfound)
        return out if self._written is self._output else out.to(self._output)


def host_keyed(attached: Attached, key: str, names: tuple[str, ...], output: torch.dtype) -> HostKeyed:
    """The lookup of these features, made once for each version, under its key."""
    if (found := attached.keyed.get(key)) is None:
        found = attached.keyed[key] = HostKeyed(attached, names, output)
    assert isinstance(found, HostKeyed)
    return found


def ids_of(jagged: Jagged, features: int, order: list[int] | None) -> list[Given]:
    """The ids of each feature, for a lookup that is not pooled. Weights are left aside, as by TorchRec's EmbeddingCollection."""
    found = []
    for at in range(features) if order is None else order:
        start = int(jagged.starts[at])
        found.append(Given(Form.IDS, jagged.values[start : start + int(jagged.counts[at])], None, None))
    return found


def ids_between(values: torch.Tensor, bounds: Sequence[int], order: list[int] | None) -> list[Given]:
    """As `ids_of`, on any device. bounds: where the ids of each feature begin, and where the last one's end."""
    places = range(len(bounds) - 1) if order is None else order
    return [Given(Form.IDS, values[bounds[at] : bounds[at + 1]], None, None) for at in places]


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
    """A TorchRec JaggedTensor for each feature, with the lengths that it came with. ids: what is to be their weights."""
    lengths = keyed.lengths().view(len(keyed.keys()), -1)
    places = range(len(names)) if order is None else order
    return {
        name: _torchrec().JaggedTensor(values=of_it, lengths=lengths[at], weights=None if ids is None else ids[n])
        for n, (name, of_it, at) in enumerate(zip(names, vectors, places, strict=True))
    }


@cache
def _torchrec() -> Any:
    try:
        from torchrec.sparse import jagged_tensor
    except ImportError as error:
        raise ModuleError(f"a KeyedJaggedTensor came, and TorchRec does not import ({error}); install torchrec") from error
    return jagged_tensor
