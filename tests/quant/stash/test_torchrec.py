"""Stashing with real TorchRec: sharded collections of two ranks, their pipeline, saving, and what is refused.

TorchRec is installed apart (`pip install --no-deps torchrec`); without it these tests are skipped.
"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from tableside.quant.stash.stash import StashError, embedding_weights, registry, stash_embedding_weights
from tableside.quant.stash.training import TrainingStash

pytest.importorskip("torchrec", reason="needs TorchRec")
from torchrec_ranks import batches, run_ranks, sharded, tables_of  # which imports TorchRec

STEPS = 6


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Of what is not updated by FBGEMM's backward: the dense part and data-parallel tables."""
    fused = {id(p) for p in model.fused_optimizer.params.values()}
    names = set(model.fused_optimizer.params)
    return torch.optim.Adagrad(
        [p for n, p in model.named_parameters() if n not in names and id(p) not in fused and p.numel()],
        lr=0.01,
    )


def storages_of(model: Any) -> list[torch.UntypedStorage]:
    """What holds FBGEMM's weights, by its own views of them. To be asked while they are there."""
    return list({s._cdata: s for s in (w.untyped_storage() for w in tables_of(model))}.values())


def trained(rank: int, stashes: bool, dense: str, pipelined: bool = False) -> dict[str, Any]:
    """A few steps: losses, weights, and bytes of weights before each backward and after it (without a
    pipeline)."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model = sharded(dense)
    storages = storages_of(model)
    stashing = TrainingStash(model, model.module.layers, timeout_s=60.0) if stashes else None
    optimizer, losses, found = optimizer_of(model), [], []
    if pipelined:
        pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), execute_all_batches=True)
        data = iter(batches(rank, STEPS))
        before = registry.counts().stashes
        losses = [float(pipeline.progress(data).square().sum()) for _ in range(STEPS)]
        found = [registry.counts().stashes - before]
    for batch in () if pipelined else batches(rank, STEPS):
        loss, _ = model(batch)
        before = [s.nbytes() for s in storages]
        optimizer.zero_grad()
        loss.backward()
        found.append((before, [s.nbytes() for s in storages]))
        optimizer.step()
        losses.append(loss.item())
    result = {"losses": losses, "found": found, "lookups": [] if stashing is None else list(stashing.lookups)}
    if stashing is not None:
        result["points"] = stashing.points
        stashing.remove()
    return result | {"weights": [w.clone() for w in tables_of(model)]}


def with_and_without(rank: int, kinds: list[tuple[str, bool]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(trained(rank, False, *kind), trained(rank, True, *kind)) for kind in kinds]


KINDS = {"ddp": ("ddp", False), "fsdp": ("fsdp", False), "pipeline": ("ddp", True)}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """What each rank found, without stashing and with it, for each kind of training."""
    by_rank = run_ranks(with_and_without, list(KINDS.values()))
    return {kind: [rank[n] for rank in by_rank] for n, kind in enumerate(KINDS)}


@pytest.mark.thorough
def test_shards_of_a_host_and_of_a_grid_are_stashed() -> None:
    """Table-row-wise bags on either of two hosts, and a grid over both; four ranks."""
    for ((plain, stashed),) in run_ranks(with_and_without, [KINDS["ddp"]], hosts=2):
        full = plain["found"][0][0]
        assert stashed["losses"] == plain["losses"] and len(full) >= 4
        assert all(torch.equal(a, b) for a, b in zip(stashed["weights"], plain["weights"], strict=True))
        assert stashed["found"] == [([0] * len(full), full)] * STEPS


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_training_gives_the_same_bits(runs: Any, kind: str) -> None:
    """Table-, row- and column-wise and data-parallel bags, table- and row-wise sequences, Adagrad inside
    FBGEMM; two ranks.

    The dense part behind DDP and FSDP2; torch's loop, and TorchRec's pipeline, whose input distribution runs
    ahead.
    """
    for plain, stashed in runs[kind]:
        assert stashed["losses"] == plain["losses"]
        assert len(stashed["weights"]) >= 5
        assert all(torch.equal(a, b) for a, b in zip(stashed["weights"], plain["weights"], strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_weights_of_all_lookups_are_away_between_forward_and_backward(runs: Any, kind: str) -> None:
    """In each step, watched or at its points; and in their place after the backward."""
    for plain, stashed in runs[kind]:
        full = plain["found"][0][0]
        assert sum(full) > 0
        assert stashed["found"] == [([0] * len(full), full)] * STEPS


@pytest.mark.thorough
def test_the_points_are_found_and_what_needed_the_weights_first(runs: Any) -> None:
    """A lookup's output had its gradient; on each rank the lookups that have a shard there."""
    for _, stashed in runs["ddp"]:
        points = stashed["points"]
        assert points.free_at in range(3) and points.start_at in range(3)
        assert points.needed_by.removeprefix("the gradient of ") in stashed["lookups"]
    lookups = [{name.split()[0] for name in stashed["lookups"]} for _, stashed in runs["ddp"]]
    assert lookups == [{"ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"}] * 2
    assert [len(stashed["lookups"]) for _, stashed in runs["ddp"]] == [5, 5]


