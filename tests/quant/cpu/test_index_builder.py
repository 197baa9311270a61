"""Indexes of raw ids are built whatever the ids are, and each id gets a row of its own."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_tables import built, check_index, kinds_of_ids, rows_in, unmix, unspread

from tableside.quant.cpu import (
    _native,
    index_builder,
)
from tableside.quant.cpu.index_builder import KEEP, DuplicateId, IndexBuilder
from tableside.quant.errors import QuantError
from tableside.quant.rows.ids import IdIndex, NativeRowMap, slots_for

KINDS = kinds_of_ids()


def put(builder: IndexBuilder, ids: list[int]) -> np.ndarray:
    """Records of these ids, whose sources are their places in the list."""
    array, sources = np.array(ids, np.int64), np.arange(len(ids))
    builder.count(array)
    records = np.zeros((builder.begin(), 2), np.int64)
    builder.put(array, sources, records)
    return records


@pytest.mark.parametrize("buckets", [1, 4, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_every_kind_are_placed(kind: str, buckets: int) -> None:
    """Those that were made to meet in a hash table's bucket, pilot or slot as well."""
    check_index(built(KINDS[kind], buckets), KINDS[kind])


@pytest.mark.parametrize("bits", range(17))
def test_every_number_of_buckets(bits: int) -> None:
    """Up to 2^16, most of which are empty then; and each id is in the bucket that the specification says."""
    ids = np.random.default_rng(bits).permutation(3000).astype(np.int64) * 1_000_003
    index = built(ids, 1 << bits)
    rows = check_index(index, ids)
    bucket = np.searchsorted(index.directory[:, 0], rows, "right") - 1
    np.testing.assert_array_equal(bucket, index.bucket_of(ids))


@pytest.mark.parametrize(
    "count", [*range(9), 62, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1023, 1024, 6399, 6400, 6401]
)
def test_sizes_of_a_bucket_around_the_steps_of_its_slots(count: int) -> None:
    check_index(built(np.arange(count) * 17 - 5, 1), np.arange(count) * 17 - 5)


@pytest.mark.parametrize("count", [2, 3, 64, 65, 66, 500, 5000])
@pytest.mark.parametrize("step", [1, 1 << 12, 1 << 24])
def test_ids_that_share_a_pilot_by_the_first_seed(count: int, step: int) -> None:
    """More than one pilot can serve: another seed is taken, which the directory says."""
    spreads = np.uint64(0x12345678 << 32) | np.arange(count, dtype=np.uint64) * np.uint64(step) % np.uint64(
        1 << 32
    )
    ids = np.unique(unspread(spreads))
    index = built(ids, 1)
    check_index(index, ids)
    assert len(ids) <= 64 or index.directory[0, 1] > 0


@pytest.mark.parametrize("seeds", [1, 3, 8])
def test_ids_that_share_a_pilot_by_several_seeds(seeds: int) -> None:
    """A group for each seed, so that each of those seeds is refused: the next one is taken."""
    groups = [
        unspread(np.arange(100, dtype=np.uint64) | np.uint64(0x77777777 << 32), seed) for seed in range(seeds)
    ]
    ids = np.unique(np.concatenate(groups))
    index = built(ids, 1)
    check_index(index, ids)
    assert index.directory[0, 1] >= seeds


@pytest.mark.parametrize("shift", [0, 4, 10, 20, 30, 40, 50])
@pytest.mark.parametrize("count", [300, 4000])
def test_ids_whose_hashes_are_equally_far_apart(count: int, shift: int) -> None:
    """Whose pilots would all have as many ids, and the last ones no slots, if they were chosen by a
    product alone."""
    ids = unmix(np.arange(count, dtype=np.uint64) << np.uint64(shift) | np.uint64(2 if shift > 1 else 0))
    check_index(built(ids, 1), np.unique(ids))


def test_many_ids_of_one_bucket() -> None:
    """10^5 ids whose hashes end alike, in the last of 1024 buckets; the others are empty and take no rows."""
    ids = unmix((np.arange(100_000, dtype=np.uint64) << np.uint64(10)) | np.uint64(1023))
    index = built(ids, 1024)
    check_index(index, ids)
    assert index.directory[1023, 0] == 0 and index.slots == slots_for(100_000)


