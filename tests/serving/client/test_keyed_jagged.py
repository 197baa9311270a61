"""A KeyedJaggedTensor as a client's features, TorchRec's own and a stand-in."""

import asyncio
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from compact_model import ALL_POOLED, FEATURES, draw
from servers import Server

from tableside.serving.client import AsyncClient, Client, FeatureError, Jagged


class KeyedTensor:
    def __init__(self, keys: list[str], length_per_key: list[int], values: torch.Tensor) -> None:
        self._keys, self._dims, self._values = keys, length_per_key, values

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def to_dict(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._keys, torch.split(self._values, self._dims, 1), strict=True))


class JaggedTensor:
    def __init__(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        self._values, self._lengths = values, lengths

    def values(self) -> torch.Tensor:
        return self._values

    def lengths(self) -> torch.Tensor:
        return self._lengths


class KeyedJaggedTensor:
    """What stands in for TorchRec's where it is not installed."""

    def __init__(self, keys: list[str], values: Any, lengths: Any, weights: Any, stride: int) -> None:
        self._parts = keys, values, lengths, weights, stride

    @classmethod
    def from_lengths_sync(
        cls, keys: list[str], values: Any, lengths: Any, weights: Any = None
    ) -> "KeyedJaggedTensor":
        return cls(keys, values, lengths, weights, len(lengths) // len(keys) if keys else 0)

    def keys(self) -> list[str]:
        return self._parts[0]

    def values(self) -> Any:
        return self._parts[1]

    def lengths(self) -> Any:
        return self._parts[2]

    def weights_or_none(self) -> Any:
        return self._parts[3]

    def stride(self) -> int:
        return self._parts[4]


def real_torchrec() -> Any:
    """TorchRec's module of jagged tensors. It warns when it is imported on a machine without a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "torchrec.sparse.jagged_tensor", reason="make dev installs TorchRec"
        ).KeyedJaggedTensor


@pytest.fixture(params=["stand-in", "torchrec"])
def kjt_class(request: pytest.FixtureRequest) -> Any:
    return KeyedJaggedTensor if request.param == "stand-in" else real_torchrec()


def kjt_of(kjt_class: Any, features: dict[str, Jagged]) -> Any:
    parts = [[getattr(j, part) for j in features.values()] for part in ("values", "lengths", "weights")]
    values, lengths = (torch.from_numpy(np.concatenate(p)) for p in parts[:2])
    weights = None if parts[2][0] is None else torch.from_numpy(np.concatenate(parts[2]))
    return kjt_class.from_lengths_sync(list(features), values, lengths, weights)


@pytest.mark.parametrize(
    ("names", "weights", "dtype"),
    [
        (ALL_POOLED, True, np.int64),
        (("near", "words", "clicked", "seen"), False, np.int32),
        (("seen", "words"), False, np.int64),
    ],
)
@pytest.mark.drawn(1)
def test_a_keyed_jagged_tensor(
    served: Server, kjt_class: Any, names: tuple[str, ...], weights: bool, dtype: type
) -> None:
    """The answer is a KeyedTensor of the pooled features and a JaggedTensor for each other, with the
    dict's very vectors."""
    rng = np.random.default_rng(7)
    features = {n: draw(rng, n, 5, weights, dtype) for n in names}
    given = kjt_of(kjt_class, features)

    async def ask() -> Any:
        async with AsyncClient(served.url) as client:
            return await client.lookup("ads", given)

    with Client(served.url) as client:
        expected = client.lookup("ads", features, compact=False)
        for found in (client.lookup("ads", given), asyncio.run(ask())):
            pooled, sequences = found
            assert type(pooled).__name__ == "KeyedTensor"
            assert list(pooled.keys()) == [n for n in names if FEATURES[n].get("pooling") != "none"]
            assert pooled.values().shape[0] == 5
            for name, vectors in pooled.to_dict().items():
                np.testing.assert_array_equal(vectors.numpy(), expected[name])
            assert list(sequences) == [n for n in names if FEATURES[n].get("pooling") == "none"]
            for name, one in sequences.items():
                np.testing.assert_array_equal(one.values().numpy(), expected[name])
                np.testing.assert_array_equal(one.lengths().numpy(), features[name].lengths)


def test_outputs_of_a_keyed_jagged_tensor(served: Server, kjt_class: Any) -> None:
    rng = np.random.default_rng(7)
    features = {n: draw(rng, n, 5) for n in ("near", "words", "clicked", "seen")}
    with Client(served.url) as client:
        expected = client.lookup("ads", features, compact=False)
        pooled, sequences = client.lookup("ads", kjt_of(kjt_class, features), outputs=["clicked", "seen"])
        assert list(pooled.keys()) == ["clicked"] and list(sequences) == ["seen"]
        np.testing.assert_array_equal(pooled.values().numpy(), expected["clicked"])
        np.testing.assert_array_equal(sequences["seen"].values().numpy(), expected["seen"])
        pooled, sequences = client.lookup("ads", kjt_of(kjt_class, features), outputs=["words"])
        assert list(pooled.keys()) == [] and pooled.values().shape == (5, 0) and list(sequences) == ["words"]


@pytest.mark.parametrize(
    ("keys", "lengths", "stride", "options", "why"),
    [
        ([], [], 0, {}, "has no keys"),
        (["user", "near"], [1, 1, 1], 2, {}, "has 3 lengths for 2 keys and stride 2"),
        (["user", "half"], [1, 1], 1, {}, "user has FP32 vectors and half FP16"),
        (["user", "nope"], [1, 1], 1, {}, "the model has no feature 'nope'"),
        (["user", "near"], [1, 1], 1, {"outputs": ["seen"]}, "output 'seen' is none of its keys"),
        (["user", "near"], [1, 1], 1, {"compact": False}, "compact=False"),
    ],
)
def test_what_no_keyed_jagged_tensor_can_ask(
    served: Server, keys: list[str], lengths: list[int], stride: int, options: dict[str, Any], why: str
) -> None:
    given = KeyedJaggedTensor(
        keys, torch.ones(sum(lengths), dtype=torch.int64), torch.tensor(lengths), None, stride
    )
    with Client(served.url) as client, pytest.raises(FeatureError, match=why):
        client.lookup("ads", given, **options)


def test_what_is_neither_a_dict_nor_a_keyed_jagged_tensor() -> None:
    with (
        Client("http://127.0.0.1:9") as client,
        pytest.raises(FeatureError, match="are a list; expected a dict of features"),
    ):
        client.lookup("ads", [1, 2])  # type: ignore[call-overload]
