"""Modules under torch.compile, torch.export and AOTInductor: same vectors, no rows in the program,
attached by name again."""

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from module_tables import ROWS, tables_of

from tableside.torch import BadFeatureIds, Bags, EmbeddingBags, Embeddings, ModuleError, release

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import KeyedJaggedTensor

POOLED = ["user_sum", "item_mean", "page_sum"]
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)  # of torch's own
MOST_BYTES = 50_000  # of a program: the tables of these tests have 96,000 bytes of rows


class Towers(torch.nn.Module):
    """A dense layer over bags of two features and ids of a third."""

    def __init__(self, root: str | None) -> None:
        super().__init__()
        self.bags = EmbeddingBags("ads", ["user_sum", "item_mean"], root=root)
        self.ids = Embeddings("ads", ["user_ids"], root=root)
        self.top = torch.nn.Linear(16 + 8 + 16, 4)

    def forward(
        self,
        users: torch.Tensor,
        offsets: torch.Tensor,
        items: torch.Tensor,
        lengths: torch.Tensor,
        last: torch.Tensor,
    ) -> Any:
        pooled = self.bags({"user_sum": (users, offsets), "item_mean": Bags(items, lengths=lengths)})
        vectors = self.ids({"user_ids": last})["user_ids"]
        return self.top(torch.cat([pooled["user_sum"], pooled["item_mean"], vectors], 1))


def batch(bags: int, users: int, items: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, ROWS, (n,), generator=generator) for n in (users, items, bags)]
    offsets = torch.randint(0, users + 1, (bags,), generator=generator).sort().values
    offsets[0] = 0
    lengths = torch.zeros(bags, dtype=torch.int32)
    lengths[-1] = items
    return ids[0], offsets, ids[1], lengths, ids[2]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.thorough
def test_modules_compile_whole(model: str) -> None:
    """fullgraph=True over a dict of features; other batches and numbers of ids compile no further graph."""
    towers = Towers(model)
    compiled = torch.compile(towers, fullgraph=True, dynamic=True)
    for bags, users, items in ((6, 40, 30), (3, 17, 9), (64, 1000, 200)):
        told = batch(bags, users, items)
        torch.testing.assert_close(compiled(*told), towers(*told))
    counters = torch._dynamo.utils.counters["stats"]
    assert counters["unique_graphs"] == 1


