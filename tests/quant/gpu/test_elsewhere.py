"""Ids and vectors that lie in other memory of the device than a batch's. In the interpreter the device's
memory is the host's."""

from typing import Any

import numpy as np
import pytest
import torch
from raw_tables import raw_table
from tables import expected_of, gpu_backend, placed, run_batch, table_of

pytest.importorskip("triton")
from tableside.quant import BadIds, Lookup, LookupKind, Place, Pooling, QuantError, RowFormat
from tableside.quant.contract import lookup_at
from tableside.quant.errors import Problem
from tableside.quant.gpu.batch.elsewhere import Copy, DeviceRange, Elsewhere, gaps

pytestmark = pytest.mark.gpu

ROWS, DIM, IDS, BAGS = 200, 20, 12, 3
TABLES = [table_of(RowFormat.INT8, DIM, ROWS, seed) for seed in (0, 1)]
RNG = np.random.default_rng(3)
FIRST, SECOND = (RNG.integers(0, ROWS, IDS) for _ in range(2))
LENGTHS = np.array([5, 0, 7], np.int32)
VECTORS = 4 * BAGS * DIM  # bytes of a feature's


def on_device(values: np.ndarray) -> torch.Tensor:
    """Bytes in memory of the device that no batch has."""
    backend: Any = gpu_backend()
    return torch.from_numpy(np.array(values.reshape(-1).view(np.uint8))).to(backend.device.torch_device)


def plan() -> Any:
    """Sums of two features: ids of the first, ids of the second, then the lengths of both. Vectors of the
    second come first."""
    lengths_at = 16 * IDS
    lookups = [
        Lookup(placed(TABLES[0]), Pooling.SUM, 0, IDS, VECTORS, bags=BAGS, lengths_at=lengths_at),
        Lookup(placed(TABLES[1]), Pooling.SUM, 8 * IDS, IDS, 0, bags=BAGS, lengths_at=lengths_at),
    ]
    return gpu_backend().plan(lookups)


def inputs_of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.concatenate([first.view(np.uint8), second.view(np.uint8), LENGTHS.view(np.uint8)])


def run(*requests: tuple[Any, Any]) -> list[Any]:
    backend: Any = gpu_backend()
    found = run_batch(backend, requests)
    if backend.device.torch_device.type == "cuda":
        torch.cuda.synchronize()
    return list(found)


def vectors(memory: torch.Tensor, at: int) -> np.ndarray:
    return memory.cpu().numpy()[at : at + VECTORS].view(np.float32).reshape(BAGS, DIM)


def expected(n: int, ids: np.ndarray) -> np.ndarray:
    return expected_of(TABLES[n], ids, LENGTHS, Pooling.SUM)


@pytest.mark.drawn(0.5)
def test_ids_and_vectors_elsewhere_beside_requests_of_the_host() -> None:
    """What is not elsewhere comes from the inputs, or goes to the outputs; offsets are any; nothing else
    is written."""
    ids, out = (
        on_device(np.concatenate([[7], FIRST, SECOND])),
        on_device(np.full(3 * VECTORS + 32, 99, np.uint8)),
    )
    host = inputs_of(np.full(IDS, -1), SECOND)
    first_alone = Elsewhere(
        host,
        (DeviceRange(0, 8 * IDS, ids.data_ptr() + 8, ids),),
        (DeviceRange(VECTORS, VECTORS, out.data_ptr() + 4, out),),
    )
    both = Elsewhere(
        inputs_of(np.full(IDS, -1), np.full(IDS, 1 << 40)),
        (DeviceRange(0, 16 * IDS, ids.data_ptr() + 8, ids),),
        (DeviceRange(0, 2 * VECTORS, out.data_ptr() + 16 + VECTORS, out),),
    )
    found = run(
        (plan(), inputs_of(SECOND, FIRST)),
        (plan(), first_alone),
        (plan(), both),
        (plan(), inputs_of(FIRST, FIRST)),
    )
    close = {"rtol": 1e-5, "atol": 1e-4}
    np.testing.assert_allclose(
        found[0].view(np.float32).reshape(2, BAGS, DIM)[1], expected(0, SECOND), **close
    )
    np.testing.assert_allclose(
        found[1][:VECTORS].view(np.float32).reshape(BAGS, DIM), expected(1, SECOND), **close
    )
    np.testing.assert_allclose(
        found[3].view(np.float32).reshape(2, BAGS, DIM)[0], expected(1, FIRST), **close
    )
    np.testing.assert_allclose(vectors(out, 4), expected(0, FIRST), **close)
    np.testing.assert_allclose(vectors(out, 16 + VECTORS), expected(1, SECOND), **close)
    np.testing.assert_allclose(vectors(out, 16 + 2 * VECTORS), expected(0, FIRST), **close)
    around = np.r_[0:4, 4 + VECTORS : 16 + VECTORS, 16 + 3 * VECTORS : 3 * VECTORS + 32]
    assert (out.cpu().numpy()[around] == 99).all()


