"""Planners: lookups of the same kinds at other places each time give, bit for bit, what a plan of each
request gives."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tables
from drawn_lookups import Drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import backend_of
from rounding import expect
from tables import placed, table_of

from tableside.quant import (
    Backend,
    BadIds,
    LookupKind,
    Place,
    Pooling,
    Precision,
    QuantError,
    RowFormat,
    RowSource,
    Table,
    choose,
)
from tableside.quant.contract import lookup_at, places_in
from tableside.quant.cpu import _native
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.moves import Move, as_bytes

pytestmark = pytest.mark.gpu


def outcome(plan: Any, inputs: bytes, out_bytes: int) -> bytes | str:
    out = np.full(out_bytes, 0xEE, np.uint8)
    try:
        plan.run(inputs, out)
    except BadIds as error:
        return f"{error.problem} {error.job} {error.position} {error.value} {error.bound}"
    return out.tobytes()


def planned(backend: Backend, kinds: Sequence[LookupKind], places: np.ndarray, out_bytes: int) -> Any:
    """A plan of the request's lookups alone."""
    return backend.plan([lookup_at(kinds, place) for place in places_in(places)], 1, out_bytes)


def check(kinds: Sequence[LookupKind], places: np.ndarray, inputs: bytes, out: bytes) -> None:
    """Every lookup of a request gave what the reference gives for it alone."""
    for place in places_in(places):
        kind, lk = kinds[place.kind], lookup_at(kinds, place)
        table = kind.table
        assert isinstance(table, Table)
        ids = (
            np.frombuffer(inputs, np.int64, lk.ids, place.ids_at).copy() if lk.ids else np.zeros(0, np.int64)
        )
        lengths = weights = None
        if kind.pooling is not Pooling.NONE:
            lengths = np.full(lk.bags, place.bag_length, np.int32)
            if place.lengths_at >= 0:
                lengths = np.frombuffer(inputs, np.int32, lk.bags, place.lengths_at).copy()
        if place.weights_at >= 0:
            weights = np.frombuffer(inputs, np.float32, lk.ids, place.weights_at).copy()
        dtype = np.dtype(np.float16 if kind.precision is Precision.FP16 else np.float32)
        shape, step = (lk.outputs, table.dim), lk.out_row_bytes or lk.vector_bytes
        vectors = (
            np.ndarray(shape, dtype, out, lk.out_at, (step, dtype.itemsize))
            if lk.outputs
            else np.zeros(shape, dtype)
        )
        expect(table, ids, lengths, pooling=kind.pooling, weights=weights, precision=kind.precision).check(
            vectors
        )


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
@pytest.mark.drawn(0.5)
def test_a_planner_gives_what_plans_give_on_the_cpu(seed: int) -> None:
    """By every backend of the CPU, for places that differ; and the vectors are the reference's within
    rounding."""
    drawn = Drawn(seed)
    names = ["native", "fbgemm", "reference"]
    planners = {n: backend_of(n).planner(drawn.kinds, drawn.rng.randint(1, 2)) for n in names}
    for wrong in (False, False, True):
        places, inputs, out_bytes = drawn.request(wrong)
        found = {n: outcome(planners[n].plan(places.tobytes(), out_bytes), inputs, out_bytes) for n in names}
        for n in names:
            assert found[n] == outcome(
                planned(backend_of(n), drawn.kinds, places, out_bytes), inputs, out_bytes
            )
        if isinstance(found["reference"], str):
            assert set(found.values()) == {found["reference"]}
            continue
        for out in found.values():
            assert not isinstance(out, str)
            check(drawn.kinds, places, inputs, out)


def sources_of(backend: GpuBackend, held: Sequence[Table], rng: random.Random, how: str) -> list[RowSource]:
    """Tables where a GPU's may lie: hbm and split ones are steady, those that lie in host memory are not."""
    made: list[RowSource] = []
    for table in held:
        where = (
            rng.choice(["hbm", "split"])
            if how == "steady"
            else rng.choice(["hbm", "split", "mapped", "host"])
        )
        if where == "hbm" or tables.DEVICE != "interpreter":
            made.append(backend.place("hbm", table))
        elif where == "split":
            made.append(backend.place("hybrid", table, None, share=512))
        else:
            made.append(
                backend.place("zero_copy", table, None) if where == "mapped" else backend.place("host", table)
            )
    return made


