"""Lookups of tensors where they lie: each feature's own, and all features' in one, over every residence,
raw ids and masks of offsets. The oracle is the reference, one feature at a time."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import tables
import torch
from raw_tables import dense_table, random_ids, raw_table
from reference import REFERENCE
from rounding import expect
from tables import table_of, values_of

from tableside.quant import LookupKind, Pooling, Precision, QuantError, RowFormat, Table
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.cpu.checked import rows_of
from tableside.quant.errors import Problem

pytest.importorskip("triton")
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.tensors.calls import TensorInput
from tableside.quant.gpu.tensors.tensors import TensorLookup

pytestmark = pytest.mark.gpu

COUNT = 300
STRANGER = -(2**62)


class Feature(NamedTuple):
    """How a feature of the tests lies: a table, where, and how it is pooled."""

    name: str
    table: Table
    where: str
    pooling: Pooling


@cache
def features() -> tuple[Feature, ...]:
    """One for each residence, with and without raw ids, in formats and widths of their own."""
    raw = raw_table(
        random_ids(COUNT), values_of(COUNT, 64), RowFormat.INT8, missing=np.full(64, 4.0, np.float32)
    )
    return (
        Feature("dense", table_of(RowFormat.INT8, 64), "hbm", Pooling.SUM),
        Feature("raw", raw, "cached", Pooling.MEAN),
        Feature("short", dense_table(COUNT, RowFormat.FP16, 32), "cached", Pooling.SUM),
        Feature("split", table_of(RowFormat.INT4, 36), "split", Pooling.SUM),
        Feature("mapped", table_of(RowFormat.FP32, 12), "mapped", Pooling.MEAN),
    )


def plain() -> tuple[Feature, ...]:
    """Those whose ids are row numbers and in HBM: nothing runs before the lookup."""
    return (features()[0], Feature("other", table_of(RowFormat.FP8, 20, seed=3), "hbm", Pooling.MEAN))


def new_backend() -> GpuBackend:
    backend = GpuBackend(tables.DEVICE, REFERENCE)
    backend.open_cache(60_000, 64, CacheSettings(page_bytes=1024))
    return backend


def lookup_of(chosen: tuple[Feature, ...], precision: Precision = Precision.FP32) -> TensorLookup:
    backend = new_backend()
    kinds = []
    for f in chosen:
        rows = None
        if not backend.device.reads_all_memory:
            rows = torch.empty(f.table.packed.size, dtype=torch.uint8, pin_memory=True)
            rows.numpy()[:] = f.table.packed.reshape(-1)
        match f.where:
            case "hbm":
                placed = backend.place("hbm", f.table)
            case "mapped":
                placed = backend.place("zero_copy", f.table, rows)
            case "split":
                placed = backend.place("hybrid", f.table, rows, share=300)
            case _:
                placed = backend.place("cached", f.table, rows)
        kinds.append(LookupKind(placed, f.pooling, precision))
    return TensorLookup(backend, [f.name for f in chosen], kinds, Reports(backend.launcher))


def there(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if tables.DEVICE == "interpreter" else tensor.to(tables.DEVICE)


def ids_for(feature: Feature, count: int, rng: np.random.Generator) -> np.ndarray:
    """Ids of a feature; where the table takes them, some that it lacks."""
    if feature.name != "raw":
        return rng.integers(0, 200, count)
    known = random_ids(COUNT)
    return np.where(rng.random(count) < 0.2, STRANGER + rng.integers(0, 9, count), rng.choice(known, count))


def check(
    feature: Feature, found: torch.Tensor, ids: np.ndarray, lengths: np.ndarray | None, weights: Any = None
) -> None:
    """The vectors of a feature, within the rounding of the reference's."""
    rows, _, _ = rows_of(feature.table, ids, None)
    twin = Table(feature.table.packed, feature.table.row_format, feature.table.dim)
    pooling = feature.pooling if lengths is not None else Pooling.NONE
    expect(twin, rows, lengths, pooling=pooling, weights=weights).check(found.cpu().numpy())


