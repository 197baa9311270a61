"""A cache that outlives a table: what is handed over to its successor, and which rows that may be."""

from collections.abc import Callable

import numpy as np
import pytest
from cached_tables import CachedTables, run, settings
from keyed_tables import ids_of
from tables import values_of

from tableside.quant import RowFormat, Source, Table, choose
from tableside.quant.cache import index
from tableside.quant.cache.settings import Policy
from tableside.quant.errors import QuantError
from tableside.quant.rows.ids import RowMap
from tableside.quant.unchanged import successors

pytestmark = pytest.mark.gpu

ROWS = 300


def swapped(policy: Policy = Policy.LRU, budget: int = 40_000) -> tuple[CachedTables, int, int, np.ndarray]:
    """Tables 0 and its successor, where row i of the first is row order[i]."""
    t = CachedTables(budget, settings(policy), {"old": (ROWS, 48), "new": (ROWS, 48), "wide": (30, 144)})
    order = np.random.default_rng(5).permutation(ROWS)
    t.rows[1][order] = t.rows[0].clone()
    return t, 0, 1, order


@pytest.mark.thorough
@pytest.mark.parametrize("policy", list(Policy))
def test_rows_that_are_handed_over_hit(policy: Policy) -> None:
    """All of them, at once and with nothing fetched, under their new numbers; the successor has no other
    row, and the table itself has lost them. Bytes, chains and counts are right."""
    t, old, new, order = swapped(policy)
    t.look_up({old: run(100)}, admit_all=True)
    kept = run(60, 20)
    t.cache.hand_over(old, new, kept, order[kept])
    t.check_integrity()
    assert sorted(t.cache.hot(new)) == sorted(order[kept])
    assert sorted(t.cache.hot(old)) == [*range(20), *range(80, 100)]
    fetched = t.cache.statistics(wait=True).tables[new].fetched
    t.look_up({new: order[kept]})
    of_new = t.cache.statistics(wait=True).tables[new]
    assert (of_new.hits, of_new.fetched) == (60, fetched)
    t.look_up({new: order[:20], old: kept})
    t.check_integrity()
    assert t.cache.statistics(wait=True).tables[new].hits == 60


@pytest.mark.drawn(0.5)
def test_rows_stay_as_hot_as_they_were() -> None:
    """The hottest first, after as before."""
    t, old, new, order = swapped(Policy.LFU)
    for count in (40, 20, 10):
        t.look_up({old: run(count)})
    hot = t.cache.hot(old)
    t.cache.hand_over(old, new, hot[::-1].copy(), order[hot[::-1]])
    found = t.cache.hot(new)
    assert (
        set(found[:10]) == set(order[:10]) and set(found[:20]) == set(order[:20]) and found.size == hot.size
    )


