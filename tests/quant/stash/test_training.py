"""Stashing in every step by hooks: the same bits as without, points that are found by themselves, and
nothing left behind."""

from typing import Any

import numpy as np
import pytest
import tables
import torch

from tableside.quant.stash.stash import StashError, registry
from tableside.quant.stash.training import StashPoints, StepTimes, TrainingStash, _points_of
from tableside.quant.stash.transfers import Transfer

pytestmark = pytest.mark.gpu

ROWS, DIM = 500, 16


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.sequence = torch.nn.Embedding(ROWS, DIM)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2 * DIM, 2 * DIM) for _ in range(3))
        self.to("cpu" if tables.DEVICE == "interpreter" else tables.DEVICE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([self.bag(ids), self.sequence(ids).sum(1)], 1)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return hidden.square().mean()

    def away(self) -> int:
        return sum(m.weight.untyped_storage().nbytes() == 0 for m in (self.bag, self.sequence))


def train(
    stashes: bool, with_layers: bool = True, steps: int = 6, **options: Any
) -> tuple[list[float], Model, TrainingStash | None, list[int]]:
    """Losses, the model, and how many weights were away before each step's backward."""
    model = Model()
    layers = model.layers if with_layers else ()
    stashing = TrainingStash(model, layers, timeout_s=60.0, **options) if stashes else None
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    generator, losses, away = torch.Generator().manual_seed(1), [], []
    for _ in range(steps):
        loss = model(torch.randint(0, ROWS, (32, 5), generator=generator).to(model.bag.weight.device))
        away.append(model.away())
        optimizer.zero_grad()
        loss.backward()
        assert model.away() == 0
        optimizer.step()
        losses.append(loss.item())
    return losses, model, stashing, away


@pytest.mark.parametrize("with_layers", [True, False], ids=["layers", "no layers"])
def test_every_step_stashes_and_the_bits_are_the_same(with_layers: bool) -> None:
    """Three watched steps and three at the points that were found; both weights are away before each
    backward."""
    wanted, plain, _, _ = train(False)
    losses, model, stashing, away = train(True, with_layers)
    assert losses == wanted and away == [2] * 6
    assert stashing is not None and stashing.points is not None
    assert (stashing.points.free_at is None, stashing.points.start_at is None) == (
        not with_layers,
        not with_layers,
    )
    assert stashing.points.needed_by == "the gradient of Embedding 1"
    stashing.remove()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_the_largest_weights_that_fit_are_stashed() -> None:
    """Both tables are as large: room for one takes one, and the bits are the same."""
    wanted, _, _, _ = train(False)
    losses, model, stashing, away = train(True, most_bytes=2 * ROWS * DIM * 4 - 1)
    assert losses == wanted and away == [1] * 6 and stashing is not None
    stashing.remove()
    for limit in ("3200", [1], float("nan")):
        with pytest.raises(StashError, match='expected a number of bytes, None or "auto"'):
            TrainingStash(model, most_bytes=limit)  # type: ignore[arg-type]
    TrainingStash(model, most_bytes=np.int64(1 << 20)).remove()
    said = f"no weights of 31,999 bytes or less; the smallest are {ROWS * DIM * 4:,}; raise most_bytes"
    with pytest.raises(StashError, match=said):
        TrainingStash(model, most_bytes=ROWS * DIM * 4 - 1)


@pytest.mark.parametrize(("share", "taken"), [(1.0, 2), (0.6, 1), (0.4, 0)])
def test_auto_takes_what_the_layers_hide(monkeypatch: pytest.MonkeyPatch, share: float, taken: int) -> None:
    """All weights in the watched steps, then those whose copies end in time."""
    wanted, _, _, _ = train(False)
    found = StashPoints(2, 0, 0.0, 0.0, "", share)
    monkeypatch.setattr("tableside.quant.stash.training._points_of", lambda _: found)
    registry.close()  # other tests' copies
    losses, model, stashing, away = train(True, most_bytes="auto")
    assert losses == wanted and away == [2] * 3 + [taken] * 3 and stashing is not None
    assert registry.counts().host_bytes == taken * ROWS * DIM * 4
    stashing.remove()
    for module in (model.bag, model.sequence):  # nothing is left of lookups that stash no more, either
        assert not module._forward_pre_hooks and not module._state_dict_pre_hooks
        assert "__deepcopy__" not in vars(module)


def test_auto_needs_layers() -> None:
    with pytest.raises(StashError, match='most_bytes="auto" needs `layers`'):
        TrainingStash(Model(), most_bytes="auto")


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (({0: 1, 1: 5, 2: 9}, {0: 1, 1: 5, 2: 9}), 1.0),
        (({0: 1, 1: 2}, {0: 1, 1: 8}), 0.5),  # half of the copy out is done when the last layer begins
        (
            ({0: 1, 1: 8}, {0: 1, 1: 2.2}),
            0.5,
        ),  # a half, and a tenth more, comes back after the first gradient
        (({}, {}), 0.0),
    ],
)
def test_the_share_that_is_hidden(step: tuple[Any, Any], share: float) -> None:
    assert _points_of([times(*step)]).share == pytest.approx(share)


