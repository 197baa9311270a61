"""Embedding weights out of memory and back: the same bits as without, nothing lost on the way, and room while they are away."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tables
import torch
from tables import expected_of, table_of

from quant import Lookup, Pooling, RowFormat, choose
from quant.fused import Fused
from serving.stash import Restore, StashError, points, stash_embedding_weights

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
    """The next lookup, without a backward in between; each module's weights with all that were stashed with them."""
    model, before, restore = stashed()
    with torch.no_grad():
        model.bag(torch.zeros(1, 1, dtype=torch.long, device=device()))
    assert holds(model, before)
    restore()
    restore.free()
    assert holds(model, before)


def test_what_is_saved_or_loaded_while_away_comes_back() -> None:
    model, before, _ = stashed()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert holds(model, before)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert torch.equal(saved["bag.weight"].cpu(), before[0].cpu())
    stash_embedding_weights(model)
    model.load_state_dict(saved)
    assert holds(model, before)


def test_a_dense_part_that_fails_loses_nothing() -> None:
    model, before, _ = stashed()
    with pytest.raises(RuntimeError):
        model.layers[0](torch.zeros(1, 1, device=device()))
    with pytest.raises(StashError, match=r"weights of 2 modules .* are stashed already; restore them first"):
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
        with pytest.raises(StashError, match=r"256,000 bytes of embedding weights have no room on .*; the host's copy is whole"):
            restore()
    restore()
    assert holds(model, before)


def test_modules_without_embeddings_are_refused() -> None:
    with pytest.raises(StashError, match=r"Linear: no embedding weights; expected nn\.EmbeddingBag, nn\.Embedding or a module"):
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
    """Freed where the copy out is done; begun where what is left of the backward is as long as the copy back."""
    assert points([1, 1, 1, 1], [2, 2, 2, 2], 2.5) == (3, 1)
    assert points([1, 1, 1, 1], [2, 2, 2, 2], 0.0) == (0, 0)
    assert points([1, 1], [1, 1], 9.0) == (1, 1)


@pytest.mark.parametrize("restores", [False, True])
def test_tables_that_are_served_leave_and_come_back(restores: bool) -> None:
    """Their rows lie with the host: nothing is copied out; the next lookup finds them, asked for before or not."""
    backend = Fused(tables.DEVICE, choose())
    held = [table_of(RowFormat.INT8, 24), table_of(RowFormat.FP16, 36)]
    placed = [backend.hold(t, stashable=True) for t in held]
    plain = backend.hold(held[0])
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
    backend = Fused(tables.DEVICE, choose())
    table = table_of(RowFormat.FP32, 1024, rows=20_000)
    held = backend.hold(table, stashable=True)
    free = torch.cuda.mem_get_info()[0]
    assert torch.cuda.mem_get_info()[0] - free < backend.stash() + (4 << 20)
    assert torch.cuda.mem_get_info()[0] - free >= table.packed.size
    backend.restore()
    assert held.memory[0].is_taken
