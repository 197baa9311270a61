"""Modules on a GPU, or on Triton's interpreter (--device): the vectors of the CPU, and wrong ids that are
said later."""

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables as devices
import torch
from device_calls import IDS, OFFSETS, there
from module_tables import ROWS

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.versions.states import State
from tableside.loader.versions.versions import Model
from tableside.torch import BadFeatureIds, Bags, EmbeddingBags, Embeddings, ModuleError

pytest.importorskip("triton")

Tables = dict[str, np.ndarray]
TOLERANCE = 40 * 200 * 2.0**-24  # as in test_embeddings.py


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("placement", ["hbm", "zero_copy", "cached"])
def test_vectors_are_those_of_the_cpu(model: str, placement: str) -> None:
    """Every form, weights, and a second call of the same shapes with other ids."""
    pooled = ["user_sum", "item_mean", "page_sum"]
    host = EmbeddingBags("ads", pooled, root=model)
    module = EmbeddingBags(
        "ads", pooled, root=model, device=devices.DEVICE, placement=placement, hbm_budget=1 << 20
    )
    for shift in (0, 1):
        ids = (IDS + shift) % ROWS
        weights = torch.linspace(0, 1, 49)
        lengths = torch.tensor([40, 0, 9], dtype=torch.int32)
        told = {
            "user_sum": (ids, OFFSETS, weights),
            "item_mean": Bags(ids, lengths=lengths),
            "page_sum": ids[:48].view(12, 4),
        }
        moved = {
            "user_sum": tuple(there(t) for t in told["user_sum"]),
            "item_mean": Bags(there(ids), lengths=there(lengths)),
            "page_sum": there(ids[:48].view(12, 4)),
        }
        found, expected = module(moved), host(told)
        for name in pooled:
            torch.testing.assert_close(found[name].cpu(), expected[name], rtol=0, atol=TOLERANCE)
    module.check()


@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.drawn(1)
def test_sequences_are_those_of_the_cpu(model: str, output: torch.dtype) -> None:
    """In ids of any shape and in each dtype: bit for bit, but for bfloat16, which the interpreter rounds
    worse, by an ulp."""
    told = {"user_ids": IDS[:48].view(2, 3, 8), "item_ids": IDS[:0]}
    module = Embeddings("ads", ["user_ids", "item_ids"], root=model, device=devices.DEVICE, output=output)
    found = module({n: there(t) for n, t in told.items()})
    module.check()
    expected = Embeddings("ads", ["user_ids", "item_ids"], root=model, output=output)(told)
    for name in told:
        within = 2.0**-7 if output is torch.bfloat16 else 0
        torch.testing.assert_close(found[name].cpu(), expected[name], rtol=within, atol=0)


@pytest.mark.drawn(0.5)
def test_a_wrong_id_is_said_by_the_next_call_or_by_check(model: str) -> None:
    """With its feature, position and bound; the call after that is answered."""
    module = EmbeddingBags("ads", ["user_sum", "page_sum"], root=model, device=devices.DEVICE)
    right = {name: (there(IDS), there(OFFSETS)) for name in ("user_sum", "page_sum")}
    wrong = IDS.clone()
    wrong[11] = ROWS
    for later in (module.check, lambda: module(right)):
        module({**right, "page_sum": (there(wrong), there(OFFSETS))})
        if devices.DEVICE != "interpreter":
            torch.cuda.synchronize()
        with pytest.raises(
            BadFeatureIds,
            match=r"feature 'page_sum': id 500 at position 11 is outside the table's rows \[0, 500\)",
        ):
            later()
    module({**right, "user_sum": Bags(there(IDS), lengths=there(torch.tensor([40, 8])))})
    with pytest.raises(
        BadFeatureIds, match="feature 'user_sum': the 2 lengths add up to 48, but there are 49 ids"
    ):
        module.check()
    module(right)
    module.check()


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("placement", ["hbm", "zero_copy", "cached"])
@pytest.mark.usefixtures("by_refresh")
def test_a_module_follows_changes_of_rows(model: str, placement: str) -> None:
    """State after state; one that was let go is not read by calls that began before it went. A refused id
    is told as ever."""
    names = ["user_sum", "item_mean"]
    host = EmbeddingBags("ads", names, root=model)
    module = EmbeddingBags(
        "ads", names, root=model, device=devices.DEVICE, placement=placement, hbm_budget=1 << 20
    )
    rng = np.random.default_rng(0)
    for state in range(3):
        told = dict.fromkeys(names, (IDS, OFFSETS))
        found, expected = module({name: (there(IDS), there(OFFSETS)) for name in names}), host(told)
        for name in names:
            torch.testing.assert_close(found[name].cpu(), expected[name], rtol=0, atol=TOLERANCE)
        assert module.version == 1
        ids = rng.choice(ROWS, 100, replace=False)
        changes = [TableChanges("user", ids, rng.standard_normal((100, 16)).astype(np.float32))]
        assert apply(Model(Path(model), "ads"), ChangeBatch(changes)).state == State(1, state + 1)
        assert module.refresh() and host.refresh()
        assert not torch.equal(host(told)["user_sum"], expected["user_sum"])
    wrong = IDS.clone()
    wrong[11] = ROWS
    module({name: (there(wrong), there(OFFSETS)) for name in names})
    with pytest.raises(BadFeatureIds, match=r"id 500 at position 11 is outside the table's rows \[0, 500\)"):
        module.check()