@pytest.mark.thorough
def test_a_pipeline_stashes_each_lookup_of_each_batch(runs: Any) -> None:
    for _, stashed in runs["pipeline"]:
        assert stashed["found"] == [STEPS * len(stashed["lookups"])]


def away(rank: int) -> dict[str, Any]:
    """What happens to a sharded model whose weights are away: said, saved, loaded, or brought back."""
    model = sharded()
    before = [w.clone() for w in tables_of(model)]
    found: dict[str, Any] = {}
    copies = {  # TorchRec's collections are not pickled as a whole, stashed or not
        "deepcopy": copy.deepcopy,
        "a collection": lambda m: copy.deepcopy(m.module.bags),
        "pickle": lambda m: pickle.dumps(m.module.bags._lookups[1]),
        "a slice": lambda m: pickle.dumps(m.module.bags.embedding_bags["rw"].weight),
    }
    for name, made in copies.items():
        restore = stash_embedding_weights(model)
        with pytest.raises(StashError) as error:
            made(model)
        found[name] = (str(error.value), restore.is_out)
        restore()
    restore = stash_embedding_weights(model)
    state = model.state_dict()
    found["state dict"] = restore.is_out
    file = io.BytesIO()
    torch.save(
        {
            k: v.local_shards()[0].tensor.clone()
            for k, v in state.items()
            if getattr(v, "local_shards", list)()
        },
        file,
    )
    restore = stash_embedding_weights(model)
    model.load_state_dict(state)
    found["load"] = restore.is_out
    restore = stash_embedding_weights(model)
    with torch.no_grad():
        model(batches(rank, 1)[0])
    found["lookup"] = [w.nbytes for w in (x.storage for x in embedding_weights([model]))]
    registry.close()
    found["kept"] = all(torch.equal(a, b) for a, b in zip(tables_of(model), before, strict=True))
    return found


@pytest.mark.thorough
def test_what_is_done_to_a_sharded_model_while_its_weights_are_away() -> None:
    """Copies and pickles are errors that leave them away; saving, loading and a lookup bring them back,
    and no bit is lost."""
    for found in run_ranks(away):
        for name in ("deepcopy", "a collection", "pickle", "a slice"):
            said, is_out = found[name]
            assert (
                "are stashed, and cannot be copied or pickled; call what stash_embedding_weights returned "
                "first" in said
            )
            assert is_out
        assert (found["state dict"], found["load"]) == (False, False)
        assert all(found["lookup"]) and found["kept"]


def test_torchrecs_own_stashing_and_this_are_not_used_at_once() -> None:
    """Its manager, turned on as its pipelines do."""
    from torchrec.distributed.memory_stashing import MemoryStashingManager

    model = torch.nn.Embedding(5, 4)
    TrainingStash(model).remove()
    try:
        MemoryStashingManager.set_streams(object(), object())
        with pytest.raises(StashError, match=r"TorchRec stashes these weights already .* not both"):
            TrainingStash(model)
    finally:
        MemoryStashingManager.reset()
    TrainingStash(model).remove()
