"""Ids by table and owner: what the C function gives is what numpy gives."""

from typing import Any

import numpy as np
import pytest

from tableside.quant.cpu import _native
from tableside.quant.rows.ids import bucket_of

pytestmark = pytest.mark.quick
EXTREMES = np.array([0, -1, 1, 2**63 - 1, -(2**63), 2**32, 999, 1000], np.int64)
SHAPES = [(0, 0), (1, 0), (64, 0), (64, 20)]


def split(inputs: Any, jobs: Any, tables: Any, ends: Any) -> tuple[np.ndarray, ...]:
    jobs, tables = np.array(jobs, np.int64).reshape(-1, 3), np.array(tables, np.int64)
    n = int(jobs[:, 1].sum())
    distinct, at = np.empty(n, np.int64), np.empty(n, np.int64)
    counts = np.empty((len(tables), ends.shape[1] + 1), np.int64)
    total = _native.split_ids(inputs, jobs, tables, ends, distinct, at, counts)
    return distinct[:total], at, counts


@pytest.mark.parametrize("owners", [1, 2, 7])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 5000])
def test_each_id_is_asked_of_its_owner_once(owners: int, n: int) -> None:
    """Of several tables, each asked by several lookups or by none; also ids that no owner has, those that
    come again, and extremes; at any alignment."""
    draw = np.random.default_rng(n + owners)
    tables = [(*shape, 1000 * t) for t, shape in enumerate(SHAPES)]
    ends = np.array([[(b or 1000) * (k + 1) // owners for k in range(owners)] for b, *_ in tables], np.int64)
    jobs, inputs, ids = [], b"x", []
    for table in (0, 1, 1, 3, 3, 3):
        some = draw.integers(-50, 1500, draw.integers(0, n + 1))
        strange = draw.random(some.size) < 0.1
        some[strange] = draw.choice(EXTREMES, int(strange.sum()))
        jobs.append((len(inputs), some.size, table))
        inputs += some.tobytes()
        ids.append(some)
    distinct, at, counts = split(inputs, jobs, tables, ends)
    start = here = 0
    for t, (buckets, bucket_ids, first) in enumerate(tables):
        of_jobs = [some for some, job in zip(ids, jobs, strict=True) if job[2] == t]
        asked = np.concatenate([np.empty(0, np.int64), *of_jobs])
        of_table = distinct[start : start + counts[t].sum()]
        assert np.array_equal(of_table[at[here : here + asked.size] - first], asked)
        assert of_table.size == np.unique(asked).size
        units = np.where((of_table < 0) | (of_table >= 1000), -1, of_table)
        units = bucket_of(of_table, buckets, bucket_ids) if buckets else units
        expected = np.where(units < 0, owners, ends[t].searchsorted(units, "right"))
        assert np.array_equal(expected, np.repeat(np.arange(owners + 1), counts[t]))
        start, here = start + of_table.size, here + asked.size
    assert start == distinct.size


WRONG = {
    "ids behind the inputs": {"jobs": [(8, 4, 0)]},
    "a negative place": {"jobs": [(-8, 4, 0)]},
    "a place that wraps": {"jobs": [(2**62, 4, 0)]},
    "fewer ids than room": {"jobs": [(0, 3, 0)]},
    "a negative count": {"jobs": [(0, 5, 0), (0, -1, 0)]},
    "no such table": {"jobs": [(0, 4, 1)]},
    "tables that do not ascend": {"jobs": [(0, 2, 1), (0, 2, 0)], "tables": [(0, 0, 0), (0, 0, 0)]},
    "buckets that are no power of two": {"tables": [(3, 0, 0)]},
    "negative buckets": {"tables": [(-2, 0, 0)]},
    "negative ids of a bucket": {"tables": [(2, -1, 0)]},
    "no table": {"tables": [], "jobs": []},
    "ends of another table": {"ends": np.array([[1, 2], [3, 4]])},
    "no owner": {"ends": np.empty((1, 0), np.int64)},
}


@pytest.mark.parametrize("case", WRONG)
def test_buffers_that_do_not_belong_together_are_refused(case: str) -> None:
    said = {"jobs": [(0, 4, 0)], "tables": [(0, 0, 0)], "ends": np.array([[10]]), **WRONG[case]}
    jobs, tables = np.array(said["jobs"], np.int64), np.array(said["tables"], np.int64)
    distinct, at, counts = np.empty(4, np.int64), np.empty(4, np.int64), np.empty((1, 2), np.int64)
    if len(tables) == 2:
        counts, said["ends"] = np.empty((2, 2), np.int64), np.array([[10], [10]])
    with pytest.raises(ValueError, match="do not belong together"):
        _native.split_ids(bytes(32), jobs, tables, said["ends"], distinct, at, counts)