@pytest.mark.thorough
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["steady", "any"]))
def test_a_planner_gives_what_plans_give_on_a_gpu(seed: int, how: str) -> None:
    """Packed or side by side, at any alignment, in HBM or not; its vectors and the CPU's are the
    reference's within rounding."""
    backend = tables.gpu_backend()
    assert isinstance(backend, GpuBackend)
    drawn = Drawn(seed)
    kinds = drawn.over(sources_of(backend, drawn.tables, drawn.rng, how))
    planner = backend.planner(kinds)
    for wrong in (False, True):
        places, inputs, out_bytes = drawn.request(wrong)
        found = outcome(planner.plan(places.tobytes(), out_bytes), inputs, out_bytes)
        assert found == outcome(planned(backend, kinds, places, out_bytes), inputs, out_bytes)
        native = outcome(planned(choose(), drawn.kinds, places, out_bytes), inputs, out_bytes)
        assert isinstance(found, str) == isinstance(native, str)
        if isinstance(found, str):
            assert found == native
            continue
        for out in (found, native):
            check(drawn.kinds, places, inputs, out)


def test_requests_of_one_planner_share_a_batch() -> None:
    """Each gets its own vectors, and the one with a wrong id its error."""
    backend = tables.gpu_backend()
    assert isinstance(backend, GpuBackend)
    drawn = Drawn(7)
    planner = backend.planner(drawn.over([placed(t) for t in drawn.tables]))
    requests = [drawn.request(wrong) for wrong in (False, True, False, False)]
    plans = [planner.plan(places.tobytes(), out_bytes) for places, _, out_bytes in requests]
    found = tables.run_batch(
        backend, [(plan, inputs) for plan, (_, inputs, _) in zip(plans, requests, strict=True)]
    )
    for plan, (_, inputs, out_bytes), answer in zip(plans, requests, found, strict=True):
        alone = outcome(plan, inputs, out_bytes)
        if isinstance(alone, str):
            assert isinstance(answer, BadIds)
        else:
            assert not isinstance(answer, BadIds)
            assert answer.tobytes()[:out_bytes] == alone


def test_a_lookup_beyond_a_launch_is_refused_by_a_planner_too() -> None:
    """The C routine leaves it to Python, which says how many there are."""
    backend = tables.gpu_backend()
    table = placed(table_of(RowFormat.INT8, 8))
    planner = backend.planner([LookupKind(table, Pooling.SUM)])
    with pytest.raises(QuantError, match="at most 2,147,483,647 of each run on a GPU"):
        planner.plan(np.array([Place(0, 0, 2**31, 0, 0, 1, -1, 0)], np.int64).tobytes())
    with pytest.raises(QuantError, match="3 bags of 2 ids are 6; the lookup has 5"):
        planner.plan(np.array([Place(0, 0, 5, -1, 2, 3, -1, 0)], np.int64).tobytes())


def test_moves_copy_parts_and_stay_in_their_buffers() -> None:
    """Parts in a row and parts apart; one that would leave a buffer is refused."""
    source, target = np.arange(40, dtype=np.uint8), np.zeros(40, np.uint8)
    _native.move_all(as_bytes([Move(1, 5, 4), Move(11, 20, 2, 3, 4, 6)]), source, target)
    expected = np.zeros(40, np.uint8)
    expected[5:9] = source[1:5]
    for n in range(3):
        expected[20 + 6 * n : 22 + 6 * n] = source[11 + 4 * n : 13 + 4 * n]
    np.testing.assert_array_equal(target, expected)
    for bad in (Move(38, 0, 4), Move(0, 38, 4), Move(0, 0, 2, 9, 5, 1), Move(0, 0, 2, 9, 1, 5)):
        with pytest.raises(ValueError, match="does not lie in its buffer"):
            _native.move_all(as_bytes([Move(0, 0, 4), bad]), source, target)
