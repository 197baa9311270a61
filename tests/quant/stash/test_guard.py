"""What reads weights that are away: copies and pickles raise with a sentence, methods bring the weights
back first."""

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import tables
import torch

from tableside.quant.stash.stash import StashError, registry, stash_embedding_weights

pytestmark = pytest.mark.gpu

ROWS, DIM = 50, 4
REFUSED = (
    r"weights of Embedding, 800 bytes, are stashed, and cannot be copied or pickled; call what "
    r"stash_embedding_weights"
)


def model() -> torch.nn.Module:
    """An embedding in a larger module."""
    torch.manual_seed(0)
    device = torch.device("cpu" if tables.DEVICE == "interpreter" else tables.DEVICE)
    return torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM), torch.nn.Linear(DIM, 2)).to(device)


def saved(it: Any) -> None:
    torch.save(it, io.BytesIO())


@pytest.mark.parametrize(
    "made", [copy.deepcopy, pickle.dumps, saved], ids=["deepcopy", "pickle", "torch.save"]
)
@pytest.mark.parametrize("of", [lambda m: m, lambda m: m[0], lambda m: m[0].weight, lambda m: [m[0].weight]])
def test_copies_and_pickles_are_refused_until_the_weights_are_back(
    made: Callable[..., Any], of: Callable[..., Any]
) -> None:
    """The model, its embedding, the weights: an error while they are away, or on their way; then a copy as
    ever."""
    held = model()
    before = held[0].weight.detach().clone()
    restore = stash_embedding_weights(held)
    with pytest.raises(StashError, match=REFUSED):
        made(of(held))
    restore.start()
    with pytest.raises(StashError, match=REFUSED):
        made(of(held))
    restore()
    made(of(held))
    assert torch.equal(copy.deepcopy(held)[0].weight, before)
    assert torch.equal(pickle.loads(pickle.dumps(held))[0].weight, before)
    assert (
        not held[0]._forward_pre_hooks
        and not {"__deepcopy__", "_apply", "_stash_guards"} & vars(held[0]).keys()
    )


def test_a_module_is_not_sent_to_another_process_either() -> None:
    """Through torch's queues, which do not ask a bare tensor."""
    held = model()
    restore = stash_embedding_weights(held)
    with pytest.raises(StashError, match=REFUSED):
        ForkingPickler.dumps(held)
    restore()
    ForkingPickler.dumps(held)


def test_an_optimizer_is_not_copied_either() -> None:
    """It has the weights by themselves, without their module."""
    held = model()
    optimizer = torch.optim.SGD(held.parameters(), lr=0.1)
    restore = stash_embedding_weights(held)
    with pytest.raises(StashError, match=REFUSED):
        copy.deepcopy(optimizer)
    restore()
    copy.deepcopy(optimizer)


@pytest.mark.parametrize("move", ["half", "share_memory"])
def test_what_converts_or_moves_a_module_brings_the_weights_back(move: str) -> None:
    """Also from the module around it."""
    held = model()
    before = held[0].weight.detach().clone()
    restore = stash_embedding_weights(held)
    getattr(held, move)()
    assert not restore.is_out
    assert torch.equal(held[0].weight, before.half() if move == "half" else before)


def test_two_stashes_in_one_module_are_guarded_each() -> None:
    """Its own weights, and those that it shares with another module; whichever comes back first."""
    for first_back in (0, 1):
        both = torch.nn.Module()
        tables_of_it = [torch.nn.Embedding(ROWS, DIM), torch.nn.Embedding(ROWS, DIM)]
        both.a, both.b = tables_of_it[0].weight, tables_of_it[1].weight
        restores = [stash_embedding_weights([table, both]) for table in tables_of_it]
        restores[first_back]()
        with pytest.raises(StashError, match=REFUSED):
            copy.deepcopy(both)
        restores[1 - first_back]()
        assert torch.equal(copy.deepcopy(both).b, both.b)
        assert not {"__deepcopy__", "_stash_guards"} & vars(both).keys()


class Fbgemm(torch.nn.Module):
    """FBGEMM's names, where its module cannot be made without a GPU: rows in weights_uvm, a cache of them
    on the device."""

    def __init__(self) -> None:
        super().__init__()
        device = torch.device("cpu" if tables.DEVICE == "interpreter" else tables.DEVICE)
        self.register_buffer("weights_dev", torch.empty(0, device=device))
        self.register_buffer("weights_uvm", torch.ones(100))
        self.register_buffer("lxu_cache_weights", torch.arange(32.0, device=device).view(8, 4))

    def cache(self) -> torch.Tensor:
        there = (
            self.lxu_cache_weights.untyped_storage().nbytes()
        )  # pytest would print, and so read, what an assertion names
        assert there == 128
        return self.lxu_cache_weights

    def flush(self) -> float:
        return float(self.cache().sum())

    def prefetch(self, row: int) -> float:
        return float(self.cache()[row].sum())

    split_embedding_weights = reset_cache_states = init_embedding_weights_uniform = flush


METHODS = ("flush", "split_embedding_weights", "reset_cache_states", "init_embedding_weights_uniform")


@pytest.mark.parametrize(
    ("method", "args", "found"), [("prefetch", (1,), 22.0), *((name, (), 496.0) for name in METHODS)]
)
def test_a_cache_of_uvm_weights_leaves_and_comes_back_as_it_was(
    method: str, args: tuple[int, ...], found: float
) -> None:
    """Before whatever reads it. Rows that only the cache has are not lost; the rows in host memory stay
    there."""
    module = Fbgemm()
    restore = stash_embedding_weights(module)
    assert restore.bytes == 128 and module.weights_uvm.untyped_storage().nbytes() == 400
    assert module.lxu_cache_weights.untyped_storage().nbytes() == 0
    assert getattr(module, method)(*args) == found
    assert not restore.is_out
    registry.close()
