"""The specification of ids that become rows (`quant.rows.ids`), and the native kernel, which must do the
same."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_tables import built, kinds_of_ids, part_of, raw_table, rows_in, unmix, unspread

from tableside.quant import Pooling, RowFormat, Table, choose
from tableside.quant.cpu import _native
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.rows.ids import (
    MIX,
    PILOT,
    SEED,
    SLOT,
    SPREAD,
    IdIndex,
    NativeRowMap,
    RowMap,
    id_at,
    mix,
    native_row_map,
    pilots_for,
    slots_for,
)

IDS = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 40) | st.integers(-20, 20).map(lambda n: n << 40)
KINDS = kinds_of_ids()


def _mixed(x: int) -> int:
    """`mix` by the words of quant/rows/ids.py, in Python's integers."""
    x %= 1 << 64
    for _ in range(2):
        x ^= x >> 32
        x = x * MIX % (1 << 64)
    return x ^ x >> 32


def place_by_hand(index: IdIndex, id_: int) -> int:
    """The formulas of quant/rows/ids.py for one id, in Python's integers."""
    word, h = 1 << 64, _mixed(id_)
    bucket = id_ // index.bucket_ids if index.bucket_ids else h & index.buckets - 1
    if (
        not 0 <= bucket < index.buckets
        or not 0 <= (here := bucket - index.first_bucket) < len(index.directory) - 1
    ):
        return -1
    first, seed = map(int, index.directory[here])
    slots = int(index.directory[here + 1, 0]) - first
    g = (h ^ seed * SEED % word) * SPREAD % word
    g = (g ^ g >> 32) * MIX % word
    pilot = int(index.pilots[first * 5 // 16 + here + ((g >> 32) * (slots * 5 // 16 + 1) >> 32)])
    row = first + (((g ^ (pilot + 1) * PILOT % word) * SLOT % word >> 32) * slots >> 32)
    return row if slots else -1


@given(st.lists(IDS, min_size=1, max_size=20))
def test_mix_is_what_it_says_and_loses_nothing(ids: list[int]) -> None:
    """Two ids never have one hash, since the id comes back from it."""
    given_ids = np.array(ids, np.int64)
    assert mix(given_ids).tolist() == [_mixed(i) for i in ids]
    np.testing.assert_array_equal(unmix(mix(given_ids)), given_ids)


@pytest.mark.parametrize(
    ("ids", "slots"),
    [(0, 0), (1, 2), (2, 3), (63, 64), (64, 66), (127, 129), (128, 131), (6400, 6501), (10**6, 1_015_626)],
)
def test_slots_of_a_bucket(ids: int, slots: int) -> None:
    """One more than the ids, and one more for each 64 of them, none where there are none: docs/format.md
    says so."""
    assert slots_for(ids) == slots


@pytest.mark.parametrize("counts", [[0], [1], [0, 0, 1], [3, 3, 3, 3, 3], [64, 0, 63, 1, 129]])
def test_pilots_of_buckets_do_not_overlap(counts: list[int]) -> None:
    """However the sums of slots are rounded: each bucket's pilots end before the next one's, and the
    last's within the table."""
    end = total = 0
    for bucket, count in enumerate(counts):
        first = total * 5 // 16 + bucket
        assert first >= end
        end, total = first + slots_for(count) * 5 // 16 + 1, total + slots_for(count)
    assert end <= pilots_for(total, len(counts))


@pytest.mark.parametrize(
    ("row_format", "dim", "at"),
    [("int8", 64, 72), ("int8", 128, 136), ("int8", 68, 72), ("int8", 69, -1), ("int8", 60, -1), ("int8", 3,
     8), ("int8", 5, -1),
     ("fp16", 32, -1), ("fp16", 36, 72), ("fp32", 2, 8), ("fp32", 3, -1), ("int4", 8, 8), ("int2", 4, 8),
     ("fp8", 8, 8),
     ("fp8", 9, -1)],
)  # fmt: skip
def test_where_an_id_lies_in_its_row(row_format: str, dim: int, at: int) -> None:
    """In the last eight bytes, where values end before them; else nowhere."""
    assert id_at(RowFormat.parse(row_format), dim) == at


@pytest.mark.parametrize("bucket_ids", [0, 100])
@pytest.mark.parametrize("kind", ["random", "a dense run", "extremes", "none"])
def test_places_are_those_of_the_formulas(kind: str, bucket_ids: int) -> None:
    """Of ids that are there and of others, in a whole index and in a part of one."""
    ids = KINDS[kind]
    ids = ids[(ids >= 0) & (ids < 800)] if bucket_ids else ids
    whole = raw_table(ids, RowFormat.FP32, 2, 8, bucket_ids)
    asked = np.concatenate([ids, np.arange(-200, 1200), KINDS["extremes"]])
    for raw in (whole, part_of(whole, 0, 3), part_of(whole, 2, 1), part_of(whole, 3, 5)):
        expected = [place_by_hand(raw.index, i) for i in asked.tolist()]
        assert raw.index.places(asked).tolist() == expected
        assert rows_in(raw.index, asked).tolist() == expected


@settings(max_examples=80, deadline=None)
@given(data=st.data())
@pytest.mark.drawn(0.5)
def test_the_native_kernel_places_ids_as_specified(data: st.DataObject) -> None:
    """`find_rows` is `IdIndex.places`, for ids of the index and any others."""
    ids = np.array(data.draw(st.lists(IDS, max_size=300, unique=True)), np.int64)
    asked = np.concatenate([ids, np.array(data.draw(st.lists(IDS, max_size=40)), np.int64)])
    index = built(ids, 1 << data.draw(st.integers(0, 6)))
    np.testing.assert_array_equal(rows_in(index, asked), index.places(asked))


def numbered(row_map: RowMap, row_format: RowFormat, dim: int, rows: int) -> Table:
    """A table in fp32 whose every value is the number of its row."""
    packed = np.zeros((rows, row_format.row_bytes(dim)), np.uint8)
    packed.view(np.float32)[:, :dim] = np.arange(rows)[:, None]
    return Table(packed, row_format, dim, row_map)


def check_placed(row_map: RowMap, asked: np.ndarray, rows: np.ndarray) -> None:
    """`place_rows` gives what `RowMap.find` does: of ids that are not there the default row, or with an index
    a row that keeps another id. rows: as found."""
    placed, _ = place_rows(row_map, asked)
    there = rows != -1
    np.testing.assert_array_equal(placed[there], rows[there])
    if row_map.index is None or not row_map.count:
        assert set(placed[~there].tolist()) <= {row_map.default_row}
    else:
        np.testing.assert_array_equal(placed[~there], row_map.index.places(asked[~there]))


def check_resolved(table: Table, asked: np.ndarray, isa: str) -> None:
    """The rows that the native kernel reads are those of `RowMap.find`, the default row for ids that it
    lacks."""
    row_map = table.row_map
    assert row_map is not None and row_map.default_row is not None
    rows = row_map.find(asked)
    _native.use(isa)
    try:
        found = choose("native").lookup(table, asked, pooling=Pooling.NONE)
        check_placed(row_map, asked, rows)
    finally:
        _native.use(_native.isas()[0])
    np.testing.assert_array_equal(found[:, 0].astype(np.int64), np.where(rows < 0, row_map.default_row, rows))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
@pytest.mark.drawn(0.5)
def test_the_native_kernel_resolves_ids_as_specified(data: st.DataObject) -> None:
    """What it reads is the row of `RowMap.find`, on every instruction set, for any number of ids of a
    request."""
    ids = np.array(data.draw(st.lists(IDS, max_size=200, unique=True)), np.int64)
    others = np.array(data.draw(st.lists(IDS, max_size=40)), np.int64)
    asked = np.random.default_rng(len(ids)).permutation(np.concatenate([ids, others]))
    index = built(ids, 1 << data.draw(st.integers(0, 6)))
    kept = np.full(index.slots, ids[0] if len(ids) else 0)
    kept[rows_in(index, ids)] = ids
    found = IdIndex(index.directory, index.pilots, kept, index.buckets)
    table = numbered(RowMap(len(ids), index.slots, found), RowFormat.FP32, 4, index.slots + 1)
    check_resolved(table, asked, data.draw(st.sampled_from(_native.isas())))


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 5), (0, 0), (3, 5), (-2, 5), (-(2**63), 3), (2**63 - 3, 3), (2**63 - 1, 1), (2**62, 7)],
)
def test_ids_that_are_row_numbers_from_a_first_one_on(first: int, count: int, isa: str) -> None:
    """Up to both ends of 64 bits, where sums and differences wrap."""
    ends = [-(2**63), 2**63 - 1, -1, 0, 1, first, first + count - 1]
    around = [n for n in range(first - 3, first + count + 3) if -(2**63) <= n < 2**63]
    asked = np.array([n for n in ends if n >= -(2**63)] + around, np.int64)
    row_map = RowMap(count, count, None, first)
    rows = row_map.find(asked)
    assert rows.tolist() == [n - first if first <= n < first + count else -1 for n in asked.tolist()]
    check_resolved(numbered(row_map, RowFormat.FP32, 4, count + 1), asked, isa)