KEYS, LENGTHS = ["page_sum", "user_sum"], torch.tensor([10, 0, 9, 30], dtype=torch.int32)


@pytest.mark.drawn(0.5)
def test_keyed_tensors_are_those_of_the_cpu(model: str) -> None:
    """TorchRec's, in another order of keys, pooled and not; by its lengths or by its offsets."""
    torchrec = pytest.importorskip("torchrec")
    host, module = (EmbeddingBags("ads", KEYS[::-1], root=model, device=d) for d in ("cpu", devices.DEVICE))
    expected = host(torchrec.KeyedJaggedTensor(KEYS, IDS, lengths=LENGTHS))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), LENGTHS.cumsum(0, dtype=torch.int32)])
    for told in ({"lengths": there(LENGTHS)}, {"offsets": there(offsets)}):
        found = module(torchrec.KeyedJaggedTensor(KEYS, there(IDS), **told))
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.values().cpu(), expected.values(), rtol=0, atol=TOLERANCE)
    keys = ["user_ids", "item_ids"]
    host_ids, ids = (Embeddings("ads", keys, root=model, device=d) for d in ("cpu", devices.DEVICE))
    jagged = ids(torchrec.KeyedJaggedTensor(keys, there(IDS), lengths=there(LENGTHS)))
    for name, one in host_ids(torchrec.KeyedJaggedTensor(keys, IDS, lengths=LENGTHS)).items():
        assert torch.equal(jagged[name].values().cpu(), one.values())
        assert torch.equal(jagged[name].lengths().cpu(), one.lengths())


def packed_offsets(lengths: torch.Tensor) -> torch.Tensor:
    return there(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["hbm", "cached"])
def test_ids_of_all_features_in_one_tensor(model: str, placement: str) -> None:
    """Side by side what a dict gives apart; by prefetched rows too."""
    module = EmbeddingBags(
        "ads", KEYS, root=model, device=devices.DEVICE, placement=placement, hbm_budget=1 << 20
    )
    host = EmbeddingBags("ads", KEYS, root=model)
    weights = torch.linspace(0, 1, 49)
    found = module.packed(there(IDS), packed_offsets(LENGTHS), there(weights))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
    torch.testing.assert_close(found.cpu(), host.packed(IDS, ends, weights), rtol=0, atol=TOLERANCE)
    torchrec = pytest.importorskip("torchrec")
    keyed = torchrec.KeyedJaggedTensor(KEYS, there(IDS), lengths=there(LENGTHS))
    module.prefetch(keyed)
    lookup = module._published.now().lookups[module._call]
    assert (lookup._ahead.staged.ticket is not None) == (placement == "cached")
    expected = host(torchrec.KeyedJaggedTensor(KEYS, IDS, lengths=LENGTHS)).values()
    torch.testing.assert_close(module(keyed).values().cpu(), expected, rtol=0, atol=TOLERANCE)
    assert lookup._ahead is None
    module.check()


