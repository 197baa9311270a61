"""`swap_embeddings` in TorchRec's real modules: called as before, with the vectors of before."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from module_tables import ROWS
from swapped import IDS, OFFSETS, TOLERANCE, Tables

from tableside.torch import EmbeddingBags, ModuleError, swap_embeddings

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
    from torchrec.modules.embedding_modules import get_embedding_names_by_table
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )
    from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantizedBags
    from torchrec.quant.embedding_modules import EmbeddingCollection as QuantizedEmbeddings

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # torch's


def test_the_state_of_the_trained_model_loads_and_says_what_it_ignores(model: str, tables: Tables) -> None:
    """Weights of what was replaced, each named; the rest is loaded. Its own state loads without a word."""
    module = bag_collection(tables)
    module.user_sum, module.top = torch.nn.EmbeddingBag(ROWS, 16, mode="sum"), torch.nn.Linear(4, 2)
    trained = {name: 2 * value for name, value in module.state_dict().items()}
    swap_embeddings(module, "ads", COLLECTION, root=model)
    vectors = module.user_sum(IDS, OFFSETS)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert str(module.load_state_dict(trained)) == "<All keys matched successfully>"
    text = " ".join(str(w.message) for w in warned)
    for name in ("ebc.embedding_bags.users.weight", "ebc.embedding_bags.things.weight", "user_sum.weight"):
        assert name in text
    assert "ignored, since user_sum reads the published model 'ads'" in text and "top" not in text
    assert torch.equal(module.top.weight, trained["top.weight"]) and torch.equal(
        module.user_sum(IDS, OFFSETS), vectors
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load_state_dict(module.state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        module.load_state_dict({**module.state_dict(), "other": torch.ones(1)})


def test_another_sharded_module_is_refused(model: str) -> None:
    """One that is no collection, with what to do: it has shards, which no table takes the place of."""

    class ShardedModule(torch.nn.Module):
        pass

    holder = torch.nn.ModuleDict({"tower": (tower := ShardedModule())})
    with pytest.raises(
        ModuleError, match="tower: ShardedModule is sharded over ranks; swap in the model before"
    ):
        swap_embeddings(holder, "ads", root=model)
    assert holder.tower is tower


def test_paths_and_optimizers_behind_a_kind_of_parallel_model(model: str, tables: Tables) -> None:
    """Paths are those of the model inside, whose child may be called `module`; a class of one's own is one of
    these, too."""

    class DistributedModelParallel(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self._dmp_wrapped_module, self._optim = inner, "of the shards"

        def _init_optim(self, module: torch.nn.Module) -> str:
            assert module is self._dmp_wrapped_module
            return "made anew"

    class OwnParallel(DistributedModelParallel):
        pass

    inner = torch.nn.ModuleDict({"module": bag_collection(tables)})
    outer = OwnParallel(inner)
    mapping = {f"module.{path}": of for path, of in COLLECTION.items()}
    assert list(swap_embeddings(outer, "ads", mapping, root=model)) == ["module.ebc"]
    assert outer._optim == "made anew" and isinstance(inner["module"].ebc.bags, EmbeddingBags)


def test_a_collection_that_maps_ids_itself_is_refused(model: str) -> None:
    """TorchRec's managed collisions: the ids that come are not those of the rows."""
    configs = [
        EmbeddingBagConfig(name="users", embedding_dim=16, num_embeddings=ROWS, feature_names=["user_sum"])
    ]
    maps = MCHManagedCollisionModule(
        ROWS, torch.device("cpu"), DistanceLFU_EvictionPolicy(), eviction_interval=1
    )
    holder = torch.nn.Module()
    holder.ebc = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=configs), ManagedCollisionCollection({"users": maps}, configs)
    )
    inner = holder.ebc._embedding_module
    with pytest.raises(
        ModuleError, match="ManagedCollisionCollection maps or weighs ids itself, which is not served"
    ):
        swap_embeddings(holder, "ads", root=model)
    assert holder.ebc._embedding_module is inner