@pytest.mark.parametrize(("buckets", "bucket_ids"), [(1024, 0), (8, 10_000)])
def test_one_thread_and_two_build_the_same(buckets: int, bucket_ids: int) -> None:
    """Byte for byte, in whatever blocks the ids come."""
    ids = np.random.default_rng(1).permutation(80_000).astype(np.int64)
    one, two = (built(ids, buckets, bucket_ids, threads, blocks) for threads, blocks in ((1, 1), (2, 5)))
    assert one.directory.tobytes() == two.directory.tobytes() and one.pilots.tobytes() == two.pilots.tobytes()


@pytest.mark.thorough
def test_ten_million_ids() -> None:
    """Each has a row of its own, and those whose bits differ from theirs in one place mostly have rows
    that others keep."""
    count = 10_000_000
    ids = (np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(
        np.int64
    )  # odd: all are different
    index = built(ids, 1024, threads=0, blocks=10)
    rows = rows_in(index, ids)
    taken = np.zeros(index.slots, np.bool_)
    taken[rows] = True
    assert np.count_nonzero(taken) == count
    assert index.slots <= count * 65 / 64 + 1024
    kept = np.zeros(index.slots, np.int64)
    kept[rows] = ids
    some = IdIndex(index.directory, index.pilots, kept, 1024)
    np.testing.assert_array_equal(some.find(ids[::10_007]), rows[::10_007])
    assert (some.find(ids[::10_007] ^ 1) == -1).all()


# ---- ids that come more than once ----


@pytest.mark.parametrize(("duplicates", "kept"), [("first", [0, 1, 3]), ("last", [5, 4, 3])])
def test_one_of_the_same_ids_is_kept(duplicates: str, kept: list[int]) -> None:
    """The first or the last, of two and of three; the rows of the others are told."""
    builder = IndexBuilder(1)
    records = put(builder, [7, -1, 7, 0, -1, 7])
    dropped = builder.distinct(records, duplicates)
    assert sorted(dropped[:, 1].tolist()) == sorted(set(range(6)) - set(kept))
    assert dict(records[:3].tolist()) == dict(zip([7, -1, 0], kept, strict=True))
    ids = np.array([7, -1, 0])
    check_index(builder.build(records), ids)


@pytest.mark.parametrize("ids", [[5, 6, 5], [5, 5, 5], [0, 0], [-(2**63), 1, -(2**63)]])
def test_the_same_id_twice_is_an_error_that_names_both(ids: list[int]) -> None:
    """The rows in the source, the first two of more."""
    builder = IndexBuilder(4)
    with pytest.raises(DuplicateId, match=f"id {ids[0]} comes twice, in rows 0 and ") as caught:
        builder.distinct(put(builder, ids), "error")
    error = caught.value
    assert (error.id, error.first, error.second) == (ids[0], 0, ids.index(ids[0], 1))


@pytest.mark.parametrize("duplicates", KEEP)
def test_an_older_versions_row_gives_way(duplicates: str) -> None:
    """Rows from `own` on are kept where no other has their id, and are no error where one does, whatever
    `duplicates` says."""
    builder = IndexBuilder(2)
    records = put(builder, [1, 2, 3, 3001, 2, 1, 3002])
    dropped = builder.distinct(records, duplicates, own=4)
    assert sorted(dropped[:, 1].tolist()) == [4, 5]
    check_index(builder.build(records), np.array([1, 2, 3, 3001, 3002]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-4, 12), max_size=60),
    st.sampled_from(["first", "last"]),
    st.integers(0, 60),
    st.sampled_from([1, 2, 8]),
)
def test_what_is_kept_is_what_a_dictionary_keeps(
    ids: list[int], duplicates: str, own: int, buckets: int
) -> None:
    builder = IndexBuilder(buckets)
    records = put(builder, ids)
    dropped = builder.distinct(records, duplicates, own)
    expected: dict[int, int] = {}
    for source, id_ in enumerate(ids):
        if id_ not in expected or (duplicates == "last" and source < own):
            expected[id_] = source
    assert sorted(dropped[:, 1].tolist()) == sorted(set(range(len(ids))) - set(expected.values()))
    starts = np.concatenate(
        [
            [0],
            np.cumsum(
                np.bincount(
                    built(np.zeros(0, np.int64), buckets).bucket_of(np.array(ids, np.int64)),
                    minlength=buckets,
                )
            ),
        ]
    )
    kept = [
        tuple(r) for b in range(buckets) for r in records[starts[b] : starts[b] + builder.kept[b]].tolist()
    ]
    assert dict(kept) == expected and len(kept) == len(expected)
    check_index(builder.build(records), np.array(list(expected), np.int64))


