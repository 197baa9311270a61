"""A cache over tables whose rows the host fetches: what a lookup gives, what is fetched, and what is kept."""

import random
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tables
import torch
from cache_check import check
from cached_tables import padded, registered
from fetched_tables import FromArray
from hot_tables import with_hot
from tables import expected_of, table_of

from tableside.quant import BadIds, Lookup, LookupKind, Pooling, RowFormat, Table, choose
from tableside.quant.cache.settings import CacheSettings, Policy
from tableside.quant.errors import Problem, RowsNotRead
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.residence.tables import DeviceTable
from tableside.quant.gpu.tensors.calls import TensorInput
from tableside.quant.gpu.tensors.tensors import TensorLookup
from tableside.quant.rows.fetched import RowReader, RowState
from tableside.quant.rows.ids import RowMap

pytestmark = pytest.mark.gpu


class Fetching:
    """A backend with a cache, and tables that are fetched through it, or lie in memory."""

    def __init__(self, budget: int = 60_000, **settings: Any) -> None:
        self.backend = GpuBackend(tables.DEVICE, choose())
        self.cache = self.backend.open_cache(budget, 32, CacheSettings(**settings))
        self.placed: list[tuple[Table, DeviceTable]] = []

    def fetch(
        self, table: Table, states: Mapping[int, RowState] | None = None, **more: Any
    ) -> tuple[DeviceTable, FromArray]:
        source = FromArray(table, states)
        held = self.backend.place("cached_stored", table, reader=RowReader(source, **more))
        self.placed.append((table, held))
        return held, source

    def hold(self, table: Table) -> DeviceTable:
        view = None if self.backend.device.reads_all_memory else registered(table)
        self.placed.append((table, self.backend.place("cached", table, view)))
        return self.placed[-1][1]

    def rows(self, *asked: tuple[DeviceTable, Any]) -> list[Any]:
        """The vectors of a batch of a request for each of some tables and ids, or its error."""
        requests = []
        for held, ids in asked:
            lookup = Lookup(held, Pooling.NONE, 0, len(ids), 0)
            requests.append((self.backend.plan([lookup]), np.array(ids, np.int64).tobytes()))
        found, _ = self.backend.batches.run(requests)
        return [
            one if isinstance(one, Exception) else one.outputs.view(np.float32).reshape(-1, held.dim)
            for one, (held, _) in zip(found, asked, strict=True)
        ]

    def check(self) -> None:
        rows = {held.residence.cache_table: table.packed for table, held in self.placed}
        check(self.cache, lambda number, id: padded(rows[number][id]))


