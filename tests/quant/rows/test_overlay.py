"""Lookups in tables with overlays give what a dictionary of rows gives, by every backend of the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_backends import BACKENDS, cpu_backend
from indexed_tables import raw_table
from overlays import (
    KINDS,
    Overlaid,
    asked_of,
    changed,
    dense,
    fill_filter,
    fill_marks,
    marks_of,
    overlaid,
    raw,
)
from tables import check_vectors

from tableside.quant import BadIds, CpuBackend, Lookup, LookupKind, Place, Pooling, RowFormat
from tableside.quant.contract import Unfound
from tableside.quant.cpu import index_builder
from tableside.quant.errors import Problem
from tableside.quant.rows.overlay import Overlay, are_marks_worth_it, filter_bits, filter_words

LAYOUTS = [
    (RowFormat.INT8, 64),
    (RowFormat.INT8, 60),
    (RowFormat.INT4, 24),
    (RowFormat.FP16, 32),
    (RowFormat.FP32, 20),
]
COUNTS = (
    0,
    1,
    15,
    16,
    17,
    31,
    180,
    511,
    513,
    2047,
    2049,
    6000,
)  # around blocks of 16 ids, stretches of 512, pieces of 2048


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    yield from cpu_backend(request.param)


def check(backend: CpuBackend, made: Overlaid, asked: np.ndarray) -> None:
    check_vectors(backend, made.table, asked, made.plain, made.expected_rows(asked))


@pytest.mark.parametrize("is_above", [True, False], ids=["above", "below"])
@pytest.mark.parametrize(("row_format", "dim"), LAYOUTS, ids=lambda x: getattr(x, "label", x))
@pytest.mark.drawn(25)
def test_raw_ids_of_every_layout(
    backend: CpuBackend, row_format: RowFormat, dim: int, is_above: bool
) -> None:
    """Rows overwritten, inserted and deleted by two layers, at addresses above and below the table's."""
    made = raw(row_format, dim, is_above=is_above)
    check(backend, made, asked_of(made, KINDS["random"]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.drawn(27)
def test_raw_ids_of_every_kind(backend: CpuBackend, kind: str) -> None:
    """An empty table among them, over which all ids are an overlay's."""
    base = raw_table(KINDS[kind])
    new = np.setdiff1d(np.arange(50), KINDS[kind])
    made = overlaid(
        base.table, base.plain, base.numbers, [changed(KINDS[kind], 1), (new, np.zeros(new.size, np.bool_))]
    )
    check(backend, made, asked_of(made, KINDS[kind]))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("default", [True, False], ids=["default row", "refused"])
@pytest.mark.parametrize("is_above", [True, False], ids=["above", "below"])
@pytest.mark.parametrize("is_marked", [True, False], ids=["marks", "filters"])
def test_row_numbers(backend: CpuBackend, default: bool, is_above: bool, is_marked: bool) -> None:
    """Ids that are row numbers are overwritten, and deleted where there is a default row."""
    made = dense(default=default, is_above=is_above, is_marked=is_marked)
    for count in COUNTS:
        check(backend, made, asked_of(made, np.arange(300), count))


@pytest.mark.drawn(2)
def test_requests_of_every_length(backend: CpuBackend) -> None:
    made = raw()
    for count in COUNTS:
        check(backend, made, asked_of(made, KINDS["random"], count))


def test_refused_ids_are_told(backend: CpuBackend) -> None:
    """An id that an overlay deleted is refused like any that is missing, and one outside rows as without
    an overlay."""
    made = raw()
    row_map = made.table.row_map
    assert row_map is not None
    refusing = replace(made.table, row_map=replace(row_map, default_row=None))
    there = np.array(sorted(made.numbers))
    gone = next(i for i in KINDS["random"].tolist() if i not in made.numbers)
    backend.lookup(refusing, there, np.array([there.size], np.int32))
    with pytest.raises(BadIds) as caught:
        backend.lookup(refusing, np.append(there, gone), np.array([there.size + 1], np.int32))
    assert (caught.value.problem, caught.value.position, caught.value.value) == (
        Problem.MISSING,
        there.size,
        gone,
    )
    plain = dense(default=False)
    with pytest.raises(BadIds) as caught:
        backend.lookup(plain.table, np.array([1, 2, 300]), np.array([3], np.int32))
    assert (caught.value.problem, caught.value.position, caught.value.bound) == (Problem.ID, 2, 300)


@pytest.mark.parametrize("make", [raw, dense], ids=["raw", "dense"])
def test_found_masks_and_counts(backend: CpuBackend, make: Any) -> None:
    """A found mask says which ids have a row, and what was not found is counted; an overlay's rows are not
    backfilled."""
    made = make()
    asked = asked_of(made, KINDS["random"] if make is raw else np.arange(300), 333)
    plan = backend.plan([Lookup(made.table, Pooling.NONE, 0, asked.size, 0, found_at=asked.size * 256)])
    out = np.zeros(asked.size * 257, np.uint8)
    unfound = plan.run(asked.tobytes(), out)
    np.testing.assert_array_equal(out[asked.size * 256 :].astype(bool), made.expected_found(asked))
    assert unfound is not None and unfound[0] == Unfound(int((~made.expected_found(asked)).sum()), 0)


def test_backfilled_rows_that_are_overwritten_are_so_no_more(backend: CpuBackend) -> None:
    ids = KINDS["random"]
    base = raw_table(ids, backfilled=np.ones(ids.size, np.bool_))
    change = ids[:100], np.zeros(100, np.bool_)
    made = overlaid(base.table, base.plain, base.numbers, [change])
    place = np.array([Place(0, 0, ids.size, -1, ids.size, 1, -1, 0)], np.int64)
    unfound = backend.planner([LookupKind(made.table, Pooling.SUM)]).run(
        place, ids.tobytes(), np.zeros(256, np.uint8)
    )
    assert unfound is not None and unfound[0] == Unfound(0, ids.size - 100)


@pytest.mark.parametrize("is_marked", [True, False], ids=["marks", "filters"])
@pytest.mark.parametrize("default", [True, False], ids=["default row", "refused"])
@pytest.mark.drawn(10)
def test_calls_that_threads_share(backend: CpuBackend, default: bool, is_marked: bool) -> None:
    """More ids than one thread resolves alone, of jobs beside each other."""
    made = dense(RowFormat.INT4, 64, default, is_marked=is_marked)
    asked = asked_of(made, np.arange(300), 40_000)
    lengths = np.full(2000, 20, np.int32)
    expected = backend.lookup(made.plain, made.expected_rows(asked), lengths)
    for threads in (1, 2, 4):
        np.testing.assert_array_equal(
            backend.lookup(made.table, asked, lengths, threads=threads), expected, f"{threads} threads"
        )


def test_row_numbers_from_another_first_id_on(backend: CpuBackend) -> None:
    """Marks are by the number of the row, whatever its id is; ids below and above are missing."""
    first = -(2**40) + 7
    made = dense(first=first, is_marked=True)
    asked = first + np.random.default_rng(0).integers(-20, 330, 3000)
    check(backend, made, np.append(asked, [0, -(2**63), 2**63 - 1]))


@pytest.mark.parametrize("part", ["before", "slots"])
def test_marks_that_lie_lead_to_rows_of_their_layer(backend: CpuBackend, part: str) -> None:
    """Whatever a file holds, nothing outside a layer's rows is read."""
    made = dense(default=False, is_marked=True)
    row_map = made.table.row_map
    assert row_map is not None and isinstance(row_map.overlay, Overlay)
    for layer in row_map.overlay.layers:
        assert layer.marks is not None
        getattr(layer.marks, part)[:] = 2**32 - 1
    numbers = made.expected_rows(np.arange(300))
    found = backend.lookup(made.table, np.arange(300), pooling=Pooling.NONE)
    own = numbers < 300
    np.testing.assert_array_equal(found[own], backend.lookup(made.plain, numbers[own], pooling=Pooling.NONE))
    there = backend.lookup(made.plain, np.arange(300, len(made.plain.packed)), pooling=Pooling.NONE)
    assert {row.tobytes() for row in found[~own]} <= {row.tobytes() for row in there}


def test_marks_are_for_layers_of_more_rows_than_they_take_memory() -> None:
    assert are_marks_worth_it(10_000_000, 375_000, 80)
    assert not are_marks_worth_it(10_000_000, 374_999, 80)
    assert not are_marks_worth_it(10_000_000, 0, 80)


FILTERED = {"consecutive": np.arange(10_000), "high bits": np.arange(10_000) << 32}
FILTERED["random"] = np.random.default_rng(0).integers(-(2**63), 2**63, 10_000)


@pytest.mark.parametrize("ids", FILTERED.values(), ids=FILTERED)
def test_the_filter_lets_all_ids_of_a_layer_pass_and_few_others(ids: np.ndarray) -> None:
    words = np.zeros(filter_words(ids.size), np.uint64)
    fill_filter(ids, words)

    def passes(asked: np.ndarray) -> np.ndarray:
        at, bits = filter_bits(asked, words.size)
        return words[at] & bits == bits

    assert passes(ids).all()
    assert passes(np.random.default_rng(1).integers(0, 2**40, 100_000)).mean() < 0.005


@pytest.mark.parametrize("ids", FILTERED.values(), ids=FILTERED)
def test_the_native_kernel_fills_filters_as_specified(ids: np.ndarray) -> None:
    expected, found = np.zeros((2, filter_words(ids.size)), np.uint64)
    fill_filter(ids, expected)
    index_builder.fill_filter(ids, found)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_the_native_kernel_fills_marks_as_specified(share: float) -> None:
    """Of ids from another first one on, in any order."""
    rng, first, count = np.random.default_rng(0), -500, 10_001
    ids = first + rng.permutation(count)[: int(share * count)]
    slots = rng.permutation(ids.size + 7)[: ids.size]
    expected, found = (
        marks_of(first, count, ids, slots, ids.size + 7, fill)
        for fill in (fill_marks, index_builder.fill_marks)
    )
    for of_found, of_expected in zip(found, expected, strict=True):
        np.testing.assert_array_equal(of_found, of_expected)
