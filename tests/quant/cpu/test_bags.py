"""Bags as lookups take them: lengths, parts and places of the extension, against plain Python.

`make test-sanitized` runs these with the sanitizers, which see what a read beyond a buffer does not show
here.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from bag_forms import ENDS, LENGTHS, OFFSETS
from hypothesis import given, settings
from hypothesis import strategies as st

from tableside.quant import Place
from tableside.quant.contract import places_in
from tableside.quant.cpu.bags import MOST_IDS, feature_places, lengths_of, parts_of

HOSTILE = [
    -(2**63),
    -(2**32),
    -1,
    0,
    1,
    7,
    2**31 - 1,
    2**31,
    2**32,
    2**60,
    2**61,
    2**62,
    2**63 - 8,
    2**63 - 1,
]


def lengths_as_specified(items: Sequence[int], ids: int, form: int) -> list[int] | None:
    """What `lengths_of` promises, in plain Python."""
    if (
        ids > 2**31 - 1
        or not all(0 <= item <= ids for item in items)
        or (form != LENGTHS and items and items[0])
    ):
        return None
    if form == LENGTHS:
        return list(items)
    return [end - start for start, end in pairwise([*items, ids] if form == OFFSETS else items)]


def read(found: tuple[object, int] | None, count: int) -> list[int] | None:
    """Lengths as their address tells of them."""
    if found is None:
        return None
    return list((ctypes.c_int32 * count).from_address(found[1])) if count else []


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.drawn(0.5)
def test_lengths_are_those_that_plain_python_gives(data: st.DataObject) -> None:
    """Good ones, those that a hostile number spoils, and offsets that descend; at any alignment."""
    form, dtype = (
        data.draw(st.sampled_from([LENGTHS, OFFSETS, ENDS])),
        data.draw(st.sampled_from([np.int32, np.int64])),
    )
    ids = data.draw(st.sampled_from([0, 1, 60, 2**31 - 1, 2**31, 2**40]))
    items = [0, *data.draw(st.lists(st.integers(0, min(ids, 2**31 - 1)), max_size=20))]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(items) - 1))
        items[at] = data.draw(
            st.sampled_from([h for h in HOSTILE if np.iinfo(dtype).min <= h <= np.iinfo(dtype).max])
        )
    if form != ENDS and data.draw(st.booleans()):
        items = items[: data.draw(st.integers(0, 2))]
    lead = data.draw(st.integers(0, 9))
    memory = bytes(lead) + np.array(items, dtype).tobytes()
    found = lengths_of(memory, lead, dtype().itemsize, len(items), ids, form)
    assert read(found, len(items) - (form == ENDS)) == lengths_as_specified(items, ids, form)


@pytest.mark.parametrize("form", [LENGTHS, OFFSETS, ENDS])
def test_lengths_outside_of_the_memory_are_refused(form: int) -> None:
    """Wherever they begin, and however many they say they are."""
    memory = bytes(64)
    for at, items in (
        (0, 9),
        (1, 8),
        (64, 1),
        (-8, 1),
        (8, 2**61),
        (2**62, 1),
        (0, 2**62),
        (0, -1),
        (0, -(2**62)),
    ):
        with pytest.raises(ValueError):
            lengths_of(memory, at, 8, items, 5, form)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_parts_are_the_first_id_of_each_feature_and_how_many_it_has(data: st.DataObject) -> None:
    """Or None, where a length is wrong or they do not add up."""
    features, count = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 4))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=features * count, max_size=features * count))
    ids = sum(lengths) + data.draw(st.sampled_from([0, 0, 0, 1]))
    if lengths and data.draw(st.booleans()):
        lengths[data.draw(st.integers(0, len(lengths) - 1))] = data.draw(
            st.sampled_from([-1, -(2**31), 2**31 - 1, 1000])
        )
        ids = data.draw(st.sampled_from([ids, max(0, sum(lengths))]))
    found = parts_of(b"xyz" + np.array(lengths, np.int32).tobytes(), 3, features, count, ids)
    if min(lengths, default=0) < 0 or sum(lengths) != ids or ids > MOST_IDS:
        assert found is None
        return
    assert found is not None
    counts = [sum(lengths[f * count : (f + 1) * count]) for f in range(features)]
    starts = [sum(counts[:f]) for f in range(features)]
    assert np.frombuffer(found, np.int64).tolist() == starts + counts


@pytest.mark.parametrize(
    ("at", "features", "count"),
    [(0, 3, 3), (4, 2, 4), (-4, 1, 1), (0, 0, 4), (0, 2**40, 2**40), (0, 2**62, 1)],
)
def test_parts_outside_of_the_memory_are_refused(at: int, features: int, count: int) -> None:
    """And so are none."""
    with pytest.raises((ValueError, OverflowError)):
        parts_of(bytes(32), at, features, count, 0)


@pytest.mark.parametrize("order", [None, [2, 0], [1, 1]])
@pytest.mark.parametrize("weights_at", [-1, 9000])
def test_places_are_those_of_the_features(order: list[int] | None, weights_at: int) -> None:
    """Ids, lengths and weights from the feature's first on, vectors in the lookup's column."""
    parts = np.array([[0, 4, 10], [4, 6, 1]], np.int64).tobytes()
    columns = [0, 64, 96] if order is None else [0, 64]
    found = feature_places(
        parts, order, np.array(columns, np.int64).tobytes(), 1000, 5000, 3, weights_at, 20000, 128
    )
    places = places_in(found)
    assert len(places) == len(columns)
    for k, (place, column, f) in enumerate(zip(places, columns, order or range(3), strict=True)):
        start, count = ((0, 4), (4, 6), (10, 1))[f]
        of_weights = -1 if weights_at < 0 else weights_at + 4 * start
        lengths_at, out_at = 5000 + 12 * f, 20000 + column
        assert place == Place(k, 1000 + 8 * start, count, lengths_at, 0, 3, of_weights, out_at, 128)


@pytest.mark.parametrize("order", [[0], [0, 1, 2], [0, 3], [-1, 0], [0, 2**40]])
def test_features_that_are_not_there_are_refused(order: list[int]) -> None:
    """And a number of lookups that is not that of the columns."""
    with pytest.raises(ValueError):
        feature_places(
            np.zeros((2, 3), np.int64).tobytes(), order, np.zeros(2, np.int64).tobytes(), 0, 0, 1, -1, 0, 0
        )


def test_hostile_numbers_make_no_read() -> None:
    """Places are arithmetic, which may wrap: the lookup refuses what lies in no buffer."""
    for number in HOSTILE:
        feature_places(
            np.full((2, 1), number, np.int64).tobytes(),
            None,
            bytes(8),
            number,
            number,
            number,
            number,
            number,
            number,
        )