@pytest.mark.parametrize("keys", [POOLED, POOLED[::-1]])
@pytest.mark.drawn(0.5)
def test_keyed_jagged_tensors_compile_whole(model: str, keys: list[str]) -> None:
    """TorchRec's, in the order of the features and in another; weighted too."""
    bags = EmbeddingBags("ads", POOLED, root=model)

    def pooled(values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        told = KeyedJaggedTensor(keys, values, weights, lengths)
        found: torch.Tensor = bags(told).values()
        return found * 2

    compiled = torch.compile(pooled, fullgraph=True, dynamic=True, backend="aot_eager")
    for count, weights in ((30, None), (60, None), (30, torch.rand(30))):
        values = torch.randint(0, ROWS, (count,))
        lengths = torch.full((6,), count // 6, dtype=torch.int32)
        torch.testing.assert_close(compiled(values, lengths, weights), pooled(values, lengths, weights))


@pytest.mark.drawn(0.5)
def test_a_compiled_call_says_which_id_is_wrong(model: str) -> None:
    """As the eager one."""
    towers = Towers(model)
    told = batch(6, 40, 30)
    told[2][7] = ROWS + 2
    with pytest.raises(BadFeatureIds, match="feature 'item_mean': id 502 at position 7"):
        torch.compile(towers, fullgraph=True, backend="aot_eager")(*told)


def test_a_compiled_call_reads_the_version_of_its_moment(
    model: str, publish_again: Callable[..., Any], tables: dict[str, np.ndarray]
) -> None:
    """No version is baked in."""
    bags = EmbeddingBags("ads", ["user_sum"], root=model)
    compiled = torch.compile(bags, fullgraph=True, backend="aot_eager")
    told = {"user_sum": torch.tensor([[1, 2]])}
    before = compiled(told)["user_sum"]
    publish_again({name: 2 * values for name, values in tables.items()})
    bags.refresh()
    assert torch.equal(compiled(told)["user_sum"], 2 * before)


def dynamic_shapes() -> tuple[dict[int, Any], ...]:
    bags, users, items = (torch.export.Dim(name, min=2, max=1 << 20) for name in ("bags", "users", "items"))
    return {0: users}, {0: bags}, {0: items}, {0: bags}, {0: bags}


def exported(model: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Towers, Any]:
    """A model over tables of the default folder, and its program with dynamic sizes."""
    monkeypatch.setenv("TABLESIDE_ROOT", model)
    towers = Towers(None).eval()
    return towers, torch.export.export(towers, batch(6, 40, 30), dynamic_shapes=dynamic_shapes())


def in_a_process(root: str, code: str) -> None:
    """Runs code in a fresh process whose default folder is `root`."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TABLESIDE_ROOT": root},
    )
    assert run.returncode == 0, run.stderr


def test_an_exported_program_holds_no_rows(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is the dense layer and names of models; its file is smaller than the tables; it takes
    batches of any size."""
    towers, program = exported(model, monkeypatch)
    assert {name for name in program.state_dict if "top" not in name} <= {
        "bags._extra_state",
        "ids._extra_state",
    }
    torch.export.save(program, tmp_path / "m.pt2")
    assert (tmp_path / "m.pt2").stat().st_size < MOST_BYTES < sum(t.nbytes for t in tables_of().values())
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    for sizes in ((6, 40, 30), (2, 5, 3), (64, 1000, 200)):
        torch.testing.assert_close(loaded(*batch(*sizes)), towers(*batch(*sizes)))


LOADS = """
import sys, torch
import tableside.torch
from tableside.serving.modules.published import _all
folder = sys.argv[1] if len(sys.argv) > 1 else {folder!r}
program = {load}
told, expected = torch.load(folder + "/told.pt")
assert not _all
torch.testing.assert_close(program(*told), expected)
assert [one.source.model for one in _all.values()] == ["ads"]
assert tableside.torch.release() == 1 and not _all
"""


@pytest.mark.thorough
def test_a_program_attaches_the_model_where_it_is_loaded(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh process, which made no module, by the model's name and the folder of its own settings:
    another one than here."""
    towers, program = exported(model, monkeypatch)
    torch.export.save(program, tmp_path / "m.pt2")
    told = batch(9, 50, 20)
    torch.save((told, towers(*told)), tmp_path / "told.pt")
    elsewhere = Path(model) / "elsewhere"
    elsewhere.mkdir()
    (Path(model) / "ads").rename(elsewhere / "ads")
    in_a_process(
        str(elsewhere),
        LOADS.format(folder=str(tmp_path), load='torch.export.load(folder + "/m.pt2").module()'),
    )


@pytest.mark.thorough
def test_an_inductor_package_attaches_the_model_where_it_is_loaded(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTInductor's compiled package, which holds no rows either."""
    towers, program = exported(model, monkeypatch)
    package = str(tmp_path / "package.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    told = batch(9, 50, 20)
    torch.save((told, towers(*told)), tmp_path / "told.pt")
    in_a_process(
        model,
        LOADS.format(folder=str(tmp_path), load="torch._inductor.aoti_load_package(folder + '/package.pt2')"),
    )


@pytest.mark.drawn(0.5)
def test_released_tables_are_attached_again(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without a module keeps its tables until `release`."""
    towers, program = exported(model, monkeypatch)
    told, expected = batch(6, 40, 30), towers(*batch(6, 40, 30))
    alone = program.module()
    del towers
    gc.collect()  # torch.export leaves cycles
    for _ in range(2):
        torch.testing.assert_close(alone(*told), expected)
        assert release() == 1


class Follower(torch.nn.Module):
    """A call of one module, for programs of it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: torch.Tensor) -> Any:
        return self.module({"user_ids": ids})["user_ids"]


@pytest.mark.parametrize("follow", ["live", None])
@pytest.mark.drawn(1)
def test_a_program_reads_the_live_version_or_the_one_that_was_pinned(
    model: str, follow: Any, publish_again: Callable[..., Any], tables: dict[str, np.ndarray]
) -> None:
    """Where no module is left that could say it."""
    ids = torch.tensor([1, 2])
    program = torch.export.export(
        Follower(Embeddings("ads", ["user_ids"], root=model, follow=follow)), (ids,)
    ).module()
    release()
    gc.collect()  # torch.export leaves cycles
    publish_again({name: 2 * values for name, values in tables.items()})
    expected = (2 if follow == "live" else 1) * torch.from_numpy(tables["user"])[ids]
    assert torch.equal(program(ids), expected)
    assert release() == 1


@pytest.mark.drawn(0.5)
def test_a_program_is_not_run_over_tables_of_other_dims(
    model: str, publish_again: Callable[..., Any], tables: dict[str, np.ndarray]
) -> None:
    """With both dims; the shapes of a compiled program are those that it was made for."""
    call = EmbeddingBags("ads", ["user_sum"], root=model)._call
    gc.collect()
    publish_again({**tables, "user": tables["user"][:, :8].copy()})
    with pytest.raises(
        ModuleError,
        match=r"made for feature 'user_sum' of dim 16; model 'ads' version 2 has dim 8; export the",
    ):
        torch.ops.tableside.look_up(call, "1-", [torch.tensor([[1, 2]])])
    release()


@pytest.mark.drawn(0.5)
def test_operators_are_sound(model: str) -> None:
    """torch's own checks of custom operators, for every form of input: schema, fake kernels, dynamic
    shapes."""
    bags = EmbeddingBags("ads", ["user_sum", "item_mean"], root=model)
    users, offsets, items, lengths, _ = batch(6, 40, 30)
    told = (bags._call, "3w2-", [users, offsets, torch.rand(40), items, lengths])
    torch.library.opcheck(torch.ops.tableside.look_up.default, told)
    told = (bags._call, "4-1-", [users, torch.tensor([0, 7, 40]), items.view(6, 5)])
    torch.library.opcheck(torch.ops.tableside.look_up.default, told)
    ids = Embeddings("ads", ["user_ids"], root=model, output=torch.float16)
    torch.library.opcheck(torch.ops.tableside.look_up.default, (ids._call, "0-", [items.view(3, 2, 5)]))
    keyed = (bags._call, "2 2", [users, torch.tensor([10, 10, 10, 10])])
    torch.library.opcheck(torch.ops.tableside.look_up_keyed.default, keyed)


@pytest.mark.thorough
def test_packed_calls_compile_and_export(model: str) -> None:
    """By offsets, of any number of bags and ids, with and without weights; as an eager call."""
    bags = EmbeddingBags("ads", ["user_sum", "item_mean"], root=model)

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = bags

        def forward(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.bags.packed(values, offsets, weights) + self.bags.packed(values, offsets)

    told = (torch.arange(20), torch.tensor([0, 3, 3, 9, 12, 15, 20]), torch.rand(20))
    more = (torch.arange(30), torch.tensor([0, 30, 30, 30, 30]), torch.rand(30))
    tower = Tower()
    compiled = torch.compile(tower, fullgraph=True, dynamic=True)
    ids, ends = torch.export.Dim("ids", min=2), torch.export.Dim("ends", min=5)
    exported = torch.export.export(tower, told, dynamic_shapes=({0: ids}, {0: ends}, {0: ids})).module()
    for one in (told, more):
        assert torch.equal(compiled(*one), tower(*one))
        assert torch.equal(exported(*one), tower(*one))
