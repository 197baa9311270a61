"""TorchRec's tensors: a KeyedJaggedTensor goes in, a KeyedTensor and JaggedTensors come out.

TorchRec is imported only to build an answer.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tableside.serving.client.compact import Answer, Keyed, check_keyed
from tableside.serving.client.features import Array, array, integers, joined


@runtime_checkable
class KeyedJagged(Protocol):
    """What is used of TorchRec's KeyedJaggedTensor."""

    def keys(self) -> list[str]: ...
    def values(self) -> Any: ...
    def lengths(self) -> Any: ...
    def weights_or_none(self) -> Any: ...
    def stride(self) -> int: ...


class KeyedVectors(NamedTuple):
    """The answer to a KeyedJaggedTensor, on the CPU.

    pooled: TorchRec's KeyedTensor [bags, sum of dims] of the pooled features. sequences: name -> TorchRec's JaggedTensor of an
    unpooled feature, whose values are [ids, dim].
    """

    pooled: Any
    sequences: dict[str, Any]


def from_torchrec(given: KeyedJagged) -> tuple[Keyed, Array]:
    """A KeyedJaggedTensor's buffers, and its lengths int32 [keys, bags]. FeatureError: it cannot be sent."""
    names, bags = tuple(given.keys()), given.stride()
    values = integers(given.values(), "values")
    lengths = array(given.lengths(), np.dtype("<i4"), "lengths")
    check_keyed(names, lengths, bags)
    weights = given.weights_or_none()
    return (
        Keyed(
            names,
            bags,
            values.size,
            "INT64" if values.itemsize == 8 else "INT32",
            joined([values]),
            joined([lengths]),
            None if weights is None else joined([array(weights, np.dtype("<f4"), "weights")]),
        ),
        lengths.reshape(len(names), bags),
    )


def to_torchrec(answer: Answer, names: tuple[str, ...], lengths: Array) -> KeyedVectors:
    """The answer to a compact request for `names`, as TorchRec has it. lengths: those that were asked with."""
    import torch
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

    features = answer.pooled_features
    pooled = torch.empty(lengths.shape[1], 0) if answer.pooled is None else torch.from_numpy(answer.pooled)
    rows = dict(zip(names, torch.from_numpy(lengths), strict=True))
    return KeyedVectors(
        KeyedTensor([f.name for f in features], [f.dim for f in features], pooled),
        {name: JaggedTensor(values=values, lengths=rows[name]) for name, values in answer.unpooled_vectors(True).items()},
    )
