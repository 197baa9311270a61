"""TorchRec's KeyedJaggedTensor in, its KeyedTensor and JaggedTensors out. Takes the classes from the given
object."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tableside.serving.client.compact import CompactAnswer, Keyed
from tableside.serving.client.features import Array, array, integers, joined
from tableside.serving.client.messages import FeatureError


@runtime_checkable
class KeyedJagged(Protocol):
    """The used part of TorchRec's KeyedJaggedTensor."""

    def keys(self) -> list[str]: ...
    def values(self) -> Any: ...
    def lengths(self) -> Any: ...
    def weights_or_none(self) -> Any: ...
    def stride(self) -> int: ...


class KeyedVectors(NamedTuple):
    """The answer to a KeyedJaggedTensor, on the CPU. pooled: KeyedTensor [bags, sum of dims]. sequences:
    unpooled feature -> JaggedTensor with values [ids, dim]."""

    pooled: Any
    sequences: dict[str, Any]


def from_torchrec(given: KeyedJagged) -> tuple[Keyed, Array]:
    """A KeyedJaggedTensor's buffers, and its lengths int32 [keys, bags]. FeatureError: it cannot be sent."""
    names, bags = tuple(given.keys()), given.stride()
    values = integers(given.values(), "values")
    lengths = array(given.lengths(), np.dtype("<i4"), "lengths")
    if not names:
        raise FeatureError("the KeyedJaggedTensor has no keys")
    if lengths.size != len(names) * bags:
        raise FeatureError(
            f"the KeyedJaggedTensor has {lengths.size} lengths for {len(names)} keys and stride {bags}; "
            "expected one batch size for all keys (no variable stride)"
        )
    weights = given.weights_or_none()
    datatype = "INT64" if values.itemsize == 8 else "INT32"
    sent = None if weights is None else joined([array(weights, np.dtype("<f4"), "weights")])
    keyed = Keyed(names, bags, values.size, datatype, joined([values]), joined([lengths]), sent)
    return keyed, lengths.reshape(len(names), bags)


def to_torchrec(
    answer: CompactAnswer, given: KeyedJagged, lengths: Array, wanted: Sequence[str]
) -> KeyedVectors:
    """Converts the answer to the compact request made of `given`, with these `lengths`."""
    import torch

    classes = _module_of(given)
    chosen = [f for f in answer.form.pooled if f.name in wanted]
    if len(chosen) == len(answer.form.pooled) and answer.pooled is not None:
        pooled = torch.from_numpy(answer.pooled)
    elif chosen:
        vectors = answer.pooled_vectors(as_torch=True)
        pooled = torch.cat([vectors[f.name] for f in chosen], 1)
    else:
        pooled = torch.empty(lengths.shape[1], 0)
    rows = dict(zip(given.keys(), torch.from_numpy(lengths), strict=True))
    sequences = {n: v for n, v in answer.unpooled_vectors(as_torch=True).items() if n in wanted}
    return KeyedVectors(
        classes.KeyedTensor([f.name for f in chosen], [f.dim for f in chosen], pooled),
        {n: classes.JaggedTensor(values=v, lengths=rows[n]) for n, v in sequences.items()},
    )


def _module_of(given: KeyedJagged) -> ModuleType:
    """Returns the TorchRec module that defines the given class or its base."""
    modules = [sys.modules[c.__module__] for c in type(given).__mro__]
    found = next((m for m in modules if hasattr(m, "KeyedTensor") and hasattr(m, "JaggedTensor")), None)
    if found is None:
        raise FeatureError(
            f"features are a {type(given).__name__}; expected a dict, or TorchRec's KeyedJaggedTensor"
        )
    return found
