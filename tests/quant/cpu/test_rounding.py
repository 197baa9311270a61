"""The bounds that lookups are held to (tests/helpers/rounding.py) let a wrong value through nowhere, and
hold what is right."""

import numpy as np
import pytest
from reference import REFERENCE
from rounding import Expected, expect
from tables import table_of

from tableside.quant import Pooling, Precision, RowFormat

LENGTHS = np.array([2, 0, 70], np.int32)
IDS = np.random.default_rng(5).integers(2, 200, 72)
WEIGHTS = np.random.default_rng(6).standard_normal(72).astype(np.float32)


def weighted(row_format: RowFormat, precision: Precision) -> Expected:
    return expect(
        table_of(row_format, 24), IDS, LENGTHS, pooling=Pooling.SUM, weights=WEIGHTS, precision=precision
    )


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16], ids=lambda p: p.name)
@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
def test_an_error_of_twice_the_bound_is_found_wherever_it_is(
    row_format: RowFormat, precision: Precision
) -> None:
    """In every value of a short bag and of a long one; nine tenths of the bound pass."""
    wanted = weighted(row_format, precision)
    exact = wanted.vectors.astype(np.float64)
    for bag in (0, 2):
        for value in range(exact.shape[1]):
            moved = exact.copy()
            moved[bag, value] += 0.9 * wanted.bounds[bag, value]
            wanted.check(moved)
            moved[bag, value] = exact[bag, value] + max(2 * wanted.bounds[bag, value], 1e-30)
            with pytest.raises(AssertionError, match=f"value {value} of vector {bag} is"):
                wanted.check(moved)


def test_a_bag_is_not_given_what_another_one_needs() -> None:
    """A long bag of large rows beside it widens no other bag's bound; weighted fp16 once had 15.6 for all."""
    table, weights = table_of(RowFormat.FP16, 24), np.ones(72, np.float32)
    size = np.abs(REFERENCE.dequantize(table)).max(1)
    small, large = int(np.argsort(size)[2]), int(np.argmax(size))
    ids, half = np.array([small] * 2 + [large] * 70), Precision.FP16
    both = expect(table, ids, LENGTHS, pooling=Pooling.SUM, weights=weights, precision=half)
    alone = expect(table, ids[:2], LENGTHS[:1], pooling=Pooling.SUM, weights=weights[:2], precision=half)
    np.testing.assert_array_equal(both.bounds[0], alone.bounds[0])
    assert both.bounds[0].max() <= 2 * size[small] * 2.0**-10
    assert both.bounds[2].max() > 1000 * both.bounds[0].max()


def test_an_empty_bag_is_zeros_exactly() -> None:
    wanted = weighted(RowFormat.INT8, Precision.FP32)
    moved = wanted.vectors.copy()
    moved[1, 3] = 1e-30
    with pytest.raises(AssertionError, match="value 3 of vector 1"):
        wanted.check(moved)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_found(value: float) -> None:
    wanted = weighted(RowFormat.INT8, Precision.FP32)
    moved = wanted.vectors.copy()
    moved[0, 0] = value
    with pytest.raises(AssertionError, match="value 0 of vector 0"):
        wanted.check(moved)


@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
def test_any_order_of_additions_in_fp32_is_within_the_bound(row_format: RowFormat) -> None:
    """Sums and means of rows added from the front, from the back, smallest first, and in pairs, every step
    rounded to fp32."""
    table = table_of(row_format, 24)
    rows = REFERENCE.lookup(table, IDS, pooling=Pooling.NONE)
    for pooling in (Pooling.SUM, Pooling.MEAN):
        wanted = expect(table, IDS, LENGTHS, pooling=pooling)
        for order in ("front", "back", "smallest", "pairs"):
            bags = [rows[:2], rows[:0], rows[2:]]
            found = np.stack([_added(bag, order) for bag in bags])
            divisor = (
                np.maximum(LENGTHS, 1)[:, None].astype(np.float32)
                if pooling is Pooling.MEAN
                else np.float32(1)
            )
            wanted.check(found / divisor)


def _added(rows: np.ndarray, order: str) -> np.ndarray:
    if order == "smallest":
        rows = np.take_along_axis(rows, np.argsort(np.abs(rows), 0), 0)
    if order == "back":
        rows = rows[::-1]
    if order == "pairs":
        while len(rows) > 1:
            odd = rows[len(rows) // 2 * 2 :]
            rows = np.concatenate([rows[0 : len(rows) - 1 : 2] + rows[1::2], odd])
        return rows[0] if len(rows) else np.zeros(rows.shape[1], np.float32)
    total = np.zeros(rows.shape[1], np.float32)
    for row in rows:
        total = total + row
    return total
