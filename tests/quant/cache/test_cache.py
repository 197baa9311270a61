"""The cache against a plain dictionary: whatever is cached, evicted, locked or swapped, each id yields its
table's bytes.
"""

from collections import deque
from typing import Any

import numpy as np
import pytest
from cached_tables import SIZES, CachedTables, run, settings

from tableside.quant import QuantError
from tableside.quant.cache.cache import Cache
from tableside.quant.cache.kernels.state import ID_BITS, BatchState
from tableside.quant.cache.settings import CacheSettings, Policy
from tableside.quant.cache.tables import check_table
from tableside.quant.cache.tickets import Ticket
from tableside.quant.device.interpreter import InterpretedDevice

pytestmark = pytest.mark.gpu


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize(
    ("policy", "budget", "page_bytes", "held", "threads"),
    [
        (Policy.LRU, 7_000, 1024, 0, 0),
        pytest.param(Policy.LFU, 7_000, 1024, 2, 2, marks=pytest.mark.sanitized_gpu),
        pytest.param(Policy.LRU, 60_000, 2048, 1, 2, marks=pytest.mark.sanitized_gpu),
        (Policy.LFU, 60_000, 2048, 0, 0),
    ],
)
def test_every_id_yields_its_row(
    policy: Policy, budget: int, page_bytes: int, held: int, threads: int
) -> None:
    """Random batches with duplicates and without ids, `held` tickets out at a time, a version swapped in the
    middle; from a cache of 30 slots, where most rows are staged or read in place, to one that holds a third
    of the rows; rows fetched by the GPU and by the CPU.
    """
    rng = np.random.default_rng(budget + held)
    t = CachedTables(
        budget,
        settings(policy, page_bytes=page_bytes, staging_buffers=2, gather_threads=threads, gather_from=20),
    )
    out: deque[tuple[Ticket, dict[int, np.ndarray]]] = deque()
    for number in range(7):
        ids = {n: rng.zipf(1.3, rng.integers(0, 80)) % len(t.rows[n]) for n in t.numbers.values()}
        out.append(t.prefetch(ids))
        while len(out) > held:
            ticket, ids = out.popleft()
            t.check(ticket, ids)
            ticket.release()
        t.check_integrity()
        if number == 3:
            t.cache.forget(t.numbers["b"])
            t.numbers["b"] = t.add(*SIZES["b"])
    found = t.cache.statistics(wait=True)
    assert found.inserted - found.evicted >= found.occupied > 0 and (found.evicted > 0 or policy.is_lfu)
    if budget == 7_000:
        assert found.padded > 0 and sum(s.in_place for s in found.tables.values()) > 0


def test_kernels_stay_while_tables_fit_them() -> None:
    """A new version's tables would else have each of them found anew at its next launch."""
    t = CachedTables(60_000, settings(), {"a": (20, 48), "b": (20, 144)})
    kernels = t.cache._pipeline.kernels
    t.add(20, 48)
    assert t.cache._pipeline.kernels is kernels
    t.add(20, 44)
    tight = t.cache._pipeline.kernels
    t.add(20, 140)
    assert tight is not kernels and t.cache._pipeline.kernels is tight
    t.add(20, 160)
    assert t.cache._pipeline.kernels is not tight


def test_a_slot_of_one_row() -> None:
    """The smallest cache there is: each row evicts the one before."""
    t = CachedTables(48 * 4, CacheSettings(Policy.LRU, page_bytes=128, staging_fraction=0.0), {"a": (10, 48)})
    assert t.cache.slots == 1
    for id in (3, 4, 3):
        t.look_up({0: run(1, id)})
        t.check_integrity()
    assert t.hits() == 0
    t.look_up({0: run(1, 3)})
    assert t.hits() == 1


