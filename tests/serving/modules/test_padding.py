"""`padding_idx`: torch's vectors, bit for bit those of the bags without padding, in every form, backend
and program."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables as devices
import torch
from module_tables import ROWS

from campaigns.tracers import TRACERS
from tableside.torch import BadFeatureIds, Bags, EmbeddingBags, ModuleError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import KeyedJaggedTensor

Tables = dict[str, np.ndarray]
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::UserWarning",
    "ignore::FutureWarning",
    "ignore::torch.jit.TracerWarning",
)  # of torch's own
TOLERANCE = 40 * 200 * 2.0**-24  # as in test_embeddings.py
PADDING, POOLED = 7, {"user_sum": ("user", "sum"), "item_mean": ("item", "mean")}
LENGTHS = torch.tensor([3, 0, 5, 1, 0, 11])
OFFSETS = torch.tensor([0, 3, 3, 8, 9, 9])
ENDS = torch.cat([OFFSETS, torch.tensor([20])])


def ids_of(seed: int = 0) -> torch.Tensor:
    """20 ids, half of them padding: some at the ends of bags, and one bag of nothing else."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (20,), generator=generator)
    return torch.where(torch.rand(20, generator=generator) < 0.5, PADDING, ids).index_fill(
        0, torch.tensor([0, 8, 19]), PADDING
    )


