"""Ids that are not row numbers, on the GPU backend: raw ids, and dense tables with a default row. The
oracle is a dictionary."""

from typing import Any

import numpy as np
import pytest
import tables
import torch
from raw_on_gpu import (
    ARRAY,
    CASES,
    COUNT,
    DEFAULT,
    IDS,
    PADDED,
    STRANGERS,
    asked,
    backend_with_cache,
    inputs_of,
    made,
    placed,
)
from raw_tables import EXTREMES, Known, dense_table, raw_table
from reference import REFERENCE
from rounding import expect
from tables import expected_of, table_of, values_of

from tableside.quant import BadIds, Lookup, LookupKind, Place, Pooling, RowFormat, Table
from tableside.quant.contract import Unfound
from tableside.quant.errors import Problem
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.batch import LookupResult
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.tensors.calls import TensorInput
from tableside.quant.gpu.tensors.tensors import TensorLookup

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
@pytest.mark.drawn(3)
def test_rows_masks_and_counts_are_the_dictionarys(name: str) -> None:
    """Unpooled and pooled, each with a found mask; a table that refuses strangers gets none."""
    case = CASES[name]
    table, known = made(case)
    backend: Any = tables.gpu_backend()
    held = backend.place("hbm", table)
    ids = asked(known, not case.refuses)
    if case.owned and not case.bucket_ids:
        ids = np.concatenate([ids, IDS])  # those of other owners are strangers here
    lengths = np.array([ids.size - 10, 0, 10], np.int32)
    size = 4 * case.dim
    lookups = [
        Lookup(held, Pooling.NONE, 0, ids.size, 0, found_at=ids.size * size),
        Lookup(held, Pooling.MEAN, 0, ids.size, ids.size * (size + 1), bags=3, lengths_at=ids.nbytes),
    ]
    out = np.full(ids.size * (size + 1) + 3 * size, 0xEE, np.uint8)
    unfound = backend.plan(lookups).run(inputs_of(ids, lengths), out)
    vectors = out[: ids.size * size].view(np.float32).reshape(-1, case.dim)
    np.testing.assert_array_equal(vectors, expected_of(known.twin, known.twins(ids)))
    np.testing.assert_array_equal(out[ids.size * size : ids.size * (size + 1)], known.found(ids))
    means = out[ids.size * (size + 1) :].tobytes()
    expect(known.twin, known.twins(ids), lengths, pooling=Pooling.MEAN).check(
        np.frombuffer(means, np.float32).reshape(3, -1)
    )
    assert unfound == [Unfound(*known.unfound(ids))] * 2


def test_extremes_are_ids_like_others() -> None:
    """Every extreme has its row, and the extremes that a table lacks have none."""
    some, others = np.array(EXTREMES[::2], np.int64), np.array(EXTREMES[1::2], np.int64)
    values = values_of(some.size, 64)
    table = raw_table(some, values, RowFormat.INT8, missing=np.full(64, DEFAULT, np.float32), buckets=1)
    known = Known.of(some.tolist(), values, RowFormat.INT8, np.full(64, DEFAULT, np.float32))
    backend: Any = tables.gpu_backend()
    ids = np.concatenate([others, some])
    found = backend.lookup(backend.place("hbm", table), ids, pooling=Pooling.NONE)
    np.testing.assert_array_equal(found, expected_of(known.twin, known.twins(ids)))
    assert (found[: others.size] == DEFAULT).all()


@pytest.mark.parametrize("first", [2**63 - 50, -(2**63), -7])
def test_dense_ids_at_either_end_of_int64(first: int) -> None:
    """The ids of a dense table may begin anywhere, and the first one is row 0."""
    table = dense_table(50, RowFormat.INT8, 8, missing=np.full(8, DEFAULT, np.float32), first=first)
    backend: Any = tables.gpu_backend()
    ids = np.array([first, first + 49, *EXTREMES], np.int64)
    rows = [id - first if first <= id < first + 50 else 50 for id in ids.tolist()]
    found = backend.lookup(backend.place("hbm", table), ids, pooling=Pooling.NONE)
    by_number = Table(table.packed, table.row_format, table.dim)
    np.testing.assert_array_equal(found, expected_of(by_number, np.array(rows)))