@pytest.mark.drawn(0.5)
def test_tensors_of_each_feature() -> None:
    """Offsets of both widths, with and without the end, bags of one length, weights, empty features;
    twice, as rows are cached then."""
    lookup, rng = lookup_of(features()), np.random.default_rng(0)
    for _ in range(2):
        lengths = [np.array(n, np.int32) for n in ([3, 0, 5], [1, 20], [], [2, 2, 2, 2], [0, 7])]
        ids = [ids_for(f, int(n.sum()), rng) for f, n in zip(features(), lengths, strict=True)]
        ends = [np.concatenate([[0], np.cumsum(n)]) for n in lengths]
        weights = rng.standard_normal(ids[0].size).astype(np.float32)
        offsets = [ends[0].astype(np.int32), ends[1][:-1], ends[2], None, ends[4]]
        inputs = [
            TensorInput(
                there(i), None if o is None else there(o), 2, n.size, there(weights) if at == 0 else None
            )
            for at, (i, o, n) in enumerate(zip(ids, offsets, lengths, strict=True))
        ]
        vectors = lookup(lookup.stage_each(inputs))
        parts = vectors.split([n.size * f.table.dim for f, n in zip(features(), lengths, strict=True)])
        for at, (f, part) in enumerate(zip(features(), parts, strict=True)):
            check(f, part.view(-1, f.table.dim), ids[at], lengths[at], weights if at == 0 else None)
    assert lookup._reports.take() is None


@pytest.mark.drawn(1)
@pytest.mark.parametrize("chosen", [features, plain], ids=["mixed", "plain"])
@pytest.mark.parametrize("offset_type", [np.int32, np.int64])
def test_ids_of_all_features_in_one_tensor(chosen: Any, offset_type: type) -> None:
    """In another order than the lookup's, with a feature that it does not have; other lengths the second
    time."""
    mine, rng = chosen(), np.random.default_rng(1)
    lookup = lookup_of(mine)
    order = tuple(int(n) for n in rng.permutation(len(mine) + 1)[: len(mine)])
    bags = 3
    for turn in range(2):
        lengths = rng.integers(0, 9, (len(mine) + 1, bags)).astype(np.int32)
        of_place = dict(zip(order, mine, strict=True))
        ids = [ids_for(of_place.get(p, mine[0]), int(lengths[p].sum()), rng) for p in range(len(mine) + 1)]
        offsets = np.concatenate([[0], np.cumsum(lengths.reshape(-1))]).astype(offset_type)
        weights = rng.random(int(offsets[-1])).astype(np.float32) if turn else None
        told = there(np.concatenate(ids))
        staged = lookup.stage_packed(
            told, there(offsets), len(mine) + 1, order, None if weights is None else there(weights)
        )
        found = lookup(lookup.prefetch(staged))
        starts = np.concatenate([[0], np.cumsum(lengths.sum(1))])
        for part, place, f in zip(found.split([f.table.dim for f in mine], 1), order, mine, strict=True):
            of_it = None if weights is None else weights[starts[place] : starts[place + 1]]
            check(f, part, ids[place], lengths[place], of_it)
    assert lookup._reports.take() is None
    assert len(lookup._packed) == 2, "one for calls with weights, one without: lengths send nothing"


@pytest.mark.drawn(0.5)
def test_ids_without_a_row_are_counted() -> None:
    """Both ways, by feature."""
    (raw,) = (f for f in features() if f.name == "raw")
    lookup = lookup_of((raw,))
    ids = np.concatenate([random_ids(COUNT)[:5], [STRANGER, STRANGER]])
    lookup(lookup.stage_each([TensorInput(there(ids), None, 7, 1, None)]))
    lookup(lookup.stage_packed(there(ids), there(np.array([0, 3, 7])), 1, (0,), None))
    assert lookup.unfound.tolist() == [[4, 0]]


def test_vectors_of_ids() -> None:
    """Not pooled, in each precision; none of a feature without ids."""
    mine = tuple(f._replace(pooling=Pooling.NONE) for f in (features()[0], features()[2]))
    for precision, dtype in ((Precision.FP32, torch.float32), (Precision.FP16, torch.float16)):
        lookup = lookup_of(mine, precision)
        ids = np.array([3, 199, 0, 3], np.int64)
        vectors = lookup(lookup.stage_each([TensorInput(there(i), None, 0, 0, None) for i in (ids, ids[:0])]))
        assert vectors.dtype is dtype
        twin = expect(mine[0].table, ids, precision=precision)
        twin.check(vectors.view(4, 64).cpu().numpy())


