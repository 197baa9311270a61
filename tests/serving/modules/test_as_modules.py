"""What PyTorch people do with modules: copy, pickle, move, save, share, call in workers of data loaders."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from module_tables import ROWS

from tableside.torch import EmbeddingBags, Embeddings, ModuleError

Tables = dict[str, np.ndarray]
IDS = torch.tensor([[1, 2], [3, 499]])


class Model(torch.nn.Module):
    """Published tables beside a dense layer."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self.bags = EmbeddingBags("ads", ["user_sum"], root=root)
        self.top = torch.nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.top(self.bags({"user_sum": ids})["user_sum"])
        return found


class Vectors(torch.utils.data.Dataset[torch.Tensor]):
    """Looks up in the worker that is asked."""

    def __init__(self, module: Embeddings) -> None:
        self.module = module

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> torch.Tensor:
        ids = torch.arange(at, 20_000 + at) % ROWS  # enough bytes that a call uses its threads
        found: torch.Tensor = self.module({"user_ids": ids})["user_ids"]
        return found


def test_copies_share_the_tables(model: str) -> None:
    """copy and deepcopy, also of what holds the module."""
    whole = Model(model)
    for other in (copy.deepcopy(whole), copy.copy(whole)):
        assert other.bags._published is whole.bags._published
        assert torch.equal(other(IDS), whole(IDS))


@pytest.mark.parametrize("follow", ["live", None])
def test_a_pickle_holds_names(model: str, follow: Any, tables: Tables) -> None:
    """It is small, and attaches what it names; in this process that is the same attachment."""
    module = Embeddings("ads", ["user_ids"], root=model, follow=follow, output=torch.float16)
    text = pickle.dumps(module)
    assert len(text) < 4000 < tables["user"].nbytes
    again = pickle.loads(text)
    assert again._published is module._published
    assert torch.equal(again({"user_ids": IDS})["user_ids"], module({"user_ids": IDS})["user_ids"])
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).version == 1


def test_a_pinned_pickle_stays_at_its_version(
    model: str, publish_again: Callable[..., Any], tables: Tables
) -> None:
    """Though another version is live where it is read; a live one follows."""
    pinned, live = (
        pickle.dumps(Embeddings("ads", ["user_ids"], root=model, follow=f)) for f in (None, "live")
    )
    publish_again(tables)
    assert (pickle.loads(pinned).version, pickle.loads(live).version) == (1, 2)


def test_a_state_dict_holds_names(model: str) -> None:
    """What torch.load reads without code; another model's is refused."""
    whole = Model(model)
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["bags._extra_state"] == {"model": "ads", "version": 1}
    assert Model(model).load_state_dict(state).missing_keys == []
    state["bags._extra_state"]["model"] = "other"
    with pytest.raises(
        ModuleError, match="the state is of model 'other' version 1; this module reads 'ads' version 1"
    ):
        whole.load_state_dict(state)
    assert not list(whole.bags.parameters()) and not list(whole.bags.buffers())


def test_a_pinned_module_refuses_the_state_of_another_version(
    model: str, publish_again: Callable[..., Any], tables: Tables
) -> None:
    """A live one takes it: its version is not the state's to say."""
    state = Embeddings("ads", ["user_ids"], root=model, follow=None).state_dict()
    publish_again(tables)
    Embeddings("ads", ["user_ids"], root=model).load_state_dict(state)
    with pytest.raises(
        ModuleError, match="the state is of model 'ads' version 1; this module reads 'ads' version 2"
    ):
        Embeddings("ads", ["user_ids"], root=model, follow=None).load_state_dict(state)


def test_tables_do_not_move(model: str) -> None:
    """.to() of the same device and type does nothing, of others says what to do instead."""
    whole = Model(model)
    assert whole.to("cpu").float().eval().share_memory() is whole
    assert whole.bags.share_memory() is whole.bags
    with pytest.raises(
        ModuleError, match=r"stay on cpu and give torch\.float32; for meta and torch\.float32 make another"
    ):
        whole.to("meta")
    with pytest.raises(
        ModuleError, match=r"make another module, with device='cpu' and output=torch\.float16"
    ):
        whole.half()


def test_a_module_shows_what_it_reads(model: str) -> None:
    """Its repr, for people."""
    module = EmbeddingBags("ads", ["user_sum"], root=model)
    assert (
        repr(module)
        == "EmbeddingBags('ads', live, features=['user_sum'], device='cpu', output=torch.float32)"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_data_loaders_call_modules(model: str, method: str, tables: Tables) -> None:
    """Forked ones after the parent called with two threads; spawned ones by the pickle."""
    module = Embeddings("ads", ["user_ids"], root=model, threads=2)
    expected = Vectors(module)[0]
    loader = torch.utils.data.DataLoader(
        Vectors(module), batch_size=None, num_workers=2, multiprocessing_context=method, timeout=60
    )
    for at, found in enumerate(loader):
        assert torch.equal(found, torch.from_numpy(tables["user"])[torch.arange(at, 20_000 + at) % ROWS])
        assert at or torch.equal(found, expected)


def follow_in_a_child(module: Embeddings, published: Any, answers: Any) -> None:
    """Says its version before and after the parent published another one."""
    answers.put(module({"user_ids": IDS})["user_ids"].tolist())
    published.wait(300)
    while module.version == 1:
        module({"user_ids": IDS})
    answers.put(module({"user_ids": IDS})["user_ids"].tolist())


def test_a_forked_child_follows_versions(
    model: str, publish_again: Callable[..., Any], tables: Tables
) -> None:
    """By a thread of its own: its parent's is not in it."""
    module = Embeddings("ads", ["user_ids"], root=model)
    first = module({"user_ids": IDS})["user_ids"]  # the parent's thread runs
    context = torch.multiprocessing.get_context("fork")
    published, answers = context.Event(), context.Queue()
    child = context.Process(target=follow_in_a_child, args=(module, published, answers))
    child.start()
    try:
        assert answers.get(timeout=300) == first.tolist()
        publish_again({name: 2 * values for name, values in tables.items()})
        published.set()
        assert answers.get(timeout=300) == (2 * first).tolist()
    finally:
        child.join(300)
        if child.is_alive():
            child.kill()
            child.join()
    assert child.exitcode == 0


def test_processes_share_one_copy(model: str) -> None:
    """The rows that a module reads are pages of the published file."""
    module = Embeddings("ads", ["user_ids"], root=model)
    table = module._published.now().served.features["user_ids"].table
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("/ads/1.segment")
    ]
    bounds = [tuple(int(a, 16) for a in line.split()[0].split("-")) for line in mapped]
    assert any(low <= table.address < high for low, high in bounds)  # type: ignore[attr-defined]