@pytest.mark.drawn(0.5)
def test_rows_that_the_successor_has_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key lies in two slots, whatever is handed over at once; rows that are not cached are passed over."""
    t, old, new, order = swapped()
    t.look_up({old: run(100)})
    t.look_up({new: order[30:50]})
    monkeypatch.setattr(index, "_HANDED_OVER", 7)
    t.cache.hand_over(old, new, run(200), order[:200])
    t.check_integrity()
    assert sorted(t.cache.hot(new)) == sorted(order[:100])
    assert sorted(t.cache.hot(old)) == [*range(30, 50)]


@pytest.mark.drawn(0.5)
def test_batches_in_flight_read_on() -> None:
    """What a ticket found is there until it is released, under whatever name; then the slots are as
    others."""
    t, old, new, order = swapped(budget=9_000)
    ticket, ids = t.prefetch({old: run(30)})
    t.cache.hand_over(old, new, run(30), order[:30])
    t.look_up({new: run(ROWS)})
    t.check(ticket, ids)
    ticket.release()
    t.look_up({old: run(ROWS)})
    t.check_integrity()


def test_nothing_and_other_sizes() -> None:
    """No rows change nothing; rows of another size are refused with both sizes."""
    t, old, new, _ = swapped()
    t.look_up({old: run(10)})
    t.cache.hand_over(old, new, run(0), run(0))
    assert t.cache.hot(new).size == 0
    with pytest.raises(
        QuantError, match="rows of 48 bytes cannot become rows of 144 bytes; fetch them with `warm`"
    ):
        t.cache.hand_over(old, 2, run(3), run(3))


# ---- which rows are the same ----

IDS = ids_of(500)
DIM = 64


def raw_table(ids: np.ndarray, values: np.ndarray, row_format: RowFormat = RowFormat.INT8) -> Table:
    """A table of raw ids with a default row, through the loader's own index builder."""
    from tableside.quant.cpu.index_builder import RECORD_BYTES, IndexBuilder, find_rows
    from tableside.quant.rows.ids import ID_BYTES, id_at

    builder = IndexBuilder(4, 0, 1)
    builder.count(ids)
    records = np.zeros(builder.begin() * RECORD_BYTES // 8, np.int64).reshape(-1, 2)
    builder.put(ids, np.arange(ids.size), records)
    builder.distinct(records, "error", ids.size)
    built = builder.build(records)
    packed = np.zeros((built.slots + 1, row_format.row_bytes(values.shape[1])), np.uint8)
    rows = find_rows(built, ids)
    written = np.zeros((ids.size, packed.shape[1]), np.uint8)
    choose().quantize(values, Source.FP32, row_format, written)
    packed[rows] = written
    at = id_at(row_format, values.shape[1])
    spare = ids[ids.size // 2]  # a slot without an id keeps one of another slot
    kept = np.full(built.slots, spare)
    if at >= 0:
        kept = np.ndarray((built.slots,), np.int64, packed.reshape(-1), at, (packed.shape[1],))
        assert kept.strides[0] == packed.shape[1] and ID_BYTES == 8
        kept[:] = spare
    kept[rows] = ids
    index_ = type(built)(built.directory, built.pilots, kept, built.buckets)
    return Table(packed, row_format, values.shape[1], RowMap(ids.size, built.slots, index_))


def dense_table(ids: np.ndarray, values: np.ndarray, row_format: RowFormat = RowFormat.INT8) -> Table:
    """A table of row numbers: row i has the values of the i-th id."""
    packed = np.zeros((ids.size, row_format.row_bytes(values.shape[1])), np.uint8)
    choose().quantize(values, Source.FP32, row_format, packed)
    return Table(packed, row_format, values.shape[1], RowMap(ids.size, None, None, int(ids[0])))


@pytest.mark.parametrize("row_format", [RowFormat.INT8, RowFormat.FP16], ids=lambda f: f.label)
def test_rows_of_the_same_id_and_bytes(row_format: RowFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version lacks some ids, has others, and changed the values of some: each row leads to that
    of its id, and only unchanged ones are the same. The default row and slots without an id lead nowhere.
    Row by row and in blocks."""
    values = values_of(IDS.size, DIM)
    changed = values.copy()
    changed[100:200] += 0.5
    again = np.concatenate([IDS[350:], IDS[50:300]])
    old = raw_table(IDS[:400], values[:400], row_format)
    new = raw_table(again, np.concatenate([changed[350:], changed[50:300]]), row_format)
    assert old.row_map is not None and new.row_map is not None
    monkeypatch.setattr("tableside.quant.unchanged._AT_ONCE_BYTES", 37 * old.row_bytes)
    rows = np.arange(old.rows)
    found = successors(old, new, rows)
    owner = {int(row): n for n, row in enumerate(old.row_map.find(IDS[:400]))}
    for row in rows:
        n = owner.get(int(row))
        is_there = n is not None and (50 <= n < 300 or n >= 350)
        assert found.rows[row] == (new.row_map.find(IDS[n : n + 1])[0] if is_there and n is not None else -1)
        assert found.is_same[row] == (is_there and n is not None and not 100 <= n < 200)
    there = found.rows[found.rows >= 0]
    assert np.unique(there).size == there.size


KINDS: dict[str, Callable[[np.ndarray, np.ndarray], Table]] = {"raw": raw_table, "dense": dense_table}


@pytest.mark.parametrize("kinds", ["raw raw", "raw dense", "dense raw", "dense dense"])
def test_tables_whose_ids_changed_their_kind(kinds: str) -> None:
    """An id that lies in a row's padding is no difference."""
    old, new = (KINDS[kind] for kind in kinds.split())
    values = values_of(240, DIM)
    before, after = old(np.arange(40, 240), values[40:]), new(np.arange(100, 200), values[100:200])
    assert before.row_map is not None and after.row_map is not None
    ids = np.array([239, 40, 150, 199, 100])
    found = successors(before, after, before.row_map.find(ids))
    np.testing.assert_array_equal(found.rows, after.row_map.find(ids))
    np.testing.assert_array_equal(found.is_same, [False, False, True, True, True])


def test_row_numbers_lead_to_themselves() -> None:
    """Tables without any map; rows behind the next one's end lead nowhere."""
    values = values_of(200, DIM)
    old, new = (
        Table(t.packed, t.row_format, t.dim)
        for t in (dense_table(run(200), values), dense_table(run(90), values[:90]))
    )
    found = successors(old, new, np.array([199, 3, 89, 90]))
    assert found.rows.tolist() == [-1, 3, 89, -1] and found.is_same.tolist() == [False, True, True, False]


def test_rows_of_another_format_are_never_the_same() -> None:
    """They have successors, whose bytes are not looked at."""
    ids, values = run(50), np.zeros((50, DIM), np.float32)
    for other in (dense_table(ids, values, RowFormat.FP8), dense_table(ids, np.zeros((50, 32), np.float32))):
        found = successors(dense_table(ids, values), other, ids)
        assert found.rows.tolist() == ids.tolist() and not found.is_same.any()