def test_a_dense_table_without_a_default_row_refuses_ids_beside_its_own() -> None:
    """Row numbers among them, where its ids begin further on."""
    backend: Any = tables.gpu_backend()
    held = backend.place("hbm", dense_table(50, RowFormat.INT8, 8, first=100))
    with pytest.raises(BadIds) as caught:
        backend.lookup(held, np.array([149, 100, 3]), pooling=Pooling.NONE)
    error = caught.value
    assert (error.problem, error.position, error.value, error.bound) == (Problem.MISSING, 2, 3, 50)


@pytest.mark.parametrize("ids", [[], [-1]], ids=["no id", "one id"])
def test_tables_of_hardly_any_ids(ids: list[int]) -> None:
    table = raw_table(
        ids, values_of(2, 64)[: len(ids)], RowFormat.INT8, missing=np.full(64, DEFAULT, np.float32)
    )
    backend: Any = tables.gpu_backend()
    found = backend.lookup(backend.place("hbm", table), np.array([0, -1, 5]), pooling=Pooling.NONE)
    assert ((found == DEFAULT).all(1) == [True, not ids, True]).all()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("how", ["hbm", "cached", "mapped"])
def test_a_missing_id_is_refused_where_the_table_says_so(how: str) -> None:
    """By lookup, position and value, from a batch whose other requests are answered; with bags and
    without."""
    table, known = made(CASES["refuses"])
    backend = backend_with_cache()
    held = placed(backend, table, how)
    dense = backend.place("hbm", table_of(RowFormat.INT8, 64))
    good, bad = asked(known, False), asked(known, False)
    bad[[7, 20]] = 77, 78
    lengths = np.array([40, good.size - 40], np.int32)
    for pooling in (Pooling.NONE, Pooling.SUM):
        lookups = [
            Lookup(dense, Pooling.NONE, 0, 1, 0),
            Lookup(held, pooling, 8, good.size, 256, bags=2, lengths_at=8 + good.nbytes),
        ]
        plan = backend.plan(lookups)
        one = np.zeros(1, np.int64)
        right, wrong = inputs_of(one, good, lengths), inputs_of(one, bad, lengths)
        first, refused, last = tables.run_batch(backend, [(plan, right), (plan, wrong), (plan, right)])
        assert isinstance(refused, BadIds)
        assert (refused.problem, refused.job, refused.position) == (Problem.MISSING, 1, 7)
        assert (refused.value, refused.bound) == (77, COUNT)
        assert isinstance(first, np.ndarray) and isinstance(last, np.ndarray)
        np.testing.assert_array_equal(first, last)


def test_found_masks_and_counts_of_many_lookups_in_one_batch() -> None:
    """Raw, dense with a default row, dense, and raw on the CPU; each mask and count goes to its own lookup
    of its own request."""
    backend = GpuBackend(tables.DEVICE, REFERENCE)
    (padded, known), (array, known_array) = made(PADDED), made(ARRAY)
    default = dense_table(50, RowFormat.INT8, 8, missing=np.full(8, DEFAULT, np.float32), first=-20, own=40)
    plain = table_of(RowFormat.INT8, 8)
    held = [backend.place("hbm", t) for t in (padded, plain, default, array)] + [backend.place("host", array)]
    requests, wanted = [], []
    for seed in range(3):
        ids = [
            asked(known, seed == 1, 20, seed),
            np.arange(10, dtype=np.int64),
            np.array([-21, -20, 19, 20, 29, 30, 2**63 - 1, -(2**63)]),
            asked(known_array, True, 5, seed),
            asked(known_array, False, 4, seed),
        ]
        lookups, at, out_at = [], 0, 0
        for source, some in zip(held, ids, strict=True):
            lookups.append(
                Lookup(
                    source, Pooling.NONE, at, some.size, out_at, found_at=out_at + some.size * source.dim * 4
                )
            )
            at, out_at = at + some.nbytes, out_at + some.size * (source.dim * 4 + 1) + 3  # at any alignment
        requests.append((backend.plan(lookups), inputs_of(*ids)))
        masks = [
            known.found(ids[0]),
            np.ones(10),
            np.array([0, 1, 1, 1, 1, 0, 0, 0]),
            known_array.found(ids[3]),
            known_array.found(ids[4]),
        ]
        counts = [
            known.unfound(ids[0]),
            (0, 0),
            (4, 2),
            known_array.unfound(ids[3]),
            known_array.unfound(ids[4]),
        ]
        wanted.append((lookups, masks, [Unfound(*c) for c in counts]))
    results, _ = backend.batches.run(requests)
    for result, (lookups, masks, counts) in zip(results, wanted, strict=True):
        assert isinstance(result, LookupResult)
        for lk, mask in zip(lookups, masks, strict=True):
            assert lk.found_at is not None
            np.testing.assert_array_equal(result.outputs[lk.found_at : lk.found_at + lk.ids], mask)
        assert result.unfound == counts
    last = results[2]
    assert isinstance(last, LookupResult)
    default_rows = np.frombuffer(
        last.outputs[wanted[2][0][2].out_at :][: 8 * 32].tobytes(), np.float32
    ).reshape(8, 8)
    assert ((default_rows == DEFAULT).all(1) == [True, False, False, False, False, True, True, True]).all()