def test_an_id_whose_hash_is_chosen_is_not_taken_for_its_neighbour() -> None:
    """Ids that share their pilot and their slot with one that is there, as only a kept id can tell."""
    there = unspread(np.array([0xABCDEF << 40], np.uint64))
    index = raw_table(there, RowFormat.FP32, 2, 1).index
    others = unspread(np.arange(1, 2000, dtype=np.uint64) | np.uint64(0xABCDEF << 40))
    meeting = others[index.places(others) == index.places(there)]
    assert meeting.size > 100
    assert (index.find(meeting) == -1).all() and index.find(there)[0] >= 0


@pytest.mark.parametrize("own", [None, 0, 3, 7])
def test_which_rows_were_backfilled(own: int | None) -> None:
    """Of row numbers those from `own` on; of raw ids those whose bit is set."""
    rows = np.arange(7)
    assert RowMap(7, None, None, 0, own).is_backfilled(rows).tolist() == [
        n >= (7 if own is None else own) for n in range(7)
    ]
    mask = np.arange(700) % 3 == 0
    raw = raw_table(KINDS["a dense run"], RowFormat.FP32, 2, 4, backfilled=mask)
    assert raw.table.row_map is not None
    np.testing.assert_array_equal(raw.table.row_map.is_backfilled(raw.index.find(KINDS["a dense run"])), mask)