# ---- what is refused ----


@pytest.mark.parametrize("id_", [-1, 800, 2**63 - 1, -(2**63)])
def test_an_id_without_a_bucket_is_refused(id_: int) -> None:
    """Where buckets are ranges: the error names it, and the ids that have one."""
    builder = IndexBuilder(8, 100)
    builder.count(np.array([0, 799]))
    with pytest.raises(
        QuantError,
        match=rf"id {id_} has no bucket: 8 buckets of 100 ids hold ids from 0 to 799; set bucket_ids",
    ):
        builder.count(np.array([5, id_, -2]))


def test_a_bucket_beyond_what_a_builder_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number of ids and the remedy."""
    monkeypatch.setattr(index_builder, "LARGEST_BUCKET", 9)
    builder = IndexBuilder(1)
    builder.count(np.arange(10))
    with pytest.raises(QuantError, match="a bucket has 10 ids, the most is 9; set more buckets"):
        builder.begin()


def row_map(**change: int) -> np.ndarray:
    """A map of two buckets as the builder's functions take it."""
    given = {"default_row": -1, "id_step": 8, "buckets": 2, "buckets_here": 2, **change}
    of = NativeRowMap(*[0] * len(NativeRowMap._fields))._replace(**given)
    return np.array(of, np.int64)


def _built() -> dict[str, Any]:
    """Arguments of `build` for two buckets of three ids and two."""
    records = np.array([[i, i] for i in range(5)], np.int64)
    return {"records": records, "starts": np.array([0, 3, 5]), "kept": np.array([3, 2]), "first": 0,
            "last": 2,
            "directory": np.array([[0, 0], [4, 0], [7, 0]]), "pilots": np.zeros(7 * 5 // 16 + 2,
            np.uint8)}  # fmt: skip


def _distinct() -> dict[str, Any]:
    some = _built()
    return {
        "records": some["records"],
        "starts": some["starts"],
        "first": 0,
        "last": 2,
        "keep": 0,
        "own": 9,
        "kept": some["kept"],
    }


