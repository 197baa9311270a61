"""Embedding weights out of memory and back: the same bits as without, nothing lost on the way, and room
while they are away."""

import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tables
import torch
from tables import expected_of, table_of
from torch.optim.optimizer import _global_optimizer_pre_hooks

from tableside.quant import Lookup, Pooling, RowFormat, choose
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.stash.stash import Restore, StashError, points, registry, stash_embedding_weights

pytestmark = pytest.mark.gpu

ROWS, DIM = 2000, 64


def device() -> torch.device:
    return torch.device("cpu" if tables.DEVICE == "interpreter" else tables.DEVICE)


class Model(torch.nn.Module):
    """A bag, a sequence and a dense part of three layers; `stash` is called between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.sequence = torch.nn.Embedding(ROWS // 2, DIM)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2 * DIM, 2 * DIM) for _ in range(3))
        self.to(device())

    def forward(self, ids: torch.Tensor, stash: Callable[..., Any] | None = None) -> torch.Tensor:
        pooled, looked_up = self.bag(ids), self.sequence(ids % (ROWS // 2))
        hidden = [torch.cat([pooled, looked_up.sum(1)], 1)]
        if stash is not None:
            stash(self, (pooled, looked_up), hidden)
        for layer in self.layers:
            hidden.append(torch.relu(layer(hidden[-1])))
        return hidden[-1].square().mean()

    def sizes(self) -> list[int]:
        """Bytes of the embeddings' storages."""
        return [e.weight.untyped_storage().nbytes() for e in (self.bag, self.sequence)]


FULL = [4 * ROWS * DIM, 2 * ROWS * DIM]
seen: list[list[int]] = []


def at_once(model: Model, outputs: tuple[torch.Tensor, ...], _: Any) -> None:
    restore = stash_embedding_weights([model.bag, model.sequence])
    for output in outputs:
        output.register_hook(restore)
    seen.append(model.sizes())


def at_points(model: Model, outputs: tuple[torch.Tensor, ...], _: Any) -> None:
    restore = stash_embedding_weights(model, frees=False)
    restore.free_at(model.layers[0], model.layers[2])
    model.layers[1].register_forward_hook(lambda _m, _i, out: restore.start_at(out))
    restore.wait_at(*outputs)
    seen.append(model.sizes())


def in_part(model: Model, outputs: tuple[torch.Tensor, ...], _: Any) -> None:
    restore = stash_embedding_weights(model, most_bytes=FULL[1])
    assert restore.bytes == FULL[1]
    restore.wait_at(*outputs)
    seen.append(model.sizes())


def train(stash: Callable[..., Any] | None, steps: int = 4) -> tuple[list[float], list[torch.Tensor]]:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        ids = torch.randint(0, ROWS, (32, 5), generator=generator).to(device())
        loss = model(ids, stash)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert model.sizes() == FULL
    return losses, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(
    ("stash", "while_away"),
    [(at_once, [0, 0]), (at_points, FULL), (in_part, [FULL[0], 0])],
    ids=["at once", "at points", "in part"],
)
def test_training_gives_the_same_bits(stash: Callable[..., Any], while_away: list[int]) -> None:
    """Four steps with an optimizer that has a state: losses and weights as without stashing."""
    seen.clear()
    losses, weights = train(stash)
    wanted_losses, wanted = train(None)
    assert losses == wanted_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))
    assert seen == [while_away] * 4


def test_memory_is_freed_in_shares_at_the_points() -> None:
    model = Model()
    found: list[list[int]] = []

    def stash(model: Model, outputs: Any, hidden: Any) -> None:
        restore = stash_embedding_weights(model, frees=False)
        restore.free_at(model.layers[0], model.layers[2])
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: found.append(model.sizes()))

    model(torch.zeros(1, 2, dtype=torch.long, device=device()), stash)
    assert found == [[0, FULL[1]], [0, FULL[1]], [0, 0]]


def stashed() -> tuple[Model, list[torch.Tensor], Restore]:
    model = Model()
    before = [model.bag.weight.detach().clone(), model.sequence.weight.detach().clone()]
    return model, before, stash_embedding_weights(model)


def holds(model: Model, before: list[torch.Tensor]) -> bool:
    return torch.equal(model.bag.weight, before[0]) and torch.equal(model.sequence.weight, before[1])


def test_what_is_called_while_away_comes_back() -> None:
    """The next lookup, without a backward in between; each module's weights with all that were stashed
    with them."""
    model, before, restore = stashed()
    with torch.no_grad():
        model.bag(torch.zeros(1, 1, dtype=torch.long, device=device()))
    assert holds(model, before)
    restore()
    restore.free()
    assert holds(model, before)