@pytest.mark.drawn(0.5)
def test_packed_ids_that_are_wrong(model: str) -> None:
    """Shapes at once; ids and offsets by `check`, with the feature and the position in it."""
    module = EmbeddingBags("ads", KEYS, root=model, device=devices.DEVICE)
    with pytest.raises(ModuleError, match=r"there are torch.int64 offsets \[4\] for 2 features"):
        module.packed(there(IDS), there(torch.tensor([0, 1, 2, 49])))
    with pytest.raises(ModuleError, match="there are no bags of page_sum, user_sum, but 49 ids"):
        module.packed(there(IDS), there(torch.tensor([0])))
    with pytest.raises(ModuleError, match=r"weights are torch\.int64"):
        module.packed(there(IDS), packed_offsets(LENGTHS), there(IDS))
    with pytest.raises(ModuleError, match="weights require a gradient"):
        module.packed(there(IDS), packed_offsets(LENGTHS), there(torch.ones(49)).requires_grad_())
    wrong = IDS.clone()
    wrong[12] = -7
    module.packed(there(wrong), packed_offsets(LENGTHS))
    with pytest.raises(
        BadFeatureIds, match=r"feature 'user_sum': id -7 at position 2 is outside the table's rows \[0, 500\)"
    ):
        module.check()
    module.packed(there(IDS), there(torch.tensor([0, 9, 8, 19, 49])))
    with pytest.raises(BadFeatureIds, match="feature 'page_sum': length -1 at position 1 is negative"):
        module.check()
    module.packed(there(IDS), there(torch.tensor([1, 9, 9, 19, 49])))
    with pytest.raises(ModuleError, match="feature 'page_sum': the offset at position 0 is 1; expected 0"):
        module.check()


on_a_gpu = pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="graphs are CUDA's")


@on_a_gpu
@pytest.mark.parametrize("placement", ["hbm", "zero_copy"])
def test_captured_calls(model: str, placement: str) -> None:
    """A graph over a dict and one over packed ids answer what the tensors hold at each replay; wrong ids
    of a replay are told."""
    module = EmbeddingBags(
        "ads", KEYS, root=model, device=devices.DEVICE, placement=placement, hbm_budget=1 << 20
    )
    host = EmbeddingBags("ads", KEYS, root=model)
    ids, offsets, ends = there(IDS.clone()), there(OFFSETS), packed_offsets(LENGTHS)

    def dicts() -> torch.Tensor:
        found: dict[str, torch.Tensor] = module(dict.fromkeys(KEYS, (ids, offsets)))
        return torch.cat(list(found.values()), 1)

    def packed() -> torch.Tensor:
        return module.packed(ids, ends)

    with (
        warnings.catch_warnings(),
        pytest.raises(ModuleError, match="a first call of a module cannot be captured"),
    ):
        warnings.simplefilter("ignore")  # that the graph is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            packed()
    for call in (dicts, packed):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = call()
        for shift in (0, 3):
            ids.copy_((IDS + shift) % ROWS)
            graph.replay()
            torch.cuda.synchronize()
            told = (IDS + shift) % ROWS
            if call is packed:
                expected = host.packed(told, ends.cpu())
            else:
                expected = torch.cat(list(host(dict.fromkeys(KEYS, (told, OFFSETS))).values()), 1)
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=TOLERANCE)
        module.check()
        ids[5] = ROWS
        graph.replay()
        with pytest.raises(BadFeatureIds, match="id 500 at position 5"):
            module.check()
        ids.copy_(IDS)


def test_a_tensor_of_another_device_is_refused(model: str) -> None:
    """With both devices."""
    module = Embeddings("ads", ["user_ids"], root=model, device=devices.DEVICE)
    with pytest.raises(ModuleError, match="a tensor is on meta, the module's tables on"):
        module({"user_ids": IDS.to("meta")})