def there(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if devices.DEVICE == "interpreter" else tensor.to(devices.DEVICE)


def of_torch(tables: Tables, name: str) -> torch.nn.EmbeddingBag:
    table, mode = POOLED[name]
    return torch.nn.EmbeddingBag.from_pretrained(
        torch.from_numpy(tables[table]), mode=mode, padding_idx=PADDING
    )


def by_hand(ids: torch.Tensor, weights: torch.Tensor | None = None) -> Bags:
    """The bags of `LENGTHS` without the padding."""
    bags = [bag[bag != PADDING] for bag in ids.split(LENGTHS.tolist())]
    return Bags(
        torch.cat(bags),
        None,
        torch.tensor([len(b) for b in bags]),
        None if weights is None else weights[ids != PADDING],
    )


def forms(ids: torch.Tensor, weights: torch.Tensor | None = None) -> list[Any]:
    return [(ids, OFFSETS, weights), (ids.int(), OFFSETS.int(), weights), Bags(ids, None, LENGTHS, weights)]


def padded(model: str, **options: Any) -> EmbeddingBags:
    return EmbeddingBags(
        "ads", list(POOLED), root=model, padding_idx=dict.fromkeys(POOLED, PADDING), **options
    )


@pytest.mark.parametrize("backend", ["native", "fbgemm"])
@pytest.mark.usefixtures("reading")
def test_vectors_are_those_of_torch_and_of_bags_without_padding(
    model: str, tables: Tables, backend: str
) -> None:
    """By offsets and lengths of both integer types, with and without weights."""
    plain, module = (
        EmbeddingBags("ads", list(POOLED), root=model, backend=backend),
        padded(model, backend=backend),
    )
    ids = ids_of()
    expected = plain(dict.fromkeys(POOLED, by_hand(ids)))
    for told in forms(ids):
        found = module(dict.fromkeys(POOLED, told))
        for name in POOLED:
            assert torch.equal(found[name], expected[name])
            torch.testing.assert_close(
                found[name], of_torch(tables, name)(ids, OFFSETS), rtol=0, atol=TOLERANCE
            )
    weights = torch.linspace(-1, 1, 20)
    expected = plain(dict.fromkeys(POOLED, by_hand(ids, weights)))
    for told in forms(ids, weights):
        found = module(dict.fromkeys(POOLED, told))
        assert all(torch.equal(found[name], expected[name]) for name in POOLED)
    of_it = of_torch(tables, "user_sum")(ids, OFFSETS, weights)
    torch.testing.assert_close(found["user_sum"], of_it, rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("reading")
def test_bags_of_a_tensor(model: str, tables: Tables) -> None:
    """[bags, n], weighted as well; no padding among them changes nothing."""
    module, ids, weights = padded(model), ids_of().view(5, 4), torch.linspace(0, 1, 20).view(5, 4)
    found, weighted = (
        module(dict.fromkeys(POOLED, ids)),
        module(dict.fromkeys(POOLED, Bags(ids, weights=weights))),
    )
    for name in POOLED:
        torch.testing.assert_close(found[name], of_torch(tables, name)(ids), rtol=0, atol=TOLERANCE)
    of_it = of_torch(tables, "user_sum")(ids, per_sample_weights=weights)
    torch.testing.assert_close(weighted["user_sum"], of_it, rtol=0, atol=TOLERANCE)
    none = dict.fromkeys(POOLED, torch.arange(100, 120).view(5, 4))
    found, plain = module(none), EmbeddingBags("ads", list(POOLED), root=model)(none)
    assert all(torch.equal(found[name], plain[name]) for name in POOLED)


@pytest.mark.parametrize("device", ["cpu", devices.DEVICE])
@pytest.mark.drawn(1)
def test_ids_of_all_features_in_one_tensor(model: str, device: str) -> None:
    """Packed, and as a KeyedJaggedTensor in another order; a feature without padding stands beside."""
    if device != "cpu":
        pytest.importorskip("triton")
    module = EmbeddingBags("ads", list(POOLED), root=model, padding_idx={"item_mean": PADDING}, device=device)
    move = there if device == devices.DEVICE else torch.Tensor.clone
    ids, more = ids_of(), ids_of(1)
    each = module({"user_sum": (move(ids), move(OFFSETS)), "item_mean": (move(more), move(OFFSETS))})
    expected = torch.cat([each["user_sum"], each["item_mean"]], 1)
    packed = module.packed(move(torch.cat([ids, more])), move(torch.cat([OFFSETS, ENDS + 20])))
    keyed = module(
        KeyedJaggedTensor(
            ["item_mean", "user_sum"], move(torch.cat([more, ids])), lengths=move(LENGTHS.repeat(2))
        )
    )
    assert torch.equal(packed, expected) and torch.equal(keyed.values(), expected)
    module.check()


@pytest.mark.parametrize("output", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(model: str, output: torch.dtype) -> None:
    """Though torch.cat of fp16 raises under it on the CPU."""
    module, told = padded(model, output=output), (ids_of().repeat(2), torch.cat([OFFSETS, ENDS + 20]))
    expected = module.packed(*told)
    with torch.autocast("cpu"):
        assert torch.equal(module.packed(*told), expected)
    assert expected.dtype is output


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["hbm", "cached"])
def test_a_gpu_leaves_padding_out(model: str, placement: str) -> None:
    """In every form, prefetched or not: as bags without it, bit for bit."""
    pytest.importorskip("triton")
    options: dict[str, Any] = {"device": devices.DEVICE, "placement": placement, "hbm_budget": 1 << 20}
    plain, module, ids = (
        EmbeddingBags("ads", list(POOLED), root=model, **options),
        padded(model, **options),
        ids_of(),
    )
    weights = torch.linspace(-1, 1, 20)
    for weighted in (None, weights):
        bags = by_hand(ids, weighted)
        moved = Bags(
            there(bags.values), None, there(bags.lengths), None if weighted is None else there(bags.weights)
        )
        expected = plain(dict.fromkeys(POOLED, moved))
        for one in forms(ids, weighted):
            tensors = [None if tensor is None else there(tensor) for tensor in one]
            told: Any = dict.fromkeys(POOLED, Bags(*tensors) if isinstance(one, Bags) else tuple(tensors))
            module.prefetch(told)
            found = module(told)
            assert all(torch.equal(found[name], expected[name]) for name in POOLED)
    module.check()


@pytest.mark.parametrize("name", TRACERS)
@pytest.mark.drawn(8)
def test_traced_programs_leave_padding_out(model: str, name: str) -> None:
    """For other ids than those they were traced with, among which more are padding."""

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = padded(model)

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            found = self.bags({"user_sum": ids.view(5, 4), "item_mean": Bags(ids, lengths=lengths)})
            packed = self.bags(
                KeyedJaggedTensor(list(POOLED), torch.cat([ids, ids]), lengths=torch.cat([lengths, lengths]))
            )
            return torch.cat([*(one.flatten() for one in found.values()), packed.values().flatten()])

    tower = Tower().eval()
    assert torch.equal(
        TRACERS[name](tower, (torch.arange(20), LENGTHS), (ids_of(), LENGTHS)), tower(ids_of(), LENGTHS)
    )


def test_a_wrong_id_has_its_place_among_all(model: str) -> None:
    """With the padding before it counted; wrong bags are refused as ever."""
    module, ids = padded(model), ids_of()
    ids[17] = ROWS
    for told in (*forms(ids), ids.view(5, 4)):
        with pytest.raises(BadFeatureIds, match="feature 'item_mean': id 500 at position 17") as error:
            module({"user_sum": (ids_of(), OFFSETS), "item_mean": told})
        assert error.value.position == 17
    with pytest.raises(BadFeatureIds, match="length -3 at position 1 is negative"):
        module(dict.fromkeys(POOLED, (ids_of(), torch.tensor([0, 8, 5]))))
    with pytest.raises(ModuleError, match="the first offset is 1; expected 0"):
        module(dict.fromkeys(POOLED, (ids_of(), torch.tensor([1, 8]))))
    with pytest.raises(ValueError, match="add up to 19, but there are 20 ids"):
        module.packed(ids_of(), torch.tensor([0, 8, 19]))
    with pytest.raises(ModuleError, match=r"weights are torch.float32 \[3\]; expected 20 floats"):
        module(dict.fromkeys(POOLED, (ids_of(), OFFSETS, torch.ones(3))))
    with pytest.raises(ModuleError, match="padding_idx names other; expected some of: user_sum"):
        EmbeddingBags("ads", ["user_sum"], root=model, padding_idx={"other": 1})


def test_programs_of_before_have_no_padding(model: str) -> None:
    """A call without the field is read."""
    from tableside.serving.modules.dispatch import call_of

    call = EmbeddingBags("ads", ["user_sum"], root=model)._call
    assert call_of(call.replace(', "padding": []', "")) == call_of(call)
    assert '"padding": [7, 7]' in padded(str(Path(model)))._call