@pytest.mark.parametrize("written", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("by_planner", [False, True])
def test_found_masks_elsewhere(by_planner: bool, written: tuple[bool, bool]) -> None:
    """Of raw ids, of which one is unknown, and of a table that has every id. What is not elsewhere is in the
    answer."""
    backend: Any = gpu_backend()
    ids = np.arange(IDS) * 1_000_003
    raw = raw_table(
        ids[1:], np.ones((IDS - 1, DIM), np.float32), RowFormat.FP32, missing=np.zeros(DIM, np.float32)
    )
    size = 4 * DIM * IDS
    sources = [backend.place("hbm", raw), placed(TABLES[0])]
    places = [
        Place(0, 0, IDS, -1, 0, 0, -1, 0, 0, 2 * size),
        Place(1, 8 * IDS, IDS, -1, 0, 0, -1, size, 0, 2 * size + IDS),
    ]
    kinds = [LookupKind(source, Pooling.NONE) for source in sources]
    asked = np.array(places, np.int64)
    plan = (
        backend.planner(kinds).plan(asked.tobytes())
        if by_planner
        else backend.plan([lookup_at(kinds, place) for place in places])
    )
    out = on_device(np.full(2 * IDS + 8, 99, np.uint8))
    writes = tuple(
        DeviceRange(2 * size + n * IDS, IDS, out.data_ptr() + 3 + n * IDS, out) for n in (0, 1) if written[n]
    )
    (found,) = run((plan, Elsewhere(np.concatenate([ids, FIRST]).view(np.uint8), (), writes)))
    expected = [np.arange(IDS) > 0, np.ones(IDS, np.bool_)]
    memory = out.cpu().numpy()
    for n in (0, 1):
        at, here = (3 + n * IDS, memory) if written[n] else (2 * size + n * IDS, found)
        np.testing.assert_array_equal(here[at : at + IDS], expected[n])
    assert (memory[:3] == 99).all() and (memory[3 + 2 * IDS :] == 99).all()


def test_an_id_elsewhere_that_is_wrong_is_told() -> None:
    """By its value and place; other requests of the batch are answered, and its memory is given back with
    it."""
    wrong = SECOND.copy()
    wrong[4] = ROWS
    ids = on_device(wrong)
    one = Elsewhere(
        inputs_of(FIRST, np.zeros(IDS, np.int64)), (DeviceRange(8 * IDS, 8 * IDS, ids.data_ptr(), ids),), ()
    )
    refused, answered = run((plan(), one), (plan(), inputs_of(FIRST, SECOND)))
    assert isinstance(refused, BadIds) and (refused.job, refused.position, refused.value) == (1, 4, ROWS)
    assert not isinstance(answered, BadIds)


def test_an_id_that_was_wrong_and_is_not_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes ids while they are looked up is told so, and breaks no other request."""
    from tableside.quant.gpu.batch import batch

    wrong = np.full(IDS, -3)
    ids = on_device(wrong)
    one = Elsewhere(inputs_of(FIRST, FIRST), (DeviceRange(0, 8 * IDS, ids.data_ptr(), ids),), ())
    monkeypatch.setattr(
        batch, "whole_inputs", lambda stream, request: np.frombuffer(request.inputs, np.uint8)
    )
    refused, answered = run((plan(), one), (plan(), inputs_of(FIRST, SECOND)))
    assert isinstance(refused, BadIds) and refused.problem is Problem.CHANGED
    assert not isinstance(answered, BadIds)


def test_ids_that_the_cpu_must_read_are_refused() -> None:
    """Where a table is the CPU's."""
    host_plan = gpu_backend().plan([Lookup(TABLES[0], Pooling.NONE, 0, IDS, 0)])
    ids = on_device(FIRST)
    with pytest.raises(QuantError, match="the CPU reads ids of this request"):
        run((host_plan, Elsewhere(bytes(8 * IDS), (DeviceRange(0, 8 * IDS, ids.data_ptr(), ids),), ())))
    assert run((plan(), inputs_of(FIRST, SECOND)))


def test_what_is_between_copies_is_sent() -> None:
    assert [*gaps([Copy(10, 0, 5), Copy(0, 9, 4)], 20)] == [(4, 10), (15, 20)]
    assert [*gaps([], 7)] == [(0, 7)] and [*gaps([Copy(0, 0, 7)], 7)] == []