@pytest.mark.thorough
def test_rows_are_prefetched_for_the_next_call(model: str) -> None:
    """The call takes what was prefetched for its tensors; for others, or for tensors that changed, it does
    without."""
    module = EmbeddingBags(
        "ads", ["user_sum"], root=model, device=devices.DEVICE, placement="cached", hbm_budget=1 << 20
    )
    host = EmbeddingBags("ads", ["user_sum"], root=model)
    ids, other, offsets = there(IDS.clone()), there((IDS + 5) % ROWS), there(OFFSETS)

    def call(of: torch.Tensor) -> None:
        found = module({"user_sum": (of, offsets)})["user_sum"].cpu()
        torch.testing.assert_close(
            found, host({"user_sum": (of.cpu(), OFFSETS)})["user_sum"], rtol=0, atol=TOLERANCE
        )

    module.prefetch({"user_sum": (ids, offsets)})
    lookup = module._published.now().lookups[module._call]
    assert lookup._ahead.staged.ticket is not None
    call(ids)
    assert lookup._ahead is None
    module.prefetch({"user_sum": (ids, offsets)})
    call(other)
    module.prefetch({"user_sum": (ids, offsets)})
    ids.add_(1).remainder_(ROWS)
    call(ids)
    module.check()


@on_a_gpu
def test_calls_through_a_cache_are_not_captured(model: str) -> None:
    """They are answered without a graph, before and after."""
    module = EmbeddingBags(
        "ads", KEYS, root=model, device=devices.DEVICE, placement="cached", hbm_budget=1 << 20
    )
    ids, ends = there(IDS), packed_offsets(LENGTHS)
    before = module.packed(ids, ends)
    with (
        warnings.catch_warnings(),
        pytest.raises(ModuleError, match="rows behind a cache move from call to call"),
    ):
        warnings.simplefilter("ignore")  # that the graph is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            module.packed(ids, ends)
    assert torch.equal(module.packed(ids, ends), before)
    module.check()


@on_a_gpu
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)  # of torch's own
def test_compiled_calls_are_replayed(model: str) -> None:
    """torch.compile captures them where it is asked to, after one call; the graph reads what the tensors
    hold at each call."""
    module = EmbeddingBags("ads", KEYS, root=model, device=devices.DEVICE)
    host = EmbeddingBags("ads", KEYS, root=model)
    compiled = torch.compile(module.packed, fullgraph=True, mode="reduce-overhead")
    ends = packed_offsets(LENGTHS)
    module.packed(there(IDS), ends)
    for shift in range(4):
        told = (IDS + shift) % ROWS
        torch.testing.assert_close(
            compiled(there(told), ends).cpu(), host.packed(told, ends.cpu()), rtol=0, atol=TOLERANCE
        )
    module.check()


@on_a_gpu
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)  # of torch's own
def test_compiled_calls_of_a_dict_are_replayed(model: str) -> None:
    """As test_compiled_calls_are_replayed, for a tensor of ids and one of offsets a feature."""
    module = EmbeddingBags("ads", KEYS, root=model, device=devices.DEVICE)
    host = EmbeddingBags("ads", KEYS, root=model)
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    module({key: (there(IDS), there(OFFSETS)) for key in KEYS})
    for shift in range(4):
        told = {key: ((IDS + shift + n) % ROWS, OFFSETS) for n, key in enumerate(KEYS)}
        found = compiled({key: tuple(map(there, pair)) for key, pair in told.items()})
        expected = host(told)
        for key in KEYS:
            torch.testing.assert_close(found[key].cpu(), expected[key], rtol=0, atol=TOLERANCE)
    module.check()


@pytest.mark.usefixtures("by_refresh")
@pytest.mark.drawn(0.5)
def test_a_replaced_version_leaves_the_device(
    model: str, publish_again: Callable[..., Any], tables: Tables
) -> None:
    """Its tables go with the last call that reads them, without the garbage collector."""
    module = Embeddings("ads", ["user_ids"], root=model, device=devices.DEVICE)
    told = {"user_ids": there(IDS)}
    before = module(told)["user_ids"].cpu()
    module.check()
    old = weakref.ref(module._published.now().served)
    gc.disable()
    try:
        publish_again({name: 2 * values for name, values in tables.items()})
        assert module.refresh() and old() is None
    finally:
        gc.enable()
    assert torch.equal(module(told)["user_ids"].cpu(), 2 * before)
