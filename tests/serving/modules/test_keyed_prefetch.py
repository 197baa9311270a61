"""`prefetch` with a KeyedJaggedTensor: the call that comes next takes the rows that were brought, on a GPU
(--device)."""

import warnings
from typing import Any

import numpy as np
import pytest
import tables as devices
import torch
from module_tables import ROWS

from tableside.torch import EmbeddingBags, Embeddings, ModuleError, swap_embeddings

pytest.importorskip("triton")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        KeyedJaggedTensor,
    )

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # torch's
TOLERANCE = 40 * 200 * 2.0**-24  # as in test_embeddings.py
POOLED, BARE = ["user_sum", "item_mean"], ["user_ids", "item_ids"]


def told(keys: list[str], device: str, weighted: bool = False, seed: int = 0) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (len(keys) * 5,), generator=generator, dtype=torch.int32)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.numel(), generator=generator) if weighted else None
    found = KeyedJaggedTensor(keys, values, weights, lengths=lengths)
    return found if device in ("cpu", "interpreter") else found.to(torch.device(device))


def ticketed(module: EmbeddingBags | Embeddings) -> list[bool]:
    """Notes, for each call from now on, whether it takes what was brought for it."""
    (lookup,) = (found for key, found in module._published.now().lookups.items() if key == module._call)
    take, notes = lookup._begin, []

    def noted(given: Any) -> Any:
        ready = take(given)
        if given:
            notes.append(ready is not None and ready.ticket is not None)
        return ready

    lookup._begin = noted
    return notes


def vectors_of(found: Any) -> list[torch.Tensor]:
    return [found.values()] if hasattr(found, "key_dim") else [one.values() for one in found.values()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "features", "weighted"), [(EmbeddingBags, POOLED, True), (Embeddings, BARE, False)]
)
def test_a_call_takes_what_was_prefetched(
    model: str, kind: type[Any], features: list[str], weighted: bool
) -> None:
    """For the same KeyedJaggedTensor, its keys in another order and among others; for another one it does
    without."""
    module = kind("ads", features, root=model, device=devices.DEVICE, placement="cached", hbm_budget=1 << 20)
    keys = [features[1], "other", features[0]]
    calls = [told(keys, devices.DEVICE, weighted, seed) for seed in range(2)]
    expected = [
        vectors_of(kind("ads", features, root=model)(told(keys, "cpu", weighted, seed))) for seed in range(2)
    ]
    module(calls[0])
    notes = ticketed(module)
    for ahead, call in ((0, 0), (0, 1)):
        module.prefetch(calls[ahead])
        for found, before in zip(vectors_of(module(calls[call])), expected[call], strict=True):
            torch.testing.assert_close(found.cpu(), before, rtol=0, atol=TOLERANCE)
    assert notes == [True, False]
    module.check()


def test_on_the_cpu_there_is_nothing_to_do(model: str) -> None:
    """The keys are looked at, and that is all."""
    module = EmbeddingBags("ads", POOLED, root=model)
    module.prefetch(told(POOLED, "cpu"))
    assert module._published.now().lookups == {}
    with pytest.raises(ModuleError, match="the KeyedJaggedTensor lacks item_mean; it has: user_sum"):
        module.prefetch(told(POOLED[:1], "cpu"))


@pytest.mark.thorough
def test_swapped_collections_prefetch(model: str, tables: dict[str, np.ndarray]) -> None:
    """By the features' own names, and without weights where the collection has none."""
    holder = torch.nn.Module()
    bags = [EmbeddingBagConfig(name="users", embedding_dim=16, num_embeddings=ROWS, feature_names=["u", "v"])]
    bare = [EmbeddingConfig(name="things", embedding_dim=8, num_embeddings=ROWS, feature_names=["w"])]
    holder.ebc, holder.ec = EmbeddingBagCollection(tables=bags), EmbeddingCollection(tables=bare)
    mapping = {"ebc": {"u": "user_sum", "v": "user_sum"}, "ec": {"w": "item_ids"}}
    options: dict[str, Any] = {"device": devices.DEVICE, "placement": "cached", "hbm_budget": 1 << 20}
    swap_embeddings(holder, "ads", mapping, root=model, **options)
    for swapped, module in ((holder.ebc, holder.ebc.bags), (holder.ec, holder.ec.embeddings)):
        call = told(["w", "v", "u"], devices.DEVICE, weighted=True)
        swapped(call)
        notes = ticketed(module)
        swapped.prefetch(call)
        swapped(call)
        assert notes == [True]