def test_restores_start_at_the_gradient_of_the_layer_that_was_found() -> None:
    """And not before: at the layer after it in the backward they are on their way, at the one before it
    they are away."""
    _, model, stashing, _ = train(True)
    assert stashing is not None
    stashing.points = StashPoints(2, 1, 0.0, 0.0, "", 1.0)
    found: dict[str, int] = {}
    for n, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, n=n: found.update({f"forward {n}": model.away()}))
        layer.register_forward_hook(
            lambda _m, _i, out, n=n: (
                out.register_hook(lambda _: found.update({f"backward {n}": model.away()})),
                None,
            )[1]
        )
    model(torch.zeros(2, 2, dtype=torch.long, device=model.bag.weight.device)).backward()
    assert found == {
        "forward 0": 0,
        "forward 1": 0,
        "forward 2": 0,
        "backward 2": 2,
        "backward 1": 0,
        "backward 0": 0,
    }
    stashing.remove()


def test_passes_without_gradients_stash_nothing_and_removing_ends_it() -> None:
    model = Model()
    stashing = TrainingStash(model)
    ids, before = (
        torch.zeros(2, 2, dtype=torch.long, device=model.bag.weight.device),
        registry.counts().stashes,
    )
    with torch.no_grad():
        model(ids)
    assert registry.counts().stashes == before
    model(ids)
    assert model.away() == 2
    stashing.remove()
    assert model.away() == 0 and not model.bag._forward_hooks and not model.bag._forward_pre_hooks
    model(ids)
    assert model.away() == 0


def times(
    forward: dict[int, float], backward: dict[int, float], out: float = 4.0, back: float = 4.0
) -> StepTimes:
    return StepTimes(forward, backward, out, back, "it")


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([times({0: 1, 1: 5, 2: 9}, {0: 1, 1: 5, 2: 9})], (1, 1)),
        ([times({0: 1, 1: 5, 2: 9}, {0: 1, 1: 4.3, 2: 9})], (1, 2)),  # less than 1.1 copies
        (
            [times({0: 1, 1: 5, 2: 9}, {0: 1, 1: 5, 2: 9}), times({0: 1, 1: 3, 2: 6}, {0: 1, 1: 3, 2: 6})],
            (2, 2),
        ),  # the worst step
        ([times({0: 1, 1: 2}, {0: 1, 1: 2})], (1, 1)),  # too short: the last layer, the first gradient
        (
            [times({0: 5, 1: 9}, {}), times({0: 5}, {0: 9})],
            (0, None),
        ),  # of a layer that does not run in every step: nothing
        ([times({}, {})], (None, None)),
    ],
)
def test_points_by_the_times_of_steps(steps: list[StepTimes], found: tuple[Any, Any]) -> None:
    """Freed by the first layer after the copies out; started by the last gradient that leaves a copy's
    time and a tenth."""
    points = _points_of(steps)
    assert (points.free_at, points.start_at) == found


@pytest.mark.parametrize(("steps", "away"), [(2, 0), (0, 1)], ids=["the step before", "this step"])
def test_a_copy_that_does_not_end_is_an_error_at_a_later_lookup(
    monkeypatch: pytest.MonkeyPatch, steps: int, away: int
) -> None:
    """Of the step before at the first lookup, when nothing is away yet; of this step at its second one."""
    _, model, stashing, _ = train(True, steps=steps)
    assert stashing is not None
    monkeypatch.setattr(Transfer, "is_done", lambda _: False)
    monkeypatch.setattr(stashing, "_timeout_s", 0.0)
    with pytest.raises(
        StashError,
        match=r"bytes of embedding weights were to be copied out .* ago and still are not; expected at most",
    ):
        model(torch.zeros(2, 2, dtype=torch.long, device=model.bag.weight.device))
    assert model.away() == away


def test_a_model_without_embeddings_is_refused() -> None:
    with pytest.raises(
        StashError,
        match=r"Linear has no embeddings; expected embedding modules or TorchRec's sharded collections",
    ):
        TrainingStash(torch.nn.Linear(2, 2))