def test_names_that_tell_more_come_first(model: str, publish_again: Any, tables: Tables) -> None:
    """A collection's feature is sought with its path and table, with its table, then alone; `_` is what a
    name cannot hold."""
    same = {name: tables["user"] * n for n, name in enumerate(("one", "two", "three"), 1)}
    sums = {"clicked": "one", "clicked:users": "two", "b_clicked:users": "three", "deep_my_bag": "two"}
    publish_again(same, {name: {"table": table, "pooling": "sum"} for name, table in sums.items()})
    module = torch.nn.Module()
    for name, table in (("a", "users"), ("b", "users"), ("c", "others")):
        config = EmbeddingBagConfig(
            name=table, embedding_dim=16, num_embeddings=ROWS, feature_names=["clicked"]
        )
        setattr(module, name, EmbeddingBagCollection(tables=[config]))
    module.deep = torch.nn.ModuleDict({"my bag": torch.nn.EmbeddingBag(ROWS, 16, mode="sum")})
    swap_embeddings(module, "ads", root=model)
    assert [getattr(module, n).bags.features for n in "abc"] == [
        ("clicked:users",),
        ("b_clicked:users",),
        ("clicked",),
    ]
    assert module.deep["my bag"].bags.features == ("deep_my_bag",)
    assert module.a(keyed(["clicked"])).keys() == ["clicked"]


def bag_configs() -> list[EmbeddingBagConfig]:
    """Two tables, of which the first has two features; the feature `shared` is read from both."""
    return [
        EmbeddingBagConfig(
            name="users",
            embedding_dim=16,
            num_embeddings=ROWS,
            feature_names=["user_sum", "shared"],
            pooling=PoolingType.SUM,
        ),
        EmbeddingBagConfig(
            name="things",
            embedding_dim=8,
            num_embeddings=ROWS,
            feature_names=["item_mean", "shared"],
            pooling=PoolingType.MEAN,
        ),
    ]


def keyed(keys: list[str], weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 8, (len(keys) * 5,), generator=generator, dtype=torch.int32)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(
        keys, values, torch.rand(values.numel(), generator=generator) if weighted else None, lengths
    )


COLLECTION = {"ebc": {"shared@users": "user_sum", "shared@things": "item_mean"}}


def bag_collection(tables: Tables) -> torch.nn.Module:
    holder = torch.nn.Module()
    holder.ebc = EmbeddingBagCollection(tables=bag_configs())
    for name, table in (("users", "user"), ("things", "item")):
        holder.ebc.embedding_bags[name].weight.data.copy_(torch.from_numpy(tables[table]))
    return holder


def test_a_mapping_names_features_that_the_collection_has(model: str, tables: Tables) -> None:
    """Another one is said, and nothing is replaced."""
    holder = bag_collection(tables)
    before = holder.ebc
    with pytest.raises(ModuleError, match="ebc: has no feature gone, which `mapping` names"):
        swap_embeddings(holder, "ads", {"ebc": {"gone": "user_sum"}}, root=model)
    assert holder.ebc is before


def test_a_weighted_collection_wants_weights(model: str, tables: Tables) -> None:
    """As TorchRec's, whose AssertionError says so; with weights the vectors are TorchRec's."""
    holder, keys = torch.nn.Module(), ["shared", "item_mean", "user_sum"]
    sums = [dataclasses.replace(config, pooling=PoolingType.SUM) for config in bag_configs()[:1]]
    holder.ebc = EmbeddingBagCollection(tables=sums, is_weighted=True)
    holder.ebc.embedding_bags["users"].weight.data.copy_(torch.from_numpy(tables["user"]))
    old = holder.ebc
    swap_embeddings(holder, "ads", {"ebc": {"shared": "user_sum"}}, root=model)
    with pytest.raises(AssertionError, match="doesn't have weights"):
        old(keyed(keys))
    for call in (holder.ebc, holder.ebc.prefetch):
        with pytest.raises(ModuleError, match="is weighted; expected a KeyedJaggedTensor with weights"):
            call(keyed(keys))
    found, expected = holder.ebc(keyed(keys, weighted=True)), old(keyed(keys, weighted=True))
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("weighted", [False, True])
def test_an_embedding_bag_collection_is_called_as_before(model: str, tables: Tables, weighted: bool) -> None:
    """Keys, dims and values, of features that two tables share too; weights are ignored, as by a
    collection that has none."""
    holder = bag_collection(tables)
    old, told = holder.ebc, keyed(["shared", "item_mean", "user_sum"], weighted)
    expected = old(told)
    assert swap_embeddings(holder, "ads", COLLECTION, root=model) == {"ebc": old}
    found = holder.ebc(told)
    assert (found.keys(), found.length_per_key()) == (expected.keys(), expected.length_per_key())
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=TOLERANCE)
    assert holder.ebc.embedding_bag_configs() == old.embedding_bag_configs() and not holder.ebc.is_weighted()


