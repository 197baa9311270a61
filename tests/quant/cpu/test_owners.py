"""Ids by their owners: what the C function gives is what numpy gives."""

import numpy as np
import pytest

from tableside.quant.cpu import _native
from tableside.quant.cpu.owners import Owners
from tableside.quant.rows.ids import bucket_of

pytestmark = pytest.mark.quick
EXTREMES = np.array([0, -1, 1, 2**63 - 1, -(2**63), 2**32, 999, 1000], np.int64)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(("buckets", "bucket_ids"), [(0, 0), (1, 0), (64, 0), (64, 20)])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 5000])
def test_each_id_is_asked_of_its_owner_once(count: int, buckets: int, bucket_ids: int, n: int) -> None:
    """Also ids that no owner has, those that come again, and extremes."""
    draw = np.random.default_rng(n + count)
    ids = draw.integers(-50, 1500, n)
    ids[draw.random(n) < 0.1] = draw.choice(EXTREMES, 1)
    ends = np.array([(buckets or 1000) * (k + 1) // count for k in range(count)], np.int64)
    units = bucket_of(ids, buckets, bucket_ids) if buckets else np.where((ids < 0) | (ids >= 1000), -1, ids)
    owners = np.where(units < 0, count, ends.searchsorted(units, "right"))
    found = Owners(ends, buckets, bucket_ids).split(ids)
    assert np.array_equal(found.distinct[found.at], ids)
    assert found.distinct.size == np.unique(ids).size == found.ends[-1]
    of_distinct = dict(zip(ids.tolist(), owners.tolist(), strict=True))
    starts = [0, *found.ends]
    for owner in range(count + 1):
        of_owner = found.distinct[starts[owner] : starts[owner + 1]].tolist()
        assert {of_distinct[one] for one in of_owner} <= {owner}


def test_ids_in_a_strided_view() -> None:
    ids = np.arange(20)[::2]
    assert sorted(Owners(np.array([10, 20])).split(ids).distinct.tolist()) == ids.tolist()


@pytest.mark.parametrize(
    ("ends", "buckets", "distinct", "at", "counts"),
    [(1, 0, 3, 4, 2), (1, 0, 4, 3, 2), (1, 0, 4, 4, 1), (0, 0, 4, 4, 1), (1, 3, 4, 4, 2), (1, -2, 4, 4, 2)],
)
def test_buffers_that_do_not_belong_together_are_refused(
    ends: int, buckets: int, distinct: int, at: int, counts: int
) -> None:
    arrays = [np.zeros(size, np.int64) for size in (4, ends, distinct, at, counts)]
    with pytest.raises(ValueError, match="do not belong together"):
        _native.split_ids(arrays[0], arrays[1], buckets, 0, *arrays[2:])