@pytest.mark.parametrize(
    "at, ids, offsets, problem, position, value, bound",
    [
        (1, [5, 200, 7], [0, 2, 3], Problem.ID, 1, 200, 200),
        (1, [5, -1, 7], [0, 2, 3], Problem.ID, 1, -1, 200),
        (0, [5, 6, 7], [0, 2, 1], Problem.LENGTH, 1, -1, 0),
        (1, [5, 6, 7], [0, 2, 4], Problem.SUM, 2, 4, 3),
        (1, [5, 6, 7], [0, 1, 2], Problem.SUM, 2, 2, 3),
    ],
)
@pytest.mark.drawn(2)
def test_what_is_wrong_is_told(
    at: int, ids: list[int], offsets: list[int], problem: Problem, position: int, value: int, bound: int
) -> None:
    """By a call of each way, with the feature and the position among its own ids; a right call after it
    has nothing told."""
    lookup = lookup_of(plain())
    right = np.array([1, 2, 3], np.int64)
    ends = np.array([0, 2, 3], np.int64)
    for is_packed in (False, True):
        if is_packed:
            parts, starts = [right, right], np.concatenate([ends[:-1], 3 + ends])
            parts[at] = np.array(ids)
            starts[2 * at : 2 * at + 3] = 3 * at + np.array(offsets)
            if at == 0:
                starts[3:] = 3 + ends[1:]
            staged = lookup.stage_packed(there(np.concatenate(parts)), there(starts), 2, (0, 1), None)
        else:
            told = [(right, ends), (right, ends)]
            told[at] = (np.array(ids), np.array(offsets))
            staged = lookup.stage_each([TensorInput(there(i), there(o), 0, 2, None) for i, o in told])
        lookup(staged)
        lookup._reports.wait()
        wrong = lookup._reports.take()
        assert wrong is not None and wrong.name == plain()[at].name and wrong.cause is not None
        found = wrong.cause
        if is_packed and problem is Problem.SUM:  # of all ids, since a feature's are not known apart
            value, bound = value + 3, bound + 3
        assert (found.problem, found.position, found.value, found.bound) == (problem, position, value, bound)
        lookup(lookup.stage_each([TensorInput(there(right), there(ends), 0, 2, None)] * 2))
        assert lookup._reports.take() is None


@pytest.mark.parametrize("offsets, at", [([1, 2, 3], (0, 1)), ([0, -1, 3], (1, -1))])
def test_a_wrong_offset_is_told(offsets: list[int], at: tuple[int, int]) -> None:
    """One that is negative, and a first one that is not 0."""
    lookup = lookup_of(plain()[:1])
    lookup(lookup.stage_each([TensorInput(there(np.array([1, 2, 3])), there(np.array(offsets)), 0, 2, None)]))
    lookup._reports.wait()
    wrong = lookup._reports.take()
    assert wrong is not None
    if wrong.cause is None:
        assert wrong.offset == at
    else:  # the bag before the negative one was seen first
        assert wrong.cause.problem is Problem.LENGTH and wrong.cause.value == at[1]


def test_an_id_that_is_refused_is_told_as_it_came() -> None:
    """Not as the row number that it has not."""
    refuses = Feature(
        "refuses", raw_table(random_ids(COUNT), values_of(COUNT, 64), RowFormat.INT8), "hbm", Pooling.SUM
    )
    lookup = lookup_of((refuses, plain()[0]))
    ids = random_ids(COUNT)[:3].copy()
    ids[2] = STRANGER
    for is_packed in (False, True):
        if is_packed:
            both = np.concatenate([np.array([1, 2]), ids])
            lookup(lookup.stage_packed(there(both), there(np.array([0, 2, 5])), 2, (1, 0), None))
        else:
            told = [TensorInput(there(i), None, i.size, 1, None) for i in (ids, np.array([1, 2]))]
            lookup(lookup.stage_each(told))
        lookup._reports.wait()
        wrong = lookup._reports.take()
        assert wrong is not None and wrong.name == "refuses" and wrong.cause is not None
        assert (wrong.cause.problem, wrong.cause.position, wrong.cause.value) == (
            Problem.MISSING,
            2,
            STRANGER,
        )
        assert wrong.cause.bound == COUNT


def test_tables_of_the_host_are_refused() -> None:
    """The CPU does not see the tensors."""
    backend = new_backend()
    kind = LookupKind(backend.place("host", table_of(RowFormat.INT8, 64)), Pooling.SUM)
    with pytest.raises(QuantError, match="the CPU looks up one of the tables"):
        TensorLookup(backend, ["a"], [kind], Reports(backend.launcher))