def test_nothing_is_counted_where_every_id_is_found() -> None:
    """None says so, also after a batch of which something was counted."""
    backend = GpuBackend(tables.DEVICE, REFERENCE)
    values = values_of(COUNT, 64)
    held = backend.place("hbm", raw_table(IDS, values, RowFormat.INT8, missing=values[0]))
    plan = backend.plan([Lookup(held, Pooling.NONE, 0, COUNT, 0)])
    out = np.empty(COUNT * 256, np.uint8)
    assert plan.run(inputs_of(np.resize(STRANGERS, COUNT)), out) == [Unfound(COUNT, 0)]
    for _ in range(3):  # from the second run on the plan's jobs are on the device
        assert plan.run(inputs_of(IDS), out) is None


def test_tables_whose_ids_are_row_numbers_launch_nothing_more() -> None:
    backend: Any = tables.gpu_backend()
    plan = backend.plan([Lookup(backend.place("hbm", table_of(RowFormat.INT8, 8)), Pooling.NONE, 0, 3, 0)])
    assert plan.launches_alone() is None  # from the second run on its jobs are on the device
    assert plan.layout.resolved == [] and plan.launches_alone().resolve is None


def steady_requests(known: Known, count: int) -> list[tuple[np.ndarray, bytes, int, np.ndarray]]:
    """(places, inputs, out_bytes, ids) of a pooled lookup of a raw table and an unpooled one, and a dense
    one before them."""
    requests = []
    for seed in range(count):
        ids, lengths = asked(known, True, 10 + seed, seed), np.array([4, 0, 3], np.int32)
        dense = np.arange(seed + 1, dtype=np.int64)
        at = dense.nbytes
        places = [
            Place(0, 0, dense.size, -1, 0, 0, -1, 0),
            Place(1, at, 7, at + ids.nbytes, 0, 3, -1, 32 * dense.size),
            Place(2, at, ids.size, -1, 0, 0, -1, 32 * dense.size + 3 * 256),
        ]
        out_bytes = 32 * dense.size + 3 * 256 + ids.size * 256
        requests.append((np.array(places, np.int64), inputs_of(dense, ids, lengths), out_bytes, ids))
    return requests


