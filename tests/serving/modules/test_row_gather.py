"""`RowGather`: rows by number on the CPU and on a device, of heads, ahead of time, compiled and captured,
while versions come."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables as devices
import torch
from device_calls import there
from reference import unpack
from safetensors.torch import save_file

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant.gpu.tensors import rows
from tableside.quant.rows.fetched import FetchedTable
from tableside.serving.modules import row_gather
from tableside.torch import BadFeatureIds, ModuleError, RowGather

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

ROWS, DIM = 5000, 64
FORMATS = ["fp8_e4m3_block32", "fp8_e4m3", "nvfp4", "int8", "int4", "int2", "fp8", "fp16", "fp32"]
on_a_gpu = pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="graphs are CUDA's")


def publish(root: Path, row_format: str, seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    """Publishes a version of model "lm" whose table "ngram" is in this format; returns what its rows say."""
    values = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed))
    root.mkdir(exist_ok=True)
    path = root / f"{seed}.safetensors"
    save_file({"ngram.weight": values}, path)
    described = {"key": "ngram.weight", "row_format": row_format, "row_alignment": 16}
    feature = {"table": "ngram", "pooling": "none"}
    told = {"tables": {"ngram": described}, "features": {"ngram": feature}}
    load(parse_model({"name": "lm", "checkpoint": str(path), **told}, root), root)
    table = Model(root, "lm").attach().tables["ngram"]
    return unpack(torch.from_numpy(table.packed.copy()), table.row_format, DIM)


def random_ids(below: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def gather_of(root: Path, where: str, **more: Any) -> RowGather:
    """where: "cpu", or a placement on the tests' device."""
    if where == "cpu":
        return RowGather("lm", "ngram", root=str(root), **more)
    here: dict[str, Any] = {"device": devices.DEVICE, "placement": where}
    if where not in ("host", "stored"):
        here["hbm_budget"] = 1 << 22
    return RowGather("lm", "ngram", root=str(root), **here, **more)