@pytest.mark.parametrize("kind", ["random", "a dense run", "zero alone", "none"])
def test_which_rows_have_an_id(kind: str) -> None:
    """Each id is told for the row in which it is found; slots without an id, whatever they keep, and rows
    outside have none."""
    ids = KINDS[kind]
    raw = raw_table(ids, RowFormat.FP32, 2, 4)
    row_map: Any = raw.table.row_map
    expected = dict(zip(row_map.find(ids).tolist(), ids.tolist(), strict=True))
    found, has_id = row_map.ids_of(np.arange(-2, raw.index.slots + 2))
    assert {n - 2: found[n] for n in np.flatnonzero(has_id).tolist()} == expected
    middle = raw.index.slots // 2
    for start, stop in ((0, raw.index.slots), (0, middle), (middle, raw.index.slots)):
        rows, of = row_map.rows_with_ids(start, stop)
        assert dict(zip(rows.tolist(), of.tolist(), strict=True)) == {
            r: i for r, i in expected.items() if start <= r < stop
        }


def test_which_row_numbers_are_ids() -> None:
    """Counted from the first id; the default row is of no id."""
    found, has_id = RowMap(3, 3, None, 10).ids_of(np.arange(-1, 5))
    assert found[has_id].tolist() == [10, 11, 12] and has_id.tolist() == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(("row_format", "dim", "step"), [(RowFormat.INT8, 64, 80), (RowFormat.INT8, 60, 8)])
def test_a_kernel_reads_the_map_at_its_address(row_format: RowFormat, dim: int, step: int) -> None:
    """The fields lie at `native_address` in the order of NativeRowMap, with the step from one kept id to
    the next."""
    raw = raw_table(KINDS["random"], row_format, dim, 4)
    row_map: Any = raw.table.row_map
    fields = native_row_map(row_map)
    assert (fields.id_count, fields.default_row, fields.id_step) == (row_map.count, row_map.default_row, step)
    assert (fields.buckets, fields.buckets_here, fields.backfilled) == (4, 4, 0)
    assert fields.directory == raw.index.directory.ctypes.data and fields.ids == raw.index.ids.ctypes.data
    of_kernel = NativeRowMap(*row_map.native.tolist())
    assert row_map.native_address == row_map.native.ctypes.data
    assert of_kernel.entries and of_kernel._replace(entries=0) == fields