IDS, COUNTS = np.arange(5), np.zeros(2, np.int64)
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "count_buckets": (_native.count_buckets, {"row_map": row_map(), "ids": IDS, "counts": COUNTS}),
    "put_in_buckets": (
        _native.put_in_buckets,
        {
            "row_map": row_map(),
            "ids": IDS,
            "sources": IDS,
            "ends": COUNTS,
            "records": np.zeros((10, 2), np.int64),
        },
    ),
    "distinct": (_native.distinct, _distinct()),
    "build": (_native.build, _built()),
    "place_rows": (_native.place_rows, {"row_map": row_map(), "ids": IDS, "rows": IDS, "of": 0}),
    "fill_filter": (_native.fill_filter, {"ids": IDS, "words": np.zeros(1, np.uint64)}),
    "fill_marks": (
        _native.fill_marks,
        {
            "numbers": IDS * 16,
            "slots": IDS,
            "bits": np.zeros(2, np.uint64),
            "before": np.zeros(2, np.uint32),
            "order": np.zeros(5, np.uint32),
        },
    ),
}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("count_buckets", {"counts": np.zeros(1, np.int64)}),
    ("count_buckets", {"counts": np.zeros(3, np.int64)}),
    ("count_buckets", {"row_map": row_map()[:-1]}),
    ("count_buckets", {"row_map": row_map(buckets=0)}),
    ("count_buckets", {"row_map": row_map(buckets_here=-1)}),
    ("put_in_buckets", {"sources": IDS[:4]}),
    ("put_in_buckets", {"ends": np.zeros(1, np.int64)}),
    ("put_in_buckets", {"ends": np.array([-1, -1])}),
    ("put_in_buckets", {"ends": np.array([10, 10])}),
    ("put_in_buckets", {"ends": np.array([2**62, 2**62])}),
    ("put_in_buckets", {"records": np.zeros((1, 2), np.int64)}),
    ("put_in_buckets", {"row_map": row_map(first_bucket=2)}),
    ("distinct", {"starts": np.array([0, 5])}),
    ("distinct", {"starts": np.array([0, 4, 3])}),
    ("distinct", {"starts": np.array([0, 3, 6])}),
    ("distinct", {"starts": np.array([-1, 3, 5])}),
    ("distinct", {"first": -1}),
    ("distinct", {"first": 2, "last": 1}),
    ("distinct", {"last": 3}),
    ("distinct", {"kept": np.zeros(1, np.int64)}),
    ("build", {"last": 3}),
    ("build", {"first": -1}),
    ("build", {"starts": np.array([0, 3])}),
    ("build", {"starts": np.array([-1, 3, 5])}),
    ("build", {"starts": np.array([2**62, 3, 5])}),
    ("build", {"kept": np.array([3, 3])}),
    ("build", {"kept": np.array([-1, 2])}),
    ("build", {"kept": np.array([5, 2])}),
    ("build", {"directory": np.zeros((2, 2), np.int64)}),
    ("build", {"directory": np.array([[0, 0], [4, 0], [5, 0]])}),
    ("build", {"directory": np.array([[-1, 0], [4, 0], [7, 0]])}),
    ("build", {"directory": np.array([[0, 0], [4, 0], [2**62, 0]])}),
    ("build", {"directory": np.array([[0, 0], [4, 0], [2**31 + 4, 0]])}),
    ("build", {"pilots": np.zeros(2, np.uint8)}),
    ("place_rows", {}),  # a map without addresses
    ("place_rows", {"rows": IDS[:4]}),
    ("fill_filter", {"words": np.zeros(0, np.uint64)}),
    ("fill_marks", {"numbers": IDS * 32}),
    ("fill_marks", {"numbers": IDS - 1}),
    ("fill_marks", {"numbers": IDS // 2}),  # twice
    ("fill_marks", {"slots": IDS[:4]}),
    ("fill_marks", {"slots": IDS << 32}),
    ("fill_marks", {"bits": np.zeros(1, np.uint64)}),
    ("fill_marks", {"bits": np.full(2, 1 << 63, np.uint64)}),  # not zeros
    ("fill_marks", {"before": np.zeros(1, np.uint32)}),
    ("fill_marks", {"order": np.zeros(4, np.uint32)}),
]


@pytest.mark.parametrize(
    ("name", "change"), REFUSED, ids=[f"{name}-{n}" for n, (name, _) in enumerate(REFUSED)]
)
def test_buffers_that_do_not_belong_together_are_refused(name: str, change: dict[str, Any]) -> None:
    """None is read or written past its end: ValueError, whatever the numbers in them say."""
    function, arguments = CALLS[name]
    fresh = {
        key: value.copy() if isinstance(value, np.ndarray) else value
        for key, value in {**arguments, **change}.items()
    }
    with pytest.raises(ValueError, match="do not belong together"):
        function(*fresh.values())


@pytest.mark.parametrize("name", [name for name in CALLS if name != "place_rows"])
def test_buffers_that_do_are_taken(name: str) -> None:
    """So that each refusal above is that of the change."""
    function, arguments = CALLS[name]
    function(
        *(
            {
                key: value.copy() if isinstance(value, np.ndarray) else value
                for key, value in arguments.items()
            }.values()
        )
    )


@pytest.mark.parametrize(
    ("name", "written"), [("count_buckets", "counts"), ("put_in_buckets", "records"), ("build", "pilots")]
)
def test_a_buffer_that_cannot_be_written_to_is_refused(name: str, written: str) -> None:
    function, arguments = CALLS[name]
    fixed = {
        key: value.copy() if isinstance(value, np.ndarray) else value for key, value in arguments.items()
    }
    fixed[written].flags.writeable = False
    with pytest.raises((ValueError, BufferError), match=r"read-only|writable|not writ"):
        function(*fixed.values())
