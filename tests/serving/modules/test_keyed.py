"""TorchRec's real KeyedJaggedTensor in, KeyedTensor and JaggedTensor out, against TorchRec's collections
of the same rows."""

import warnings

import numpy as np
import pytest
import torch
from module_tables import DIMS, FEATURES, ROWS

from tableside.torch import BadFeatureIds, Bags, EmbeddingBags, Embeddings, ModuleError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        KeyedJaggedTensor,
    )
    from torchrec.modules.embedding_configs import PoolingType

Tables = dict[str, np.ndarray]
pytestmark = pytest.mark.usefixtures("reading")
POOLED = ["user_sum", "item_mean", "page_sum"]
TOLERANCE = 40 * 200 * 2.0**-24  # as in test_embeddings.py


def keyed(keys: list[str], bags: int = 5, weighted: bool = False, seed: int = 0) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (len(keys) * bags,), generator=generator, dtype=torch.int32)
    count = int(lengths.sum())
    values = torch.randint(0, ROWS, (count,), generator=generator)
    return KeyedJaggedTensor(
        keys, values, torch.rand(count, generator=generator) if weighted else None, lengths
    )


def collection(tables: Tables, features: list[str], weighted: bool = False) -> EmbeddingBagCollection:
    """TorchRec's own, with the same rows."""
    configs = [
        EmbeddingBagConfig(
            name=f"t_{f}",
            embedding_dim=DIMS[FEATURES[f]["table"]],
            num_embeddings=ROWS,
            feature_names=[f],
            pooling=PoolingType[FEATURES[f]["pooling"].upper()],
        )
        for f in features
    ]
    ebc = EmbeddingBagCollection(tables=configs, is_weighted=weighted)
    for f in features:
        ebc.embedding_bags[f"t_{f}"].weight.data.copy_(torch.from_numpy(tables[FEATURES[f]["table"]]))
    return ebc


def test_a_keyed_tensor_is_that_of_torchrec(model: str, tables: Tables) -> None:
    """Sums and means of several dims: keys, dims and values."""
    told = keyed(POOLED)
    found, expected = EmbeddingBags("ads", POOLED, root=model)(told), collection(tables, POOLED)(told)
    assert (found.keys(), found.length_per_key(), found.key_dim()) == (
        expected.keys(),
        expected.length_per_key(),
        1,
    )
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=TOLERANCE)
    for name in POOLED:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "keys", [["page_sum", "other", "user_sum", "item_mean"], ["page_sum", "item_mean", "user_sum"]]
)
def test_features_are_found_by_their_keys(model: str, keys: list[str]) -> None:
    """In another order and among others, as if they came alone."""
    bags, told = EmbeddingBags("ads", POOLED, root=model), keyed(keys)
    alone = KeyedJaggedTensor(
        POOLED,
        torch.cat([told[k].values() for k in POOLED]),
        lengths=torch.cat([told[k].lengths() for k in POOLED]),
    )
    assert torch.equal(bags(told).values(), bags(alone).values())


@pytest.mark.parametrize("weighted", [False, True])
def test_packed_ids_are_those_of_a_dict_and_of_a_keyed_tensor(model: str, weighted: bool) -> None:
    """Side by side what a dict gives apart, bit for bit, with and without weights."""
    told, bags = keyed(POOLED, weighted=weighted), EmbeddingBags("ads", POOLED, root=model)
    found = bags.packed(told.values(), told.offsets(), told.weights_or_none())
    assert torch.equal(found, bags(told).values())
    apart = {
        name: Bags(told[name].values(), lengths=told[name].lengths(), weights=told[name].weights_or_none())
        for name in POOLED
    }
    assert torch.equal(found, torch.cat(list(bags(apart).values()), 1))
    if weighted:
        assert not torch.equal(found, bags.packed(told.values(), told.offsets()))


def test_weights_are_those_of_each_feature(model: str, tables: Tables) -> None:
    """As TorchRec's weighted collection, of summed features; keys in another order."""
    features = ["user_sum", "page_sum"]
    told = keyed(["page_sum", "user_sum"], weighted=True)
    found = EmbeddingBags("ads", features, root=model)(told)
    expected = collection(tables, features, weighted=True)(told)
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=TOLERANCE)