@pytest.mark.sanitized_gpu
@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("gather_threads", [0, 2])
@pytest.mark.parametrize("policy", list(Policy), ids=lambda p: p.value)
def test_lookups_beside_tables_in_memory(
    policy: Policy, gather_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are padded and not, of two sizes, in slots that are few and a staging buffer that is smaller
    than what is missing: each id gets its row, and each missing row is fetched once, by threads or none."""
    monkeypatch.setattr("tableside.quant.cache.fetched._PART_ROWS", 5)
    t = Fetching(
        16_384,
        policy=policy,
        page_bytes=1024,
        staging_bytes=512,
        gather_threads=gather_threads,
        gather_from=1,
        replays=True,
    )
    made = [table_of(f, d, alignment=a, seed=n) for n, (f, d, a) in enumerate(FORMS)]
    fetched = [t.fetch(one) for one in made[:3]]
    held = [*(one for one, _ in fetched), *map(t.hold, made[3:])]
    rng = random.Random(1)
    for _ in range(12):
        which = rng.sample(range(len(held)), rng.randint(1, len(held)))
        ids = [np.array(rng.choices(range(200), weights=WEIGHTS, k=rng.randint(1, 60))) for _ in which]
        found = t.rows(*((held[n], one) for n, one in zip(which, ids, strict=True)))
        for n, one, rows in zip(which, ids, found, strict=True):
            np.testing.assert_array_equal(rows, expected_of(made[n], one))
        t.check()
    counts = t.cache.statistics(wait=True).tables
    for one, source in fetched:
        assert sum(map(len, source.asked)) == counts[one.residence.cache_table].fetched > 0
        assert all(len(set(rows)) == len(rows) and rows == sorted(rows) for rows in source.asked)
    assert sum(c.hits for c in counts.values())


FORMS = [
    (RowFormat.INT8, 24, 16),
    (RowFormat.INT8, 32, 4),
    (RowFormat.FP16, 36, 16),
    (RowFormat.INT8, 24, 16),
    (RowFormat.INT8, 32, 4),
]
WEIGHTS = [1 / (n + 1) for n in range(200)]


def test_a_row_that_was_fetched_is_not_fetched_again() -> None:
    """And those that are missing are counted, as ids."""
    t, noted = Fetching(), []
    held, source = t.fetch(table_of(RowFormat.INT8, 24), note=lambda ids: noted.append(ids.tolist()))
    for ids in ([5, 3, 5], [3, 4], [5, 4, 3]):
        t.rows((held, ids))
    assert source.asked == noted == [[3, 5], [4]]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("policy", list(Policy), ids=lambda p: p.value)
@pytest.mark.parametrize("state", [RowState.LATE, RowState.CORRUPT])
def test_who_asks_for_rows_that_do_not_come_gets_an_error(state: RowState, policy: Policy) -> None:
    """Others of the batch get theirs. What came is kept, and what did not is fetched again."""
    t, made = Fetching(policy=policy), table_of(RowFormat.INT8, 32, alignment=4)
    held, source = t.fetch(made, states := {7: state, 9: state})
    other = t.hold(made)
    right, wrong, beside = t.rows((held, [3, 3, 8]), (held, [9, 3, 7, 7]), (other, [7, 9]))
    np.testing.assert_array_equal(right, expected_of(made, np.array([3, 3, 8])))
    np.testing.assert_array_equal(beside, expected_of(made, np.array([7, 9])))
    assert isinstance(wrong, RowsNotRead)
    assert (wrong.rows, wrong.late + wrong.corrupt) == (3, 2) and bool(wrong.late) is (state is RowState.LATE)
    with pytest.raises(RowsNotRead):
        t.backend.lookup(held, np.array([7]), pooling=Pooling.NONE)
    t.check()
    states.clear()
    source.asked.clear()
    np.testing.assert_array_equal(t.rows((held, [3, 7, 8, 9]))[0], expected_of(made, np.array([3, 7, 8, 9])))
    assert source.asked == [[7, 9]]


def test_ids_that_changed_since_are_told_from_rows_that_did_not_come() -> None:
    t = Fetching()
    held, _ = t.fetch(table_of(RowFormat.INT8, 24), {7: RowState.LATE})
    inputs = bytearray(np.array([3, 7]).tobytes())
    batch = t.backend.batches.begin([(t.backend.plan([Lookup(held, Pooling.NONE, 0, 2, 0)]), inputs)])
    inputs[:] = np.array([3, 2000]).tobytes()
    ((refused,), _) = t.backend.batches.wait(batch)
    assert isinstance(refused, BadIds) and refused.problem is Problem.CHANGED


def test_calls_of_tensors_that_lack_rows_are_refused() -> None:
    t, made = Fetching(), table_of(RowFormat.INT8, 24)
    held, _ = t.fetch(made, {7: RowState.CORRUPT})
    lookup = TensorLookup(t.backend, ["a"], [LookupKind(held, Pooling.NONE)], Reports(t.backend.launcher))
    calls = [
        lookup.stage_each(
            [TensorInput(torch.tensor(ids).to(t.backend.device.torch_device), None, 0, 0, None)]
        )
        for ids in ([3, 7, 9], [9, 3, 3])
    ]
    with pytest.raises(RowsNotRead, match="of 1 rows to fetch 0 came too late and 1 were damaged"):
        lookup.prefetch(calls[0])
    found = lookup(lookup.prefetch(calls[1])).cpu().numpy().reshape(3, 24)
    np.testing.assert_array_equal(found, expected_of(made, np.array([9, 3, 3])))


def test_a_wrong_id_is_told_before_a_row_that_does_not_come() -> None:
    t = Fetching()
    held, _ = t.fetch(table_of(RowFormat.INT8, 24), {7: RowState.LATE})
    wrong, late = t.rows((held, [7, 200]), (held, [7]))
    assert not isinstance(wrong, RowsNotRead) and isinstance(wrong, Exception)
    assert isinstance(late, RowsNotRead) and late.late == 1


@pytest.mark.drawn(1)
@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.parametrize("alignment", [4, 16])
def test_hot_rows_are_not_fetched(alignment: int, first: int) -> None:
    """They are another's rows here, which tells them from those that the table has."""
    t, ids = Fetching(), np.arange(0, 200, 3)
    plain = table_of(RowFormat.INT8, 32, 201, alignment=alignment)
    base = Table(plain.packed, plain.row_format, plain.dim, RowMap(200, 200, first=first))
    hot = with_hot(base, ids)
    held, source = t.fetch(Table(plain.packed, plain.row_format, plain.dim))
    assert source.table.row_map is None
    held.residence.read_from(held.residence.source(hot))
    for asked in (np.arange(201), np.array([3, 4, 200])):
        rows = np.where(np.isin(asked, ids), 1, asked)
        np.testing.assert_array_equal(t.rows((held, asked))[0], expected_of(plain, rows))
    assert source.asked == [np.setdiff1d(np.arange(201), ids).tolist()]


def test_rows_that_the_device_reads_keep_their_room() -> None:
    """However many are fetched beside them."""
    t, made = Fetching(page_bytes=1024, staging_bytes=512), table_of(RowFormat.INT8, 24)
    fetched, held = t.fetch(made)[0], t.hold(made)
    found = t.rows((fetched, np.arange(200)), (held, np.arange(10)))
    for rows in found:
        np.testing.assert_array_equal(rows, expected_of(made, np.arange(len(rows))))
    (batch,) = t.cache._batches.all
    assert (batch.locations[:210] < -1).all(), "some found no room in the staging buffer"


def test_a_table_in_the_place_of_one_that_was_fetched() -> None:
    t = Fetching()
    held, source = t.fetch(table_of(RowFormat.INT8, 24))
    number = held.residence.cache_table
    del held
    t.placed.clear()
    other = table_of(RowFormat.INT8, 24, seed=1)
    after = t.hold(other)
    assert after.residence.cache_table == number
    np.testing.assert_array_equal(t.rows((after, [3, 4]))[0], expected_of(other, np.array([3, 4])))
    assert not source.asked


def test_rows_that_do_not_come_are_zeros() -> None:
    """Also where others lay before, since a follower computes with them."""
    t, made = Fetching(staging_bytes=0), table_of(RowFormat.INT8, 24)
    held, _ = t.fetch(made, {150: RowState.LATE})
    t.rows((held, np.arange(100)))
    t.rows((held, [150]))
    (batch,) = t.cache._batches.all
    t.cache.device.synchronize()
    at = 16 * (-2 - int(batch.locations[0]))
    assert not batch.staging[at : at + made.row_bytes].any() and batch.staging.any()


def test_tables_are_asked_together_and_wait_as_long_as_the_first_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    t, told = Fetching(), []
    for n, wait_s in enumerate((5.0, 2.0, None)):
        made = table_of(RowFormat.INT8, 24, seed=n)

        def fetch(*given: Any, n: int = n, made: Table = made) -> None:
            given[1][:] = made.packed[given[0]]
            told.append((n, given[3]))

        def ask(rows: np.ndarray, n: int = n) -> None:
            told.append((n, rows.tolist()))

        reader = RowReader(fetch, wait_s=wait_s, ask=ask)
        t.placed.append((made, t.backend.place("cached_stored", made, reader=reader)))
    (a, b, c) = (held for _, held in t.placed)
    t.rows((a, [1, 2]), (b, [3]))
    assert told == [(0, [1, 2]), (1, [3]), (0, 102.0), (1, 102.0)]
    told.clear()
    t.rows((c, [7]))
    assert told == [(2, None)]  # of one table nothing is asked before


def test_a_fetch_that_fails_waits_for_the_others() -> None:
    """Since they write to memory that the next batch takes; the cache works on."""
    t, made = Fetching(gather_threads=2), table_of(RowFormat.INT8, 24)
    has_failed, is_over = threading.Event(), threading.Event()

    def fail(*given: Any) -> None:
        has_failed.set()
        raise MemoryError

    def slow(rows: np.ndarray, out: np.ndarray, *more: Any) -> None:
        has_failed.wait()
        time.sleep(0.2)
        out[:] = made.packed[rows]
        is_over.set()

    a, b = (t.backend.place("cached_stored", made, reader=RowReader(one)) for one in (fail, slow))
    with pytest.raises(MemoryError):
        t.rows((a, [1]), (b, [2]))
    assert is_over.is_set()
    np.testing.assert_array_equal(t.rows((b, [3, 4]))[0], expected_of(made, np.array([3, 4])))


@pytest.mark.drawn(0.25)
def test_a_staging_buffer_grows_by_what_it_must() -> None:
    """However much more the device misses than has room there; what grew is counted."""
    t, made = Fetching(staging_bytes=512, page_bytes=1024, budget=8_192), table_of(RowFormat.INT8, 24)
    fetched, held = t.fetch(made)[0], t.hold(made)
    sizes = []
    for n in range(6):
        ids = np.arange(30 * n, 30 * n + 30)
        for rows in t.rows((fetched, ids[:3]), (held, ids)):
            np.testing.assert_array_equal(rows, expected_of(made, ids[: len(rows)]))
        sizes.append(t.cache.bytes)
    (batch,) = t.cache._batches.all
    assert batch.device_bytes == 512 < batch.staging.numel() <= 768
    size, batch.staging = batch.staging.numel(), batch.staging[:512]
    assert set(sizes) == {t.cache.bytes + size}


def test_a_table_is_read_all_the_time_while_others_take_its_hot_rows() -> None:
    """A source that comes finds the one before it in its place; without any there is an error, and no row."""
    t, made = Fetching(), table_of(RowFormat.INT8, 24)
    held, _ = t.fetch(made)
    number, seen = held.residence.cache_table, list[bool]()
    exclusive = t.cache._working

    @contextmanager
    def working() -> Iterator[None]:
        seen.append(number in t.cache._tables.sources)
        with exclusive():
            yield

    t.cache._working = working  # type: ignore[method-assign]
    held.residence.read_from(held.residence.source(made))
    np.testing.assert_array_equal(t.rows((held, [3]))[0], expected_of(made, np.array([3])))
    assert all(seen) and len(seen) > 1
    t.cache._tables.sources.clear()
    with pytest.raises(KeyError):
        t.rows((held, [4]))


def test_what_is_read_goes_with_its_table() -> None:
    """Its mapping, too, before another batch comes."""
    t = Fetching()
    held, _ = t.fetch(table_of(RowFormat.INT8, 24))
    source = weakref.ref(t.cache._tables.sources[held.residence.cache_table])
    t.rows((held, [1]))
    t.placed.clear()
    del held
    assert source() is None