@pytest.mark.drawn(0.5)
def test_what_was_fetched_is_hit() -> None:
    """Each missing row comes over the bus once a batch, and not again while it is cached."""
    t = CachedTables(100_000, settings())
    ids = {t.numbers["b"]: np.tile(run(50), 3), t.numbers["a"]: run(20)}
    t.look_up(ids)
    t.look_up(ids)
    found = t.cache.statistics(wait=True)
    b = found.tables[t.numbers["b"]]
    assert (b.ids, b.hits, b.fetched, b.in_place) == (300, 150, 50, 0)
    assert b.bus_bytes == 50 * 144
    assert (found.inserted, found.evicted, found.occupied, found.tickets) == (70, 0, 70, 2)


@pytest.mark.drawn(0.5)
def test_lru_evicts_what_was_not_used_for_longest() -> None:
    t = CachedTables(13_000, settings(staging_fraction=0.0), {"a": (1000, 48)})
    slots = t.cache.slots
    for first in (0, slots // 2):  # fills the cache in two halves; then the first is used again
        t.look_up({0: run(slots // 2, first)})
    t.look_up({0: run(slots // 2)})
    t.look_up({0: run(slots // 2, 500)})
    before = t.hits()
    t.look_up({0: run(slots // 2)})
    assert t.hits() - before == slots // 2


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "stay"), [(Policy.LFU, True), (Policy.LRU, False)])
def test_a_scan(policy: Policy, stay: bool) -> None:
    """Rows seen once each flush a cache that admits everything, and pass by one that weighs them."""
    t = CachedTables(13_000, settings(policy), {"a": (3000, 48)})
    hot = run(t.cache.slots * 3 // 4)
    for _ in range(3):
        t.look_up({0: hot})
    for first in range(500, 2500, 500):
        t.look_up({0: run(500, first)})
    before = t.hits()
    t.look_up({0: hot})
    assert (t.hits() - before == hot.size) is stay


@pytest.mark.sanitized_gpu
@pytest.mark.drawn(0.5)
def test_rows_in_use_are_not_evicted() -> None:
    """While a ticket is out that uses every slot, others get none; once it is released, they do."""
    t = CachedTables(9_000, settings(staging_buffers=2, staging_fraction=0.3), {"a": (1000, 48)})
    slots = t.cache.slots
    first, ids = t.prefetch({0: run(slots)})
    t.look_up({0: run(20, 500)})
    found = t.cache.statistics(wait=True)
    assert (found.locked_out, found.evicted, found.padded) == (20, 0, 20)
    t.check(first, ids)
    first.release()
    first.release()
    t.look_up({0: run(20, 500)})
    assert t.cache.statistics(wait=True).evicted == 20


@pytest.mark.sanitized_gpu
@pytest.mark.drawn(0.5)
def test_a_ticket_that_is_let_go_is_released() -> None:
    """The next batch may evict what it used: as many rows as it admits, whichever they are."""
    t = CachedTables(9_000, settings(), {"a": (1000, 48)})
    ticket, _ = t.prefetch({0: run(t.cache.slots)})
    del ticket
    t.look_up({0: run(20, 500)})
    assert t.cache.statistics(wait=True).evicted == 20


@pytest.mark.drawn(0.5)
def test_a_staging_buffer_is_taken_where_one_is_free() -> None:
    """Once more tickets were out than there are staging buffers, one that is out alone still gets one."""
    t = CachedTables(9_000, settings(staging_buffers=1, staging_fraction=0.3), {"a": (1000, 48)})
    burst = [t.prefetch({0: run(10, first)})[0] for first in (0, 100, 200)]
    assert [bool(ticket.staging) for ticket in burst] == [True, False, False]
    for ticket in burst:
        ticket.release()
    for first in (300, 400, 500):
        ticket, ids = t.prefetch({0: run(10, first)})
        assert ticket.staging
        t.check(ticket, ids)
        ticket.release()
    t.check_integrity()


def test_a_staging_buffer_is_used_to_its_last_row() -> None:
    """Ten rows of 48 bytes fit into 480 bytes; the others are fetched into their slots, or read in place."""
    t = CachedTables(9_000, settings(staging_bytes=480), {"a": (1000, 48)})
    ticket, ids = t.prefetch({0: run(12)})
    assert int((ticket.locations[:12] < -1).sum()) == 10
    t.check(ticket, ids)


@pytest.mark.drawn(0.5)
def test_pages_that_moved_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hot ids are read some pages at a time; those that went to another class in between hold other rows by
    then.
    """
    t = CachedTables(60_000, settings(), {"a": (300, 48), "b": (300, 144)})
    t.look_up({0: run(100), 1: run(30)})
    pages = t.cache._pages
    monkeypatch.setattr(
        pages,
        "parts",
        lambda n: [[p] for p in pages.classes[n].pages] + [[p] for p in pages.classes[1].pages],
    )
    assert sorted(t.cache.hot(0).tolist()) == list(range(100))


def test_ids_out_of_range_are_left_to_the_lookup() -> None:
    t = CachedTables(9_000, settings(), {"a": (10, 48)})
    ticket, _ = t.prefetch({0: np.array([0, -1, 10, 2**40, 9])})
    assert ticket.locations[:5].tolist()[1:4] == [-1, -1, -1]
    t.check_integrity()


@pytest.mark.drawn(0.25)
def test_another_size_of_rows_gets_its_pages() -> None:
    """A table of wider rows that comes later takes pages from those that have them, also while a ticket is
    out.
    """
    t = CachedTables(60_000, settings(), {"a": (3000, 48)})
    ticket, ids = t.prefetch({0: run(300)})
    number = t.add(500, 144)
    t.check(ticket, ids)
    t.look_up({number: run(20)})
    ticket.release()
    for _ in range(2):
        t.look_up({number: run(20), 0: run(30)})
        t.check_integrity()
    assert t.cache.statistics(wait=True).tables[number].hits > 0


@pytest.mark.sanitized_gpu
@pytest.mark.drawn(0.5)
def test_forgotten_rows_are_gone() -> None:
    """The next table gets the number of the last one, and none of its rows."""
    t = CachedTables(30_000, settings(), {"a": (100, 48)})
    t.look_up({0: run(50)})
    t.cache.forget(0)
    t.check_integrity()
    assert t.cache.statistics(wait=True).occupied == 0
    assert t.add(70, 48) == 0
    t.look_up({0: run(50)})
    assert t.hits() == 0


@pytest.mark.drawn(0.5)
def test_hot_ids_come_hottest_first() -> None:
    t = CachedTables(30_000, settings(Policy.LFU), {"a": (300, 48)})
    for first in (0, 30, 30, 20, 0):  # the last use tells none of them apart
        t.look_up({0: run(40 - first, first)})
    hot = t.cache.hot(0)[:25].tolist()
    assert set(hot[:10]) == set(range(30, 40)) and set(hot[:20]) == set(range(20, 40)) and len(hot) == 25


@pytest.mark.sanitized_gpu
@pytest.mark.drawn(0.5)
def test_warm_rows_are_there_before_they_are_asked_for() -> None:
    """What is hot in one table is admitted for another, also where the cache is full of rows with better
    scores.
    """
    t = CachedTables(16_000, settings(Policy.LFU), {"a": (300, 48), "b": (300, 48)})
    for _ in range(3):
        t.look_up({0: run(t.cache.slots)})
    hot = t.cache.hot(0)[:30]
    t.cache.warm(1, hot)
    before = t.hits()
    t.look_up({1: hot})
    assert t.hits() - before == 30
    t.check_integrity()


@pytest.mark.thorough
def test_churn_leaves_nothing_behind() -> None:
    """After the cache's content was replaced many times its chains are as long as those of one that was just
    filled.
    """
    t = CachedTables(20_000, settings(), {"a": (4000, 48)})
    slots = t.cache.slots
    t.look_up({0: run(slots)})
    fresh = t.mean_chain()
    for first in range(slots, 4000 - slots, slots):
        t.look_up({0: run(slots, first)})
    t.check_integrity()
    assert t.cache.statistics(wait=True).evicted >= 10 * slots
    assert t.mean_chain() < fresh * 1.25


@pytest.mark.thorough
def test_a_prefetch_that_fails_leaves_a_cache_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken off at any kernel, the next batch finds an empty cache, every slot free, and its rows."""
    t = CachedTables(20_000, settings(Policy.LFU), {"a": (1000, 48)})
    t.look_up({0: run(60)})
    for name in ("probe", "enumerate_misses", "unlink", "insert", "end"):

        def broken(*_: object) -> None:
            raise RuntimeError("broken off")

        with monkeypatch.context() as patched:
            patched.setattr(t.cache._pipeline.kernels, name, broken)
            with pytest.raises(RuntimeError, match="broken off"):
                t.prefetch({0: run(100, 40)})
        t.check_integrity()
        t.look_up({0: run(90, 20)})
        t.check_integrity()
    assert t.cache.statistics(wait=True).locked_out == 0


@pytest.mark.thorough
def test_one_ticket_held_while_many_come_and_go() -> None:
    """While it is out nothing that was used since is evicted, also where numbers wrap; after it, all may
    be."""
    t = CachedTables(9_000, settings(staging_buffers=2, staging_fraction=0.3), {"a": (1000, 48)})
    t.cache._memory.state[BatchState.NOW] = 2**31 - 3  # numbers are about to wrap where they are kept short
    held, ids = t.prefetch({0: run(10)})
    for first in range(100, 700, 100):
        t.look_up({0: run(60, first)})
    t.check(held, ids)
    before = t.cache.statistics(wait=True)
    assert before.evicted == 0 and before.locked_out > 0
    held.release()
    t.look_up({0: run(t.cache.slots, 700)})
    after = t.cache.statistics(wait=True)
    assert (after.evicted, after.locked_out) == (t.cache.slots, before.locked_out)
    t.check_integrity()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cache(InterpretedDevice(), 100, stream=None), "a cache of 100 bytes holds no page"),
        (lambda: CacheSettings(half_life=0), "half_life of a cache is 0; expected 1 to 65536"),
        (lambda: CacheSettings(page_bytes=100), "page_bytes of a cache is 100; expected a multiple of 16"),
        (
            lambda: CachedTables(9_000, settings()).cache.register(0, 5, 50),
            "rows of 50 bytes cannot be cached",
        ),
        (lambda: check_table(0, 48), "a table of 0 rows of 48 bytes cannot be cached"),
        (lambda: check_table((1 << ID_BITS) + 1, 48), "cannot be cached; expected 1 to"),
        (lambda: check_table(5, 0), "rows of 0 bytes cannot be cached"),
        (lambda: check_table(5, 1 << 18), "rows of 262144 bytes cannot be cached; .* bytes below 262,144"),
        (lambda: CachedTables(9_000, settings()).add(5, 2048), "rows of 2048 bytes do not fit this cache"),
        (lambda: CachedTables(2_000, settings()), "cannot hold 2 sizes of rows"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(QuantError, match=message):
        make()


@pytest.mark.thorough
def test_hot_rows_are_in_order_while_batches_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses are compared with one ticket, however many begin while the pages are read."""
    monkeypatch.setattr("tableside.quant.cache.pages._PAGES_AT_ONCE", 1)
    t = CachedTables(20_000, settings(Policy.LRU), {"a": (100, 48), "b": (100, 48)})
    a, b = t.numbers["a"], t.numbers["b"]
    t.look_up({a: run(60)})
    index, hot_part = t.cache._index, t.cache._index.hot_part
    of_parts = [hot_part(a, part, 0)[0] & ((1 << ID_BITS) - 1) for part in index.parts(a)]
    of_parts = [ids.numpy() for ids in of_parts if ids.numel()]
    assert len(of_parts) > 1
    t.look_up({a: of_parts[-1]})  # the rows that are read last are the hottest

    def interrupted(*arguments: Any) -> Any:
        for _ in range(3):
            t.look_up({b: run(1)})
        return hot_part(*arguments)

    monkeypatch.setattr(index, "hot_part", interrupted)
    assert sorted(t.cache.hot(a)[: of_parts[-1].size]) == sorted(of_parts[-1])