def int8_config() -> Any:
    """What TorchRec's `from_float` reads."""
    observer = torch.ao.quantization.PlaceholderObserver
    return torch.ao.quantization.QConfig(
        activation=observer.with_args(dtype=torch.float32), weight=observer.with_args(dtype=torch.qint8)
    )


def test_a_quantized_bag_collection_is_replaced(model: str, tables: Tables) -> None:
    """TorchRec's own quantized form of the collection: the vectors are then those of the published rows."""
    holder = bag_collection(tables)
    told = keyed(["shared", "item_mean", "user_sum"])
    expected = holder.ebc(told)
    holder.ebc.qconfig = int8_config()
    holder.ebc = QuantizedBags.from_float(holder.ebc)
    quantized = holder.ebc(told)
    assert set(swap_embeddings(holder, "ads", COLLECTION, root=model)) == {"ebc"}
    found = holder.ebc(told)
    assert found.keys() == quantized.keys()
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=TOLERANCE)
    assert not torch.equal(quantized.values(), expected.values())


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("need_indices", [False, True])
def test_an_embedding_collection_is_called_as_before(
    model: str, tables: Tables, quantized: bool, need_indices: bool
) -> None:
    """JaggedTensors with lengths and, where they were asked for, ids."""
    configs = [
        EmbeddingConfig(
            name="users", embedding_dim=16, num_embeddings=ROWS, feature_names=["user_ids", "other"]
        )
    ]
    holder = torch.nn.Module()
    holder.ec = EmbeddingCollection(tables=configs, need_indices=need_indices)
    holder.ec.embeddings["users"].weight.data.copy_(torch.from_numpy(tables["user"]))
    told = keyed(["other", "user_ids"])
    expected = holder.ec(told)
    if quantized:
        holder.ec.qconfig = int8_config()
        holder.ec = QuantizedEmbeddings.from_float(holder.ec)
    swap_embeddings(holder, "ads", {"ec": {"other": "user_ids"}}, root=model)
    found = holder.ec(told)
    assert list(found) == list(expected) == get_embedding_names_by_table(configs)[0]
    for name, before in expected.items():
        assert torch.equal(found[name].values(), before.values())
        assert torch.equal(found[name].lengths(), before.lengths())
        if need_indices:
            assert torch.equal(found[name].weights(), before.weights())


def test_a_swapped_model_compiles_whole(model: str, tables: Tables) -> None:
    """fullgraph=True over a swapped EmbeddingBagCollection and a swapped nn.EmbeddingBag."""
    holder = bag_collection(tables)
    holder.bag = torch.nn.EmbeddingBag(ROWS, 16, mode="sum")
    swap_embeddings(holder, "ads", {**COLLECTION, "bag": "user_sum"}, root=model)
    told = keyed(["shared", "item_mean", "user_sum"])

    def call(values: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_ebc = holder.ebc(
            KeyedJaggedTensor(["shared", "item_mean", "user_sum"], values, lengths=lengths)
        ).values()
        return of_ebc, holder.bag(values, torch.zeros(1, dtype=torch.int64))

    torch.compiler.reset()
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(told.values(), told.lengths())
    for one, other in zip(found, call(told.values(), told.lengths()), strict=True):
        assert torch.equal(one, other)


def test_collections_inside_others_are_left_to_them(model: str, tables: Tables) -> None:
    """The nn.EmbeddingBags of a collection are no modules of their own; a second swap finds nothing to do."""
    holder = bag_collection(tables)
    assert set(swap_embeddings(holder, "ads", COLLECTION, root=model)) == {"ebc"}
    assert isinstance(holder.ebc.bags, EmbeddingBags)
    with pytest.raises(ModuleError, match="Module holds no embedding modules"):
        swap_embeddings(holder, "ads", root=model)