def moved(where: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if where == "cpu" else there(tensor)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, but for bf16 in the interpreter, which cuts where a GPU rounds."""
    within = 2.0**-7 if devices.DEVICE == "interpreter" and found.dtype is torch.bfloat16 else 0.0
    torch.testing.assert_close(found.cpu(), expected.to(found.dtype), rtol=within, atol=0)


everywhere = pytest.mark.parametrize("where", ["cpu", "hbm", "zero_copy", "cached", "host"])


@pytest.mark.drawn(4)
@pytest.mark.parametrize("output", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("row_format", FORMATS)
@everywhere
def test_vectors_are_the_rows(root: Path, where: str, row_format: str, output: torch.dtype) -> None:
    """Of ids of any shape and of both types, none, and the first and last row."""
    expected = publish(root, row_format)
    module = gather_of(root, where, output=output)
    ids = random_ids(ROWS, 3, 50, seed=1)
    ids[0, :2] = torch.tensor([0, ROWS - 1])
    for one in (ids, ids.int(), ids[:, ::2], ids[:0], ids[0, 0]):
        found = module(moved(where, one))
        assert found.shape == (*one.shape, DIM) and found.dtype is output
        same(found, expected[one.long()])
    module.check()


@everywhere
@pytest.mark.drawn(2)
def test_heads_lie_side_by_side(root: Path, where: str) -> None:
    """Each with its own rows; an id beyond its head is not the next head's. A rank names its own heads."""
    expected = publish(root, "fp8_e4m3_block32")
    heads = [(0, 1009), (1009, 2003), (4000, 1000)]
    ids = torch.stack([random_ids(n, 7) for _, n in heads], 1)
    wanted = torch.cat([expected[ids[:, n] + first] for n, (first, _) in enumerate(heads)], 1)
    whole, rank = gather_of(root, where, heads=heads), gather_of(root, where, heads=heads[1:])
    for dtype in (torch.int64, torch.int32):
        same(whole(moved(where, ids.to(dtype))), wanted)
        same(whole.prefetch(moved(where, ids.to(dtype))).wait(), wanted)
        same(rank(moved(where, ids[:, 1:].to(dtype))), wanted[:, DIM:])
    beyond = ids.clone()
    beyond[4, 1] = 2003
    with pytest.raises(BadFeatureIds, match=r"id (2003|-1) at position 13"):
        whole(moved(where, beyond))
        whole.check()
    with pytest.raises(ModuleError, match=r"expected \[..., 3\]"):
        whole(moved(where, ids[:, :2]))


@pytest.mark.drawn(0.5)
@everywhere
def test_calls_ahead_give_what_calls_give(root: Path, where: str) -> None:
    """Several at once, taken in any order, or not taken."""
    expected = publish(root, "nvfp4")
    module = gather_of(root, where)
    ids = [random_ids(ROWS, 200, seed=n) for n in range(4)]
    asked = [moved(where, one) for one in ids]
    pending = [module.prefetch(one) for one in asked]
    del pending[1]
    gc.collect()
    for n, one in ((3, pending[2]), (0, pending[0]), (2, pending[1])):
        same(one.wait(), expected[ids[n]])
    same(module(asked[1]), expected[ids[1]])
    module.check()


@pytest.mark.drawn(2)
@everywhere
@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
def test_a_wrong_id_is_said(root: Path, where: str, bad: int) -> None:
    """At once on the CPU, later on a device, where its vector is zeros; ahead of time as well."""
    publish(root, "fp8_e4m3")
    module = gather_of(root, where)
    ids = torch.arange(40)
    ids[17] = bad
    for ahead in (False, True):
        with pytest.raises(BadFeatureIds, match=f"(?s)ngram.*{bad}"):
            found = module.prefetch(moved(where, ids)).wait() if ahead else module(moved(where, ids))
            assert not found[17].any()
            module.check()
    module(moved(where, torch.arange(40)))
    module.check()


@pytest.mark.usefixtures("by_refresh")
@everywhere
@pytest.mark.drawn(2)
def test_versions_and_deltas_come(root: Path, where: str) -> None:
    """A call ahead keeps the version that it began with; a delta's rows are read."""
    before = publish(root, "int8")
    module = gather_of(root, where)
    ids = torch.arange(100)
    pending = module.prefetch(moved(where, ids))
    after = publish(root, "int8", seed=1)
    assert module.refresh()
    same(pending.wait(), before[ids])
    same(module(moved(where, ids)), after[ids])
    vectors = np.zeros((1, DIM), np.float32)
    apply(Model(root, "lm"), ChangeBatch((TableChanges("ngram", np.array([7]), vectors),)))
    assert module.refresh()
    after[7] = 0
    same(module(moved(where, ids)), after[ids])
    same(module.prefetch(moved(where, ids)).wait(), after[ids])
    module.check()


@pytest.mark.usefixtures("by_refresh")
@everywhere
@pytest.mark.drawn(1)
def test_heads_of_a_version_with_fewer_rows(root: Path, where: str) -> None:
    """Rows that are gone are refused, not read behind the table."""
    publish(root, "fp8_e4m3")
    module = gather_of(root, where, heads=[(0, 2500), (2500, 2500)])
    module(moved(where, torch.tensor([[0, 0]])))
    after = publish(root, "fp8_e4m3", seed=1, rows=100)
    assert module.refresh()
    with pytest.raises(BadFeatureIds, match=r"id (20|2520) at position"):
        module(moved(where, torch.tensor([[0, 20], [150, 0]])))
        module.check()
    alone = gather_of(root, where, heads=[(0, 100)])
    same(alone(moved(where, torch.tensor([[7], [99]]))), after[[7, 99]])


@pytest.mark.parametrize("where", ["cpu", "stored"])
def test_rows_on_a_disk(tmp_path: Path, where: str) -> None:
    """Read by the CPU for a device as well, at once and ahead."""
    expected = publish(tmp_path, "fp8_e4m3_block32", rows=40_000)
    module = gather_of(tmp_path, where, heads=[(0, 30_000), (30_000, 10_000)])
    ids = random_ids(10_000, 48, 2)
    wanted = expected[ids + torch.tensor([0, 30_000])].flatten(1)
    assert isinstance(module._published.now().served.features["ngram"].table, FetchedTable)
    same(module(moved(where, ids)), wanted)
    same(module.prefetch(moved(where, ids)).wait(), wanted)
    assert module(moved(where, ids)).device.type == moved(where, ids).device.type


@on_a_gpu
def test_a_call_of_the_cpu_is_not_captured(root: Path) -> None:
    publish(root, "int8")
    module = gather_of(root, "host")
    ids = there(torch.arange(9))
    module(ids)
    for call in (module, module.prefetch):
        with (
            pytest.raises(ModuleError, match="cannot be captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            ids.add_(0)  # torch warns of a graph with nothing in it
            call(ids)
    with pytest.raises(ModuleError, match="ids are on cpu"):
        module(torch.arange(9))


@pytest.mark.usefixtures("by_refresh")
def test_heads_keep_a_version_whose_ids_are_row_numbers(root: Path, publish: Callable[..., Any]) -> None:
    """One whose missing ids have a row is not taken: an id beyond its head would read it."""
    values = np.arange(160, dtype=np.float32).reshape(20, 8)
    feature = {"b": {"table": "t", "pooling": "none"}}
    publish({"t": values}, "demo", {"t": "fp32"}, feature)
    module = RowGather("demo", "t", heads=[(0, 5), (5, 5)], root=str(root), output=torch.float32)
    given = {"t": {"key": "t", "row_format": "fp32", "missing": "mean"}}
    save_file({"t": torch.from_numpy(values + 1)}, root / "next.safetensors")
    told = {
        "name": "demo",
        "checkpoint": str(root / "next.safetensors"),
        "tables": given,
        "features": feature,
    }
    load(parse_model(told, root), root)
    assert not module.refresh()
    same(module(torch.tensor([[1, 2]])), torch.from_numpy(values[[1, 7]]).view(1, 16))
    with pytest.raises(BadFeatureIds):
        module(torch.tensor([[5, 2]]))
    with pytest.raises(ModuleError, match="heads need ids that are row numbers"):
        RowGather("demo", "t", heads=[(0, 5)], root=str(root), verify="header")


@pytest.mark.parametrize("device", ["banana", "meta", "cuda", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(root: Path, device: str) -> None:
    publish(root, "int8")
    with pytest.raises(ModuleError, match="device is"):
        RowGather("lm", "ngram", root=str(root), device=device, placement="host")


@on_a_gpu
def test_a_module_whose_vectors_the_cpu_sends_is_on_their_device(root: Path) -> None:
    publish(root, "int8")
    module = gather_of(root, "host")
    assert module.to(devices.DEVICE) is module and devices.DEVICE in repr(module)
    with pytest.raises(ModuleError, match="stay on"):
        module.to("cpu")


@pytest.mark.usefixtures("by_refresh")
def test_a_call_ahead_on_the_cpu_keeps_its_version(root: Path) -> None:
    """Also where its thread comes to it later; a forked child is told that it cannot wait for it."""
    before = publish(root, "fp32")
    module = gather_of(root, "cpu", output=torch.float32)
    gate = threading.Event()
    row_gather._thread().submit(gate.wait)
    pending = module.prefetch(torch.arange(9))
    publish(root, "fp32", seed=1)
    assert module.refresh()
    gate.set()
    same(pending.wait(), before[:9])
    if not (child := os.fork()):
        try:
            pending.wait()
        except ModuleError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.sanitized_gpu
@pytest.mark.drawn(0.5)
def test_rows_far_apart_are_read_in_order(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same vectors, each at its id's place."""
    monkeypatch.setattr(rows, "_ORDERED_IDS", 64)
    monkeypatch.setattr(rows, "_ORDERED_BYTES", 1)
    expected = publish(root, "fp8_e4m3_block32")
    module = gather_of(root, "zero_copy")
    heads = gather_of(root, "zero_copy", heads=[(0, 2000), (2000, 3000)])
    ids = random_ids(2000, 300, 2, seed=2)
    same(module(there(ids)), expected[ids])
    same(module(there(ids.int())), expected[ids])
    same(heads(there(ids)), expected[ids + torch.tensor([0, 2000])].flatten(1))
    ids[250, 1] = -5
    with pytest.raises(BadFeatureIds, match="-5"):
        module(there(ids))
        module.check()


@pytest.mark.parametrize("where", ["cpu", "hbm", "cached"])
@pytest.mark.drawn(0.5)
def test_compiled_calls(root: Path, where: str) -> None:
    """One operator, without a break, for any number of ids."""
    expected = publish(root, "nvfp4")
    heads = [(0, 2000), (2000, 3000)]
    module = gather_of(root, where, heads=heads, output=torch.float32)
    compiled = torch.compile(lambda ids: module(ids) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (3, 11):
        ids = random_ids(2000, count, 2, seed=count)
        same(compiled(moved(where, ids)), 2 * expected[ids + torch.tensor([0, 2000])].flatten(1))
    wrong = torch.tensor([[0, 3000]])
    with pytest.raises(BadFeatureIds):
        compiled(moved(where, wrong))
        module.check()


@on_a_gpu
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("where", ["hbm", "zero_copy"])
def test_captured_calls(root: Path, monkeypatch: pytest.MonkeyPatch, where: str, is_ordered: bool) -> None:
    """Both halves in one graph, beside other work, over ids that change from replay to replay; a new kind of
    call is not captured."""
    if is_ordered:
        monkeypatch.setattr(rows, "_ORDERED_IDS", 64)
        monkeypatch.setattr(rows, "_ORDERED_BYTES", 1)
    expected = publish(root, "fp8_e4m3_block32")
    module = gather_of(root, where)
    ids = there(torch.zeros(500, dtype=torch.int64))
    matrix = torch.randn(512, 512, device=devices.DEVICE)
    module.prefetch(ids).wait()
    matrix @ matrix  # makes the library's handle
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pending = module.prefetch(ids)
        product = matrix @ matrix
        vectors = pending.wait() + 0
    for seed in range(3):
        told = random_ids(ROWS, 500, seed=seed)
        ids.copy_(told)
        graph.replay()
        same(vectors, expected[told])
        torch.testing.assert_close(product, matrix @ matrix)
    with pytest.raises(ModuleError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(ids.int())


@pytest.mark.parametrize(
    ("table", "heads", "why"),
    [
        ("other", None, "has no feature 'other'"),
        ("ngram", [(0, 10), (4995, 6)], "head 1 has rows 4,995 to 5,001"),
        ("ngram", [(-1, 10)], "head 0 has rows -1"),
        ("ngram", [(5, 0)], "head 0 has rows 5 to 5"),
    ],
)
def test_what_is_not_there_is_refused(root: Path, table: str, heads: Any, why: str) -> None:
    publish(root, "int8")
    with pytest.raises(ModuleError, match=why):
        RowGather("lm", table, root=str(root), heads=heads)


def test_a_table_is_found_by_its_name(root: Path, publish: Callable[..., Any]) -> None:
    """Whatever its feature is called."""
    values = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
    features = {"a": {"table": "t", "pooling": "sum"}, "b": {"table": "t", "pooling": "none"}}
    publish({"t": values}, "demo", {"t": "fp32"}, features)
    for name in ("t", "b"):
        found = RowGather("demo", name, root=str(root), output=torch.float32)(torch.arange(20))
        np.testing.assert_array_equal(found.numpy(), values)
    with pytest.raises(ModuleError, match="of pooling none"):
        RowGather("demo", "a", root=str(root))


@pytest.mark.drawn(0.25)
def test_a_call_ahead_does_not_import_the_compiler(root: Path) -> None:
    """It takes more than a second, for which the first token of an engine would wait."""
    publish(root, "int8", rows=10)
    program = (
        "import sys, torch; from tableside.torch import RowGather\n"
        "module, ids = RowGather('lm', 'ngram', root=sys.argv[1]), torch.tensor([3])\n"
        "assert torch.equal(module.prefetch(ids).wait(), module(ids))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(root)], check=True)
