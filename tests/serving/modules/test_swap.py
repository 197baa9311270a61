"""`swap_embeddings` in torch's real modules: called as before, with the vectors of before."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from module_tables import DIMS, ROWS
from swapped import IDS, MAPPING, OFFSETS, TOLERANCE, Plain, Tables

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.torch import ModuleError, swap_embeddings

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # torch's


def test_torchs_modules_are_called_as_before(model: str, tables: Tables) -> None:
    """Every way of calling them gives what it gave; what was replaced comes back by its path, and nothing
    else changed."""
    module = Plain(tables)
    expected, top = module(), module.top
    old = {name: module.get_submodule(name) for name in ("user_sum", "inner.page", "user_ids")}
    assert swap_embeddings(module, "ads", MAPPING, root=model) == old
    for found, before in zip(module(), expected, strict=True):
        torch.testing.assert_close(found, before, rtol=0, atol=TOLERANCE)
    assert module.top is top
    assert not {n for n, _ in module.named_parameters() if not n.startswith("top")}


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_padding_is_served(root: Path, publish: Any, tables: Tables, mode: str) -> None:
    """Of an EmbeddingBag, one whose index counts from the end as well: torch's vectors. An Embedding gives
    the row itself."""
    features = {
        "user_sum": {"table": "user", "pooling": mode},
        "user_ids": {"table": "user", "pooling": "none"},
    }
    publish({"user": tables["user"]}, "ads", {"user": "fp32"}, features)
    for padding in (3, -1):
        module = torch.nn.Module()
        module.user_sum = torch.nn.EmbeddingBag(ROWS, DIMS["user"], mode=mode, padding_idx=padding)
        module.user_ids = torch.nn.Embedding(ROWS, DIMS["user"], padding_idx=padding)
        for one in (module.user_sum, module.user_ids):
            one.weight.data.copy_(torch.from_numpy(tables["user"]))
        expected = module.user_sum(IDS, OFFSETS), module.user_ids(IDS)
        swap_embeddings(module, "ads", root=str(root))
        for found, before in zip(
            (module.user_sum(IDS, OFFSETS), module.user_ids(IDS)), expected, strict=True
        ):
            torch.testing.assert_close(found, before, rtol=0, atol=TOLERANCE)


def test_a_swapped_bag_takes_what_torchs_takes(model: str, tables: Tables) -> None:
    """ids, and offsets where ids have one dimension; a tuple of both is none."""
    module = Plain(tables)
    swap_embeddings(module, "ads", MAPPING, root=model)
    bag: Any = module.user_sum
    for wrong in ((IDS, OFFSETS), [IDS, OFFSETS], (IDS, OFFSETS, None), None):
        with pytest.raises(ModuleError, match=r"came with (tuple|list|NoneType)"):
            bag(wrong)
    with pytest.raises(ModuleError, match="has neither offsets nor lengths"):
        bag(IDS)


def test_what_modules_say_of_themselves_is_kept(model: str, tables: Tables) -> None:
    """What code around them reads; copies and pickles have it too."""
    module = Plain(tables, padding_idx=2)
    names = ("num_embeddings", "embedding_dim", "mode", "padding_idx", "include_last_offset")
    paths = {
        "user_sum": names,
        "inner.page": names,
        "user_ids": ("num_embeddings", "embedding_dim", "padding_idx"),
    }
    expected = {
        path: [getattr(module.get_submodule(path), n) for n in of_it] for path, of_it in paths.items()
    }
    swap_embeddings(module, "ads", MAPPING, root=model)
    for path, of_it in paths.items():
        swapped = module.get_submodule(path)
        for one in (swapped, copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
            assert [getattr(one, n) for n in of_it] == expected[path]


def test_a_module_at_two_paths_is_one_afterwards(model: str, tables: Tables) -> None:
    """Tied embeddings stay tied."""
    module = torch.nn.Module()
    module.user_ids = module.again = torch.nn.Embedding(ROWS, 16)
    replaced = swap_embeddings(module, "ads", {"again": "user_ids"}, root=model)
    assert set(replaced) == {"user_ids", "again"} and module.user_ids is module.again


def test_modules_can_be_left_alone(model: str, tables: Tables) -> None:
    """A mapping of None."""
    module = Plain(tables)
    kept = module.user_ids
    assert set(swap_embeddings(module, "ads", {**MAPPING, "user_ids": None}, root=model)) == {
        "user_sum",
        "inner.page",
    }
    assert module.user_ids is kept


def test_all_that_does_not_fit_is_listed_and_nothing_is_replaced(model: str, tables: Tables) -> None:
    """Names, rows, dims, poolings and what cannot be honoured, in one error."""
    module = Plain(tables, padding_idx=0, max_norm=1.0)
    module.inner.page = torch.nn.EmbeddingBag(ROWS + 1, 25, mode="mean")
    module.other = torch.nn.Embedding(ROWS, 3)
    before = dict(module.named_modules())
    with pytest.raises(ModuleError) as error:
        swap_embeddings(module, "ads", {**MAPPING, "gone": "user_sum"}, root=model)
    for line in (
        "model 'ads' version 1 does not fit the module",
        "gone: no embedding module is there",
        "user_sum: max_norm 1.0 changes rows as they are read",
        "inner.page: feature 'page_sum' has rows 500 where the module has 501, dim 24 where the module has "
        "25, pooling sum where "
        "the module has mean",
        "other: looked for feature other, and for a table of other.weight: found none of these; name it in "
        "`mapping`",
    ):
        assert line in str(error.value)
    assert dict(module.named_modules()) == before


def test_a_mode_that_is_not_served_is_refused(model: str, tables: Tables) -> None:
    """max."""
    with pytest.raises(ModuleError, match="user_sum: mode 'max' is not served"):
        swap_embeddings(Plain(tables, mode="max"), "ads", MAPPING, root=model)


def test_what_holds_no_embeddings_is_said(model: str) -> None:
    """As well as an embedding that nothing holds."""
    with pytest.raises(ModuleError, match="Linear holds no embedding modules"):
        swap_embeddings(torch.nn.Linear(2, 2), "ads", root=model)
    with pytest.raises(ModuleError, match="Embedding itself cannot be replaced in place"):
        swap_embeddings(torch.nn.Embedding(2, 2), "ads", root=model)


def test_features_are_found_by_the_tensor_that_their_table_was_loaded_from(
    root: Path, tmp_path: Path
) -> None:
    """As in a model.toml that `tableside init` wrote, whose features have the tables' names. The pooling
    tells two apart."""
    np.savez(tmp_path / "c.npz", **{"towers.left.weight": np.eye(8, 4, dtype=np.float32)})
    raw = {
        "name": "keyed",
        "checkpoint": "c.npz",
        "tables": {"t": {"key": "towers.left.weight", "row_format": "fp32"}},
        "features": {"a": {"table": "t", "pooling": "sum"}, "b": {"table": "t", "pooling": "none"}},
    }
    load(parse_model(raw, tmp_path), root)
    module = torch.nn.Module()
    module.towers = torch.nn.ModuleDict({"left": torch.nn.EmbeddingBag(8, 4, mode="sum")})
    swap_embeddings(module, "keyed", root=str(root))
    assert module.towers["left"].bags.features == ("a",)