def is_back(model: Model) -> None:
    assert model.sizes() == FULL, "the weights are away"


def test_what_is_saved_or_loaded_while_away_comes_back() -> None:
    """Before anything reads or writes them: memory that is away is no memory."""
    model, before, _ = stashed()
    file = io.BytesIO()
    state = model.state_dict()
    assert model.sizes() == FULL
    torch.save(state, file)
    assert holds(model, before)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert torch.equal(saved["bag.weight"].cpu(), before[0].cpu())
    stash_embedding_weights(model)
    model.bag.register_load_state_dict_pre_hook(lambda *_: is_back(model))
    model.load_state_dict(saved)
    assert holds(model, before)


def test_a_dense_part_that_fails_loses_nothing() -> None:
    model, before, _ = stashed()
    with pytest.raises(RuntimeError):
        model.layers[0](torch.zeros(1, 1, device=device()))
    with pytest.raises(StashError, match=r"weights of EmbeddingBag are stashed already; restore them first"):
        stash_embedding_weights(model)
    model(torch.zeros(1, 2, dtype=torch.long, device=device()))
    assert holds(model, before)
    stash_embedding_weights(model)()
    assert holds(model, before)


def test_no_room_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's copy stays until there is; the second try finds it."""
    model, before, restore = stashed()
    resize = torch.UntypedStorage.resize_

    def full(storage: torch.UntypedStorage, size: int) -> None:
        if size == FULL[1]:
            raise torch.OutOfMemoryError("out of memory")
        resize(storage, size)

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(
            StashError,
            match=r"768,000 bytes of embedding weights have no room on .*; the host's copy is whole",
        ):
            restore()
        assert model.sizes() == [0, 0]
    restore()
    assert holds(model, before)


@pytest.mark.sanitized_gpu
def test_two_batches_before_either_backward() -> None:
    """The hook of the first batch's stash finds the weights away with the second's, and brings those back."""
    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(10, 4).to(device())
    sizes: list[int] = []
    losses = []
    for _ in range(2):
        out = bag(torch.zeros(1, 1, dtype=torch.long, device=device()))
        restore = stash_embedding_weights(bag)
        out.register_hook(restore)
        out.register_hook(lambda _: sizes.append(bag.weight.untyped_storage().nbytes()))
        losses.append(out.sum())
    before = sizes.copy()
    for loss in losses:
        loss.backward()
    assert (before, sizes) == ([], [160, 160])
    restore()
    assert bag.weight.isfinite().all()


def test_modules_that_share_weights_bring_them_back() -> None:
    """Whichever of them is called; one copy of what they share."""
    torch.manual_seed(0)
    first, second = torch.nn.Embedding(10, 4).to(device()), torch.nn.Linear(4, 10, bias=False).to(device())
    second.weight = first.weight
    before = first.weight.detach().clone()
    both = torch.nn.ModuleList([first, second])
    assert stash_embedding_weights(both).bytes == 160
    second(torch.zeros(1, 4, device=device()))
    assert torch.equal(first.weight, before)
    assert stash_embedding_weights(both).bytes == 160
    both.state_dict()
    assert torch.equal(first.weight, before)


def test_an_optimizer_finds_what_it_changes() -> None:
    """Gradients of a batch before, while the weights of this one are away and nothing brought them back."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.zeros(1, 2, dtype=torch.long, device=device())).backward()
    stash_embedding_weights(model)
    optimizer.register_step_pre_hook(
        lambda *_: is_back(model)
    )  # after the registry's, which is one of all optimizers
    optimizer.step()
    assert model.sizes() == FULL
    assert model.bag.weight.isfinite().all()


def test_hooks_of_others_stay_in_order() -> None:
    """Of two hooks before state_dict both run, each once, though the first of them is ours."""
    model, before, _ = stashed()
    calls: list[int] = []
    model.bag.register_state_dict_pre_hook(lambda *_: calls.append(1))
    model.state_dict()
    assert calls == [1] and holds(model, before)


def test_a_model_that_is_dropped_while_stashed_is_let_go() -> None:
    model, _, restore = stashed()
    gone = weakref.ref(model.bag)
    del model, restore
    gc.collect()
    assert gone() is None


def test_the_host_copy_is_a_plain_one() -> None:
    """Made under inference mode and another default device, it serves outside them."""
    other = Model()
    before = [other.bag.weight.detach().clone(), other.sequence.weight.detach().clone()]
    with torch.inference_mode(), torch.device("meta"):
        stash_embedding_weights(other)()
    stash_embedding_weights(other)()
    assert holds(other, before)


def test_memory_of_others_is_not_freed() -> None:
    """numpy's, or a part of a larger storage."""
    whole = torch.zeros(20, 4)
    bag = torch.nn.EmbeddingBag.from_pretrained(whole[:10])
    with pytest.raises(StashError, match=r"320 bytes, are a part of a larger storage"):
        stash_embedding_weights(bag)
    bag = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(np.zeros((10, 4), np.float32)))
    with pytest.raises(StashError, match=r"160 bytes, lie in memory that torch did not allocate"):
        stash_embedding_weights([Model(), bag])
    with pytest.raises(StashError, match=r"no weights of 100 bytes or less; the smallest are 256,000"):
        stash_embedding_weights(Model().sequence, most_bytes=100)


