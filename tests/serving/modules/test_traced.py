"""Modules under all that looks at torch's operators: the vectors of an eager call for other ids than the
traced, or an error."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_tables import ROWS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from campaigns.tracers import TRACERS, Inputs
from tableside.torch import Bags, EmbeddingBags, Embeddings, ModuleError, swap_embeddings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrec.fx
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::UserWarning",
    "ignore::FutureWarning",
    "ignore::torch.jit.TracerWarning",
)  # of torch's own


class Whole(torch.nn.Module):
    """All forms of input: bags by offsets, by lengths, weighted, of a KeyedJaggedTensor and packed, and
    ids."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self.bags = EmbeddingBags("ads", ["user_sum", "item_mean"], root=root)
        self.ids = Embeddings("ads", ["user_ids"], root=root)

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        of_dict = self.bags({"user_sum": (ids, offsets, weights), "item_mean": Bags(ids, lengths=lengths)})
        twice, ends = (
            torch.cat([ids, ids]),
            torch.cat([offsets, offsets + 20, torch.full_like(offsets[:1], 40)]),
        )
        keyed = self.bags(
            KeyedJaggedTensor(["item_mean", "user_sum"], twice, lengths=torch.cat([lengths, lengths]))
        )
        fixed = self.bags({"user_sum": ids.view(5, 4), "item_mean": ids.view(5, 4)})
        vectors = self.ids({"user_ids": ids.view(5, 4)})["user_ids"]
        found = [*of_dict.values(), keyed.values(), self.bags.packed(twice, ends), *fixed.values(), vectors]
        return torch.cat([one.flatten() for one in found])


def inputs(seed: int) -> Inputs:
    """20 ids, in eight bags, with weights."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randint(0, 21, (8,), generator=generator).sort().values
    offsets[0] = 0
    lengths = torch.diff(offsets, append=torch.tensor([20]))
    return (
        torch.randint(0, ROWS, (20,), generator=generator),
        offsets,
        lengths,
        torch.rand(20, generator=generator),
    )


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", TRACERS)
def test_a_traced_call_is_the_eager_one(model: str, name: str) -> None:
    """For other ids, offsets and weights than those that it was traced with. Eager calls before let the
    kernel be found."""
    whole = Whole(model).eval()
    expected = [whole(*inputs(seed)) for seed in (1, 2, 3)][-1]
    assert torch.equal(TRACERS[name](whole, inputs(4), inputs(3)), expected)


@pytest.mark.parametrize("where", ["inside", "outside", "with real inputs"])
def test_fake_tensors_give_fake_vectors(model: str, where: str) -> None:
    """In their mode and outside of it, and real ids where a mode takes them: the shape and the dtype, and
    nothing is read."""
    whole = Whole(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = inputs(1) if where == "with real inputs" else tuple(map(mode.from_tensor, inputs(1)))
        found = whole(*given) if where != "outside" else None
    found = whole(*given) if found is None else found
    expected = whole(*inputs(1))
    assert isinstance(found, FakeTensor)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def forward_gradient(call: Callable[[torch.Tensor], torch.Tensor], weights: torch.Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(weights, weights))


GRADIENTS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "backward": lambda call, weights: call(weights.requires_grad_()),
    "forward": forward_gradient,
    "compiled": lambda call, weights: torch.compile(call, backend="aot_eager")(weights.requires_grad_()),
    "torch.func.grad": lambda call, weights: torch.func.grad(lambda w: call(w).sum())(weights),
    "torch.func.vjp": lambda call, weights: torch.func.vjp(call, weights),
    "torch.func.jvp": lambda call, weights: torch.func.jvp(call, (weights,), (weights,)),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("form", ["a dict", "packed"])
@pytest.mark.drawn(3)
def test_weights_that_want_a_gradient_are_refused(model: str, name: str, form: str) -> None:
    """In every way of asking for one: vectors would be constants in it."""
    bags = EmbeddingBags("ads", ["user_sum"], root=model)
    ids, ends = torch.arange(20), torch.tensor([0, 20])
    by_form: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "a dict": lambda w: bags({"user_sum": (ids, ends[:1], w)})["user_sum"],
        "packed": lambda w: bags.packed(ids, ends, w),
    }
    with pytest.raises(ModuleError, match="feature 'user_sum': weights require a gradient"):
        GRADIENTS[name](by_form[form], torch.rand(20))


def test_vmap_is_refused(model: str) -> None:
    """By torch: there is no rule for the operator."""
    ids = Embeddings("ads", ["user_ids"], root=model)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for tableside::look_up"):
        torch.vmap(lambda one: ids({"user_ids": one})["user_ids"])(torch.arange(20).view(4, 5))


@pytest.mark.drawn(0.5)
def test_sequences_of_a_keyed_jagged_tensor_are_not_traced(model: str) -> None:
    """Their sizes would be those of one call. torch.compile calls them between two graphs."""
    module = Embeddings("ads", ["user_ids", "item_ids"], root=model)

    def call(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module(KeyedJaggedTensor(["item_ids", "user_ids"], ids, lengths=lengths))[
            "user_ids"
        ].values()
        return found * 2

    ids, lengths = torch.arange(20), torch.tensor([3, 0, 7, 10])
    for traces in (torch.jit.trace, lambda call, given: TRACERS["make_fx"](call, given, given)):
        with pytest.raises(ModuleError, match="a KeyedJaggedTensor of user_ids, item_ids is not traced"):
            traces(call, (ids, lengths))
    torch.compiler.reset()
    assert torch.equal(torch.compile(call, backend="aot_eager")(ids, lengths), call(ids, lengths))


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, torchrec.fx.symbolic_trace])
def test_torch_fx_records_a_call(
    model: str, trace: Callable[[torch.nn.Module], torch.fx.GraphModule]
) -> None:
    """Modules and swapped ones are leaves, as those of torch.nn are; a copy of what was recorded too.
    Pickles are as ever."""

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            configs = [
                EmbeddingBagConfig(
                    name="user", embedding_dim=16, num_embeddings=ROWS, feature_names=["user_sum"]
                )
            ]
            self.ebc, self.user_ids = EmbeddingBagCollection(tables=configs), torch.nn.Embedding(ROWS, 16)
            self.bags = EmbeddingBags("ads", ["user_sum"], root=model)

        def forward(self, keyed: KeyedJaggedTensor, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            pooled = self.bags({"user_sum": Bags(ids, lengths=lengths)})["user_sum"]
            return self.ebc(keyed).values() + pooled + self.user_ids(ids[:4])

    tower = Tower()
    swap_embeddings(tower, "ads", root=model)
    ids, _, lengths, _ = inputs(1)
    given = (KeyedJaggedTensor(["user_sum"], ids, lengths=lengths[:4] * 0 + 5), ids, lengths[:4] * 0 + 5)
    recorded = trace(tower)
    assert [node.target for node in recorded.graph.nodes if node.op == "call_module"] == [
        "bags",
        "ebc",
        "user_ids",
    ]
    for one in (recorded, copy.deepcopy(recorded)):
        assert torch.equal(one(*given), tower(*given))
    assert isinstance(pickle.loads(pickle.dumps(tower.bags)), EmbeddingBags)