@pytest.mark.parametrize("how", ["hbm", "cached", "split"])
@pytest.mark.drawn(1)
def test_a_planner_gives_what_plans_give(how: str) -> None:
    """Through the C routine, in one batch; the counts of each request are its own."""
    table, known = made(PADDED)
    backend = backend_with_cache()
    held = placed(backend, table, how)
    dense = backend.place("hbm", table_of(RowFormat.INT8, 8))
    kinds = [LookupKind(dense, Pooling.NONE), LookupKind(held, Pooling.SUM), LookupKind(held, Pooling.NONE)]
    planner, requests = backend.planner(kinds), steady_requests(known, 3)
    plans: list[Any] = [planner.plan(places.tobytes(), size) for places, _, size, _ in requests]
    assert all(len(plan.layout.resolved) == 2 for plan in plans)
    results, _ = backend.batches.run(
        [(plan, inputs) for plan, (_, inputs, _, _) in zip(plans, requests, strict=True)]
    )
    for result, (_, _, size, ids), plan in zip(results, requests, plans, strict=True):
        assert isinstance(result, LookupResult) and result.outputs.size >= size
        at = plan.layout.lookups()[1].out_at
        sums = result.outputs[at : at + 3 * 256].view(np.float32).reshape(3, 64)
        expect(known.twin, known.twins(ids[:7]), np.array([4, 0, 3], np.int32), pooling=Pooling.SUM).check(
            sums
        )
        vectors = result.outputs[at + 3 * 256 : size].view(np.float32).reshape(-1, 64)
        np.testing.assert_array_equal(vectors, expected_of(known.twin, known.twins(ids)))
        assert result.unfound == [
            Unfound(0, 0),
            Unfound(*known.unfound(ids[:7])),
            Unfound(*known.unfound(ids)),
        ]


def test_a_planner_lays_found_masks_out_too() -> None:
    table, known = made(PADDED)
    backend = GpuBackend(tables.DEVICE, REFERENCE)
    planner = backend.planner([LookupKind(backend.place("hbm", table), Pooling.NONE)])
    ids = asked(known, True, 10)
    places = np.array([Place(0, 0, ids.size, -1, 0, 0, -1, 0, 0, 256 * ids.size)], np.int64)
    out = np.empty(257 * ids.size, np.uint8)
    plan: Any = planner.plan(places.tobytes())
    assert plan.run(ids.tobytes(), out) == [Unfound(*known.unfound(ids))]
    np.testing.assert_array_equal(out[256 * ids.size :], known.found(ids))
    np.testing.assert_array_equal(
        out[: 256 * ids.size].view(np.float32).reshape(-1, 64), expected_of(known.twin, known.twins(ids))
    )


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["hbm", "cached"])
def test_a_lookup_of_tensors_leaves_its_inputs_as_they_are(how: str) -> None:
    """Two batches are prefetched before the first is looked up, and each is looked up twice: all get their
    own vectors."""
    table, known = made(PADDED)
    backend = backend_with_cache()
    plain = table_of(RowFormat.INT4, 8)
    kinds = [
        LookupKind(placed(backend, table, how), Pooling.SUM),
        LookupKind(backend.place("hbm", plain), Pooling.SUM),
    ]
    reports = Reports(backend.launcher)
    lookup = TensorLookup(backend, ["raw", "plain"], kinds, reports)
    lengths, ends = (
        np.array([4, 0, 5], np.int32),
        torch.tensor([0, 4, 4, 9], device=backend.device.torch_device),
    )
    batches = []
    for seed in range(2):
        ids, weights = asked(known, True, 20, seed)[:9], np.random.default_rng(seed).random(9, np.float32)
        rows = np.random.default_rng(seed).integers(0, 200, 9)
        weighted = torch.from_numpy(weights).to(backend.device.torch_device)
        tensors = [torch.from_numpy(one.copy()).to(backend.device.torch_device) for one in (ids, rows)]
        batches.append((ids, rows, weights, [TensorInput(one, ends, 0, 3, weighted) for one in tensors]))
    before = [one.ids.clone() for *_, inputs in batches for one in inputs]
    for _ in range(2):
        calls = [lookup.prefetch(lookup.stage_each(inputs)) for *_, inputs in batches]
        for (ids, rows, weights, _), call in zip(batches, calls, strict=True):
            found = lookup(call).cpu().numpy()
            how_: dict[str, Any] = {"pooling": Pooling.SUM, "weights": weights}
            expect(known.twin, known.twins(ids), lengths, **how_).check(found[: 3 * 64].reshape(3, 64))
            expect(plain, rows, lengths, **how_).check(found[3 * 64 :].reshape(3, 8))
    after = [one.ids for *_, inputs in batches for one in inputs]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert reports.take() is None
    unfound = np.sum([known.unfound(ids) for ids, *_ in batches], 0)
    assert lookup.unfound.tolist() == [(2 * unfound).tolist(), [0, 0]]
