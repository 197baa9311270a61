"""Ids by table and owner: what the C function gives is what numpy gives."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from tableside.quant.cpu import _native
from tableside.quant.rows.hot import HotRows, fill_hot, hot_words
from tableside.quant.rows.ids import bucket_of

pytestmark = pytest.mark.quick
EXTREMES = np.array([0, -1, 1, 2**63 - 1, -(2**63), 2**32, 999, 1000], np.int64)
SHAPES = [(0, 0), (1, 0), (64, 0), (64, 20)]


ROW_BYTES = (8, 12, 68, 8)


def split(inputs: Any, jobs: Any, tables: Any, ends: Any, base: int) -> tuple[np.ndarray, ...]:
    return split_of(inputs, jobs, [(*table, base, 0, 0, 0, 0) for table in tables], ends)


def split_of(inputs: Any, jobs: Any, tables: Any, ends: Any) -> tuple[np.ndarray, ...]:
    jobs, tables = np.array(jobs, np.int64).reshape(-1, 3), np.array(tables, np.int64)
    n, groups = int(jobs[:, 1].sum()), ends.shape[1] + 1
    distinct, at = np.empty(n, np.int64), np.empty(n, np.int64)
    blocks = np.empty((3, len(tables), groups), np.int64)
    room = n * (1 + tables[:, 2].max()) + groups * (16 + int(tables[:, 2].sum()))
    staging = np.empty(room + 1, np.uint8)[1:]  # at an odd address
    total = _native.split_ids(inputs, jobs, tables, ends, distinct, at, blocks, staging)
    return distinct[:total], at, blocks, staging


@pytest.mark.parametrize("base", [-1, 0, 4096])
@pytest.mark.parametrize("owners", [1, 2, 7])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 5000])
def test_each_id_is_asked_of_its_owner_once(owners: int, n: int, base: int) -> None:
    """Of several tables, each asked by several lookups or by none; also ids that no owner has, those that
    come again, and extremes; at any alignment. Rows lie apart, with room around those of an owner, and each
    has the number that its id was given."""
    draw = np.random.default_rng(n + owners)
    tables = [(*shape, row_bytes) for shape, row_bytes in zip(SHAPES, ROW_BYTES, strict=True)]
    ends = np.array([[(b or 1000) * (k + 1) // owners for k in range(owners)] for b, *_ in tables], np.int64)
    jobs, inputs, ids = [], b"x", []
    for table in (0, 1, 1, 3, 3, 3):
        some = draw.integers(-50, 1500, draw.integers(0, n + 1))
        strange = draw.random(some.size) < 0.1
        some[strange] = draw.choice(EXTREMES, int(strange.sum()))
        jobs.append((len(inputs), some.size, table))
        inputs += some.tobytes()
        ids.append(some)
    distinct, at, (counts, places, firsts), staging = split(inputs, jobs, tables, ends, base)
    starts = (counts.T.cumsum().reshape(owners + 1, -1) - counts.T).T
    here = 0
    for t, (buckets, bucket_ids, row_bytes) in enumerate(tables):
        of_jobs = [some for some, job in zip(ids, jobs, strict=True) if job[2] == t]
        asked = np.concatenate([np.empty(0, np.int64), *of_jobs])
        numbers, of_table = np.empty(0, np.int64), np.empty(0, np.int64)
        for owner in range(owners + 1):
            some = distinct[starts[t, owner] :][: counts[t, owner]]
            units = bucket_of(some, buckets, bucket_ids) if buckets else some
            expected = np.where((units < 0) | (units >= (buckets or 1000)), owners, 0)
            expected[expected == 0] = ends[t].searchsorted(units[expected == 0], "right")
            assert (expected == owner).all()
            if some.size and base >= 0:
                assert firsts[t, owner] * row_bytes + base == staging.ctypes.data + places[t, owner]
            numbers = np.append(numbers, firsts[t, owner] + np.arange(some.size))
            of_table = np.append(of_table, some)
        assert np.unique(numbers).size == numbers.size and np.array_equal(np.sort(numbers), numbers)
        assert base >= 0 or np.array_equal(numbers, np.arange(numbers.size))
        assert np.array_equal(of_table[numbers.searchsorted(at[here : here + asked.size])], asked)
        assert of_table.size == np.unique(asked).size
        here += asked.size
    assert counts.sum() == distinct.size
    end = 0
    for owner in np.flatnonzero(counts.sum(0)).tolist():
        end += -(-int(counts[:, owner].sum()) // 8) * 8
        for t in np.flatnonzero(counts[:, owner]).tolist():
            assert places[t, owner] >= end
            end = int(places[t, owner] + counts[t, owner] * ROW_BYTES[t])
        end += 8
    assert end <= staging.size


class Hot(NamedTuple):
    """Hot rows of a table, and what `split_ids` is told of it."""

    marked: np.ndarray
    rows: HotRows
    table: tuple[int, ...]

    @classmethod
    def of(cls, share: float, row_bytes: int, seed: int) -> "Hot":
        marked = np.flatnonzero(np.random.default_rng(seed).random(1000) < share)
        marks = np.zeros((hot_words(1000), 2), np.uint64)
        fill_hot(marked, marks)
        packed = np.zeros(marked.size * row_bytes + seed, np.uint8)[seed:].reshape(-1, row_bytes)
        base = packed.ctypes.data % row_bytes
        rows = HotRows(marks, packed, (packed.ctypes.data - base) // row_bytes)
        address, first, slots, numbered = rows.native
        return cls(marked, rows, (0, 0, row_bytes, base, address, numbered, first, slots))


@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.5, 0.3), (1.0, 0.0), (1.0, 1.0)])
def test_hot_rows_are_asked_of_nobody(shares: tuple[float, float]) -> None:
    """They have the numbers that `HotRows` specifies, of each of two tables; of the others each is asked for
    once, as ever."""
    draw = np.random.default_rng(3)
    ids = [np.concatenate((draw.integers(-50, 1100, 3000), EXTREMES)) for _ in shares]
    size, hot = ids[0].size, [Hot.of(share, 12 + 4 * t, t + 1) for t, share in enumerate(shares)]
    jobs = [(8 * size * t, size, t) for t in range(2)]
    ends = np.array([[1000], [1000]])
    inputs = np.concatenate(ids).tobytes()
    distinct, at, (counts, places, firsts), staging = split_of(inputs, jobs, [h.table for h in hot], ends)
    starts = (counts.T.cumsum().reshape(2, -1) - counts.T).T
    for t, (marked, rows, (_, _, row_bytes, base, *_)) in enumerate(hot):
        got, is_hot = at[size * t :][:size], np.isin(ids[t], marked)
        np.testing.assert_array_equal(got[is_hot], rows.place(ids[t][is_hot]))
        asked = [distinct[starts[t, o] :][: counts[t, o]] for o in range(2)]
        numbers = np.concatenate([firsts[t, o] + np.arange(counts[t, o]) for o in range(2)])
        assert set(np.concatenate(asked).tolist()) == set(ids[t][~is_hot].tolist())
        found = dict(zip(numbers.tolist(), np.concatenate(asked).tolist(), strict=True))
        assert [found[number] for number in got[~is_hot].tolist()] == ids[t][~is_hot].tolist()
        for o in np.flatnonzero(counts[t]).tolist():
            assert firsts[t, o] * row_bytes + base == staging.ctypes.data + places[t, o]
    assert distinct.size == counts.sum()


@pytest.mark.parametrize("wrong", [1 << 40, 1000, 2**64 - 1])
def test_marks_that_changed_read_no_other_memory(wrong: int) -> None:
    """A row whose slot is none is asked for as one that is not hot."""
    hot = Hot.of(1.0, 12, 1)
    hot.rows.marks[:, 1] = wrong
    ids = np.arange(1000)
    distinct, at, _, _ = split_of(ids.tobytes(), [(0, 1000, 0)], [hot.table], np.array([[1000]]))
    first, slots = hot.table[-2:]
    is_hot = (at >= first) & (at < first + slots)
    np.testing.assert_array_equal(np.sort(distinct), ids[~is_hot])
    slots_said = np.uint64(wrong) + (ids % 64).astype(np.uint64)
    np.testing.assert_array_equal(is_hot, slots_said < slots)


WRONG = {
    "ids behind the inputs": {"jobs": [(8, 4, 0)]},
    "a negative place": {"jobs": [(-8, 4, 0)]},
    "a place that wraps": {"jobs": [(2**62, 4, 0)]},
    "fewer ids than room": {"jobs": [(0, 3, 0)]},
    "a negative count": {"jobs": [(0, 5, 0), (0, -1, 0)]},
    "no such table": {"jobs": [(0, 4, 1)]},
    "tables that do not ascend": {"jobs": [(0, 2, 1), (0, 2, 0)], "tables": [(0, 0, 8), (0, 0, 8)]},
    "buckets that are no power of two": {"tables": [(3, 0, 8)]},
    "negative buckets": {"tables": [(-2, 0, 8)]},
    "negative ids of a bucket": {"tables": [(2, -1, 8)]},
    "rows without bytes": {"tables": [(0, 0, 0)]},
    "rows beyond the room": {"tables": [(0, 0, 16)]},
    "a base behind the room": {"base": 1 << 60},
    "marks nowhere": {"hot": (0, 64, 0, 1)},
    "marks of fewer rows than none": {"hot": (1, -1, 0, 1)},
    "a hot row before the first number": {"hot": (1, 64, -1, 1)},
    "fewer hot rows than none": {"hot": (1, 64, 0, -1)},
    "marks of raw ids": {"tables": [(2, 0, 8)], "hot": (1, 64, 0, 1)},
    "no table": {"tables": [], "jobs": []},
    "ends of another table": {"ends": np.array([[1, 2], [3, 4]])},
    "no owner": {"ends": np.empty((1, 0), np.int64)},
}


@pytest.mark.parametrize("case", WRONG)
def test_buffers_that_do_not_belong_together_are_refused(case: str) -> None:
    said = {
        "jobs": [(0, 4, 0)],
        "tables": [(0, 0, 8)],
        "ends": np.array([[10]]),
        "base": 0,
        "hot": (0, 0, 0),
        **WRONG[case],
    }
    jobs = np.array(said["jobs"], np.int64)
    tables = np.array([(*t, said["base"], *said["hot"]) for t in said["tables"]], np.int64)
    distinct, at, blocks = np.empty(4, np.int64), np.empty(4, np.int64), np.empty((3, 1, 2), np.int64)
    if len(tables) == 2:
        blocks, said["ends"] = np.empty((3, 2, 2), np.int64), np.array([[10], [10]])
    staging = np.empty(56, np.uint8)
    given = jobs, tables, said["ends"], distinct, at, blocks, staging
    with pytest.raises(ValueError, match="do not belong together"):
        _native.split_ids(np.arange(4), *given)