def test_closing_the_registry_brings_all_back_and_ends_the_watch() -> None:
    """Weights, hooks of modules and the hook of all optimizers; stashing again begins anew."""
    module = torch.nn.EmbeddingBag(50, 4, device=device())
    wanted = module.weight.detach().clone()
    for _ in range(2):
        restore = stash_embedding_weights(module)
        assert restore.is_out and _global_optimizer_pre_hooks
        registry.close()
        assert not restore.is_out and not _global_optimizer_pre_hooks and not module._forward_pre_hooks
        torch.testing.assert_close(module.weight.detach(), wanted, rtol=0, atol=0)
    registry.close()


def test_modules_without_embeddings_are_refused() -> None:
    with pytest.raises(
        StashError,
        match=r"Linear: no embedding weights; expected nn\.EmbeddingBag, nn\.Embedding or a module",
    ):
        stash_embedding_weights(torch.nn.Linear(2, 2))


def test_weights_of_fbgemm_modules_are_found() -> None:
    class Tbe(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights_dev", torch.arange(100, dtype=torch.uint8, device=device()))

    module = Tbe()
    restore = stash_embedding_weights([module])
    assert module.weights_dev.untyped_storage().nbytes() == 0
    restore()
    assert torch.equal(module.weights_dev.cpu(), torch.arange(100, dtype=torch.uint8))


def test_points_by_measured_times() -> None:
    """Freed where the copy out is done; begun where what is left of the backward is as long as the copy
    back."""
    assert points([1, 1, 1, 1], [2, 2, 2, 2], 2.5) == (3, 1)
    assert points([1, 1, 1, 1], [2, 2, 2, 2], 0.0) == (0, 0)
    assert points([1, 1], [1, 1], 9.0) == (1, 1)


@pytest.mark.sanitized_gpu
@pytest.mark.parametrize("restores", [False, True])
def test_tables_that_are_served_leave_and_come_back(restores: bool) -> None:
    """Their rows lie with the host: nothing is copied out; the next lookup finds them, asked for before or
    not."""
    backend = GpuBackend(tables.DEVICE, choose())
    held = [table_of(RowFormat.INT8, 24), table_of(RowFormat.FP16, 36)]
    placed = [backend.place("hbm", t, stashable=True) for t in held]
    plain = backend.place("hbm", held[0])
    size = sum(t.packed.size for t in held)
    assert backend.stash() == size
    assert backend.stash() == 0
    ids = np.array([3, 199, 0, 3])
    for _ in range(2):
        if restores:
            backend.restore()
        for table, on_device in zip(held, placed, strict=True):
            out = np.empty(4 * ids.size * table.dim, np.uint8)
            backend.plan([Lookup(on_device, Pooling.NONE, 0, ids.size, 0)]).run(ids.tobytes(), out)
            np.testing.assert_array_equal(out.view(np.float32).reshape(ids.size, -1), expected_of(table, ids))
        assert backend.stash() == size
    np.testing.assert_array_equal(backend.lookup(plain, ids, pooling=Pooling.NONE), expected_of(held[0], ids))


@pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="needs a GPU's memory")
def test_the_room_is_there() -> None:
    """What the allocator and the driver count while weights and tables are away."""
    big = torch.nn.EmbeddingBag(1 << 20, 64, device=device())
    before = torch.cuda.memory_allocated()
    restore = stash_embedding_weights(big)
    torch.cuda.synchronize()
    assert before - torch.cuda.memory_allocated() == 256 << 20
    restore()
    assert torch.cuda.memory_allocated() == before
    backend = GpuBackend(tables.DEVICE, choose())
    table = table_of(RowFormat.FP32, 1024, rows=20_000)
    held = backend.place("hbm", table, stashable=True)
    free = torch.cuda.mem_get_info()[0]
    assert backend.stash() == table.packed.size
    assert table.packed.size <= torch.cuda.mem_get_info()[0] - free < table.packed.size + (4 << 20)
    backend.restore()
    assert held.residence.is_whole and not backend.launcher.stashable.away