def test_lengths_and_ids_of_other_integers_are_taken(model: str) -> None:
    """int64 lengths, int32 values, and a tensor made of offsets."""
    told, bags = keyed(POOLED), EmbeddingBags("ads", POOLED, root=model)
    expected = bags(told).values()
    for other in (
        KeyedJaggedTensor(POOLED, told.values().int(), lengths=told.lengths()),
        KeyedJaggedTensor(POOLED, told.values(), lengths=told.lengths().long()),
        KeyedJaggedTensor(POOLED, told.values(), offsets=told.offsets()),
    ):
        assert torch.equal(bags(other).values(), expected)


@pytest.mark.parametrize("output", [torch.float16, torch.bfloat16])
def test_keyed_vectors_have_the_type_that_was_asked_for(model: str, output: torch.dtype) -> None:
    """Rounded once from the fp32 vectors."""
    told = keyed(POOLED)
    found = EmbeddingBags("ads", POOLED, root=model, output=output)(told).values()
    assert torch.equal(found, EmbeddingBags("ads", POOLED, root=model)(told).values().to(output))


def test_a_batch_of_none_and_of_empty_bags_is_answered(model: str) -> None:
    """Shapes as TorchRec's."""
    bags, none = EmbeddingBags("ads", POOLED, root=model), torch.zeros(0, dtype=torch.int64)
    assert bags(KeyedJaggedTensor(POOLED, none, lengths=none.int())).values().shape == (0, 48)
    empty = bags(KeyedJaggedTensor(POOLED, none, lengths=torch.zeros(6, dtype=torch.int32))).values()
    assert torch.equal(empty, torch.zeros(2, 48))


def test_sequences_are_those_of_torchrec(model: str, tables: Tables) -> None:
    """A JaggedTensor for each feature with a vector for each id, as an EmbeddingCollection gives, where
    dims are equal."""
    configs = [EmbeddingConfig(name="t", embedding_dim=16, num_embeddings=ROWS, feature_names=["user_ids"])]
    ec = EmbeddingCollection(tables=configs)
    ec.embeddings["t"].weight.data.copy_(torch.from_numpy(tables["user"]))
    told = keyed(["item_ids", "user_ids"])
    found, expected = Embeddings("ads", ["user_ids", "item_ids"], root=model)(told), ec(told)
    assert torch.equal(found["user_ids"].values(), expected["user_ids"].values())
    assert torch.equal(found["user_ids"].lengths(), expected["user_ids"].lengths())
    assert torch.equal(
        found["item_ids"].values(), torch.from_numpy(tables["item"])[told["item_ids"].values()]
    )


def test_a_bad_id_is_named_with_the_feature_that_it_is_of(model: str) -> None:
    """By its position among the ids of its feature."""
    told = keyed(POOLED)
    start = int(told.offset_per_key()[1])
    told.values()[start + 2] = -4
    with pytest.raises(
        BadFeatureIds,
        match=r"feature 'item_mean': id -4 at position 2 is outside the table's rows \[0, 500\)",
    ):
        EmbeddingBags("ads", POOLED, root=model)(told)


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        (4, [1, 1, 1, 1, 1, 0], "add up to 5, but there are 4 ids"),
        (4, [6, -4, 1, 1, 0, 0], "length -4 at position 1 is negative"),
        (4, [2**32 + 1, 1, 1, 1, 0, 0], "add up to 4294967300, but there are 4 ids"),
    ],
)
@pytest.mark.drawn(3)
def test_lengths_that_are_not_those_ids_are_refused(
    model: str, values: int, lengths: list[int], message: str
) -> None:
    """Before any id is read."""
    told = KeyedJaggedTensor(POOLED, torch.zeros(values, dtype=torch.int64), lengths=torch.tensor(lengths))
    with pytest.raises(ValueError, match=message):
        EmbeddingBags("ads", POOLED, root=model)(told)


def test_what_a_keyed_jagged_tensor_lacks_is_named(model: str) -> None:
    """With what it has."""
    with pytest.raises(ModuleError, match="lacks item_mean, page_sum; it has: user_sum"):
        EmbeddingBags("ads", POOLED, root=model)(keyed(["user_sum"]))
    varied = KeyedJaggedTensor(
        ["user_sum", "page_sum"],
        torch.zeros(3, dtype=torch.int64),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )
    inverse = KeyedJaggedTensor(
        ["user_sum", "page_sum"],
        torch.zeros(2, dtype=torch.int64),
        lengths=torch.tensor([1, 1]),
        inverse_indices=(["user_sum", "page_sum"], torch.zeros(2, 1, dtype=torch.int64)),
    )
    for told in (varied, inverse):
        with pytest.raises(ModuleError, match="several numbers of bags"):
            EmbeddingBags("ads", ["user_sum", "page_sum"], root=model)(told)
