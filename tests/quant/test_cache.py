"""The cache against a plain dictionary: whatever is cached, evicted, locked or swapped, each id yields its table's bytes."""

import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import torch
from tables import expected_of, table_of

from tableside.quant import BadIds, Lookup, Pooling, QuantError, RowFormat, Table, choose
from tableside.quant.cache.cache import Cache, Ticket
from tableside.quant.cache.jobs import cache_jobs, cached_bytes
from tableside.quant.cache.kernels import State
from tableside.quant.cache.settings import CacheSettings, Policy
from tableside.quant.gpu.backend import Fused
from tableside.quant.gpu.layout import CacheJob

SIZES = {"a": (100, 48), "b": (1000, 144), "c": (30, 48)}  # rows, bytes of a row


class Tables:
    """Host tables of random bytes, cached; `batch` prefetches ids of all of them and gives what each id's location holds."""

    def __init__(self, budget: int, settings: CacheSettings, sizes: dict[str, tuple[int, int]] = SIZES) -> None:
        fused = Fused(tables.DEVICE, choose())
        self.cache = fused.open_cache(budget, min(size for _, size in sizes.values()), settings)
        self.rows: dict[int, torch.Tensor] = {}
        self.numbers = {name: self.add(*size) for name, size in sizes.items()}

    def add(self, rows: int, row_bytes: int) -> int:
        memory = torch.empty((rows, row_bytes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        memory.copy_(torch.from_numpy(np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), dtype=np.uint8)))
        number = self.cache.register(memory.data_ptr(), rows, row_bytes)
        self.rows[number] = memory
        return number

    def prefetch(self, ids: dict[int, np.ndarray], takes_all: bool = False) -> tuple[Ticket, dict[int, np.ndarray], torch.Tensor]:
        device = self.cache.device
        values = np.concatenate([np.zeros(1, np.int64), *ids.values()])
        inputs = torch.from_numpy(values).to(device).view(torch.uint8)
        jobs, at = [], 0
        for number, wanted in ids.items():
            jobs.append(CacheJob(number, 8 + 8 * at, wanted.size, 4 * at))
            at += wanted.size
        memory = torch.empty(cached_bytes(jobs), dtype=torch.uint8, device=device)
        written, launched = cache_jobs(jobs, memory.data_ptr(), device.type == "cpu")
        memory[: len(written)].copy_(torch.frombuffer(bytearray(written), dtype=torch.uint8))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return self.cache.prefetch(launched, inputs, takes_all), ids, memory

    def check(self, ticket: Ticket, ids: dict[int, np.ndarray]) -> None:
        """What lies at each location is the row."""
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize()
        arena, locations = self.cache._arena.cpu().numpy(), ticket.locations.cpu().numpy()
        at = 0
        for number, wanted in ids.items():
            rows = self.rows[number].numpy()
            for id in wanted:
                place, size = int(locations[at]), rows.shape[1]
                start = place * size if place >= 0 else ticket.pad - self.cache.slots_at + 16 * (-2 - place)
                found = rows[id] if place == -1 else arena[start : start + size]
                assert (found == rows[id]).all(), f"id {id} of table {number}, at {place}"
                at += 1

    def look_up(self, ids: dict[int, np.ndarray], takes_all: bool = False) -> None:
        ticket, ids, _ = self.prefetch(ids, takes_all)
        self.check(ticket, ids)
        ticket.release()

    def check_integrity(self) -> None:
        self.cache.check_integrity(lambda number, id: self.rows[number][id].numpy().tobytes())

    def hits(self) -> int:
        return sum(t.hits for t in self.cache.statistics(wait=True).tables.values())


def settings(policy: Policy = Policy.LRU, **more: Any) -> CacheSettings:
    return CacheSettings(policy, **{"page_bytes": 1024, **more})


def run(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int64)


@pytest.mark.parametrize(
    ("policy", "budget", "page_bytes", "held", "threads"),
    [
        (Policy.LRU, 7_000, 1024, 0, 0),
        (Policy.LFU, 7_000, 1024, 2, 2),
        (Policy.LRU, 60_000, 2048, 1, 2),
        (Policy.LFU, 60_000, 2048, 0, 0),
    ],
)
def test_every_id_yields_its_row(policy: Policy, budget: int, page_bytes: int, held: int, threads: int) -> None:
    """Random batches with duplicates and without ids, `held` tickets out at a time, a version swapped in the middle; from a cache
    of 30 slots, where most is padded or read in place, to one that holds a third of the rows; rows fetched by the GPU and by
    the CPU."""
    rng = np.random.default_rng(budget + held)
    t = Tables(budget, settings(policy, page_bytes=page_bytes, pads=2, gather_threads=threads, gather_from=20))
    out: deque[tuple[Ticket, dict[int, np.ndarray], torch.Tensor]] = deque()
    for number in range(7):
        ids = {n: rng.zipf(1.3, rng.integers(0, 80)) % len(t.rows[n]) for n in t.numbers.values()}
        out.append(t.prefetch(ids))
        while len(out) > held:
            ticket, ids, _ = out.popleft()
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


def test_a_slot_of_one_row() -> None:
    """The smallest cache there is: each row evicts the one before."""
    t = Tables(48 * 4, CacheSettings(Policy.LRU, page_bytes=128, pad_fraction=0.0), {"a": (10, 48)})
    assert t.cache.slots == 1
    for id in (3, 4, 3):
        t.look_up({0: run(1, id)})
        t.check_integrity()
    assert t.hits() == 0
    t.look_up({0: run(1, 3)})
    assert t.hits() == 1


def test_what_was_fetched_is_hit() -> None:
    """Each missing row comes over the bus once a batch, and not again while it is cached."""
    t = Tables(100_000, settings())
    ids = {t.numbers["b"]: np.tile(run(50), 3), t.numbers["a"]: run(20)}
    t.look_up(ids)
    t.look_up(ids)
    found = t.cache.statistics(wait=True)
    b = found.tables[t.numbers["b"]]
    assert (b.ids, b.hits, b.fetched, b.in_place) == (300, 150, 50, 0)
    assert b.bus_bytes == 50 * 144
    assert (found.inserted, found.evicted, found.occupied, found.tickets) == (70, 0, 70, 2)


def test_lru_evicts_what_was_not_used_for_longest() -> None:
    t = Tables(13_000, settings(pad_fraction=0.0), {"a": (1000, 48)})
    slots = t.cache.slots
    for first in (0, slots // 2):  # fills the cache in two halves; then the first is used again
        t.look_up({0: run(slots // 2, first)})
    t.look_up({0: run(slots // 2)})
    t.look_up({0: run(slots // 2, 500)})
    before = t.hits()
    t.look_up({0: run(slots // 2)})
    assert t.hits() - before == slots // 2


@pytest.mark.parametrize(("policy", "stay"), [(Policy.LFU, True), (Policy.LRU, False)])
def test_a_scan(policy: Policy, stay: bool) -> None:
    """Rows seen once each flush a cache that takes in everything, and pass by one that weighs them."""
    t = Tables(13_000, settings(policy), {"a": (3000, 48)})
    hot = run(t.cache.slots * 3 // 4)
    for _ in range(3):
        t.look_up({0: hot})
    for first in range(500, 2500, 500):
        t.look_up({0: run(500, first)})
    before = t.hits()
    t.look_up({0: hot})
    assert (t.hits() - before == hot.size) is stay


def test_rows_in_use_are_not_evicted() -> None:
    """While a ticket is out that uses every slot, others get none; once it is released, they do."""
    t = Tables(9_000, settings(pads=2, pad_fraction=0.3), {"a": (1000, 48)})
    slots = t.cache.slots
    first, ids, _ = t.prefetch({0: run(slots)})
    t.look_up({0: run(20, 500)})
    found = t.cache.statistics(wait=True)
    assert (found.locked_out, found.evicted, found.padded) == (20, 0, 20)
    t.check(first, ids)
    first.release()
    first.release()
    t.look_up({0: run(20, 500)})
    assert t.cache.statistics(wait=True).evicted == 20


def test_a_ticket_that_is_let_go_is_released() -> None:
    t = Tables(9_000, settings(), {"a": (1000, 48)})
    ticket, _, _ = t.prefetch({0: run(t.cache.slots)})
    del ticket
    t.look_up({0: run(20, 500)})
    assert t.cache.statistics(wait=True).evicted == 20


def test_a_pad_is_taken_where_one_is_free() -> None:
    """Once more tickets were out than there are pads, one that is out alone still gets one."""
    t = Tables(9_000, settings(pads=1, pad_fraction=0.3), {"a": (1000, 48)})
    burst = [t.prefetch({0: run(10, first)})[0] for first in (0, 100, 200)]
    assert [ticket.pad != t.cache.slots_at for ticket in burst] == [True, False, False]
    for ticket in burst:
        ticket.release()
    for first in (300, 400, 500):
        ticket, ids, _ = t.prefetch({0: run(10, first)})
        assert ticket.pad != t.cache.slots_at
        t.check(ticket, ids)
        ticket.release()
    t.check_integrity()


def test_pages_that_moved_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hot ids are read some pages at a time; those that went to another class in between hold other rows by then."""
    t = Tables(60_000, settings(), {"a": (300, 48), "b": (300, 144)})
    t.look_up({0: run(100), 1: run(30)})
    pages = t.cache._pages
    monkeypatch.setattr(pages, "parts", lambda n: [[p] for p in pages.classes[n].pages] + [[p] for p in pages.classes[1].pages])
    assert sorted(t.cache.hot(0).tolist()) == list(range(100))


def test_ids_out_of_range_are_left_to_the_lookup() -> None:
    t = Tables(9_000, settings(), {"a": (10, 48)})
    ticket, _, _ = t.prefetch({0: np.array([0, -1, 10, 2**40, 9])})
    assert ticket.locations[:5].tolist()[1:4] == [-1, -1, -1]
    t.check_integrity()


def test_another_size_of_rows_gets_its_pages() -> None:
    """A table of wider rows that comes later takes pages from those that have them, also while a ticket is out."""
    t = Tables(60_000, settings(), {"a": (3000, 48)})
    ticket, ids, _ = t.prefetch({0: run(300)})
    number = t.add(500, 144)
    t.check(ticket, ids)
    t.look_up({number: run(20)})
    ticket.release()
    for _ in range(2):
        t.look_up({number: run(20), 0: run(30)})
        t.check_integrity()
    assert t.cache.statistics(wait=True).tables[number].hits > 0


def test_forgotten_rows_are_gone() -> None:
    """The next table gets the number of the last one, and none of its rows."""
    t = Tables(30_000, settings(), {"a": (100, 48)})
    t.look_up({0: run(50)})
    t.cache.forget(0)
    t.check_integrity()
    assert t.cache.statistics(wait=True).occupied == 0
    assert t.add(70, 48) == 0
    t.look_up({0: run(50)})
    assert t.hits() == 0


def test_hot_ids_come_hottest_first() -> None:
    t = Tables(30_000, settings(Policy.LFU), {"a": (300, 48)})
    for count in (40, 20, 10):
        t.look_up({0: run(count)})
    hot = t.cache.hot(0, 25).tolist()
    assert set(hot[:10]) == set(range(10)) and set(hot[:20]) == set(range(20)) and len(hot) == 25


def test_warm_rows_are_there_before_they_are_asked_for() -> None:
    """What is hot in one table is taken in for another, also where the cache is full of rows with better scores."""
    t = Tables(16_000, settings(Policy.LFU), {"a": (300, 48), "b": (300, 48)})
    for _ in range(3):
        t.look_up({0: run(t.cache.slots)})
    hot = t.cache.hot(0, 30)
    t.cache.warm(1, hot)
    before = t.hits()
    t.look_up({1: hot})
    assert t.hits() - before == 30
    t.check_integrity()


def test_churn_leaves_nothing_behind() -> None:
    """After the cache's content was replaced many times its chains are as long as those of one that was just filled."""
    t = Tables(20_000, settings(), {"a": (4000, 48)})
    slots = t.cache.slots
    t.look_up({0: run(slots)})
    fresh = t.cache.mean_chain()
    for first in range(slots, 4000 - slots, slots):
        t.look_up({0: run(slots, first)})
    t.check_integrity()
    assert t.cache.statistics(wait=True).evicted >= 10 * slots
    assert t.cache.mean_chain() < fresh * 1.25


def test_a_prefetch_that_fails_leaves_a_cache_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken off at any kernel, the next batch finds an empty cache, every slot free, and its rows."""
    t = Tables(20_000, settings(Policy.LFU), {"a": (1000, 48)})
    t.look_up({0: run(60)})
    for name in ("probe", "enumerate", "unlink", "take_in", "end"):

        def broken(*_: object) -> None:
            raise RuntimeError("broken off")

        with monkeypatch.context() as patched:
            patched.setattr(t.cache._kernels, name, broken)
            with pytest.raises(RuntimeError, match="broken off"):
                t.prefetch({0: run(100, 40)})
        t.check_integrity()
        t.look_up({0: run(90, 20)})
        t.check_integrity()
    assert t.cache.statistics(wait=True).locked_out == 0


def test_one_ticket_held_while_many_come_and_go() -> None:
    """While it is out nothing that was used since is evicted, also where numbers wrap; after it, all may be."""
    t = Tables(9_000, settings(pads=2, pad_fraction=0.3), {"a": (1000, 48)})
    t.cache._state[State.NOW] = 2**31 - 3  # numbers are about to wrap where they are kept short
    held, ids, _ = t.prefetch({0: run(10)})
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


@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.MEAN])
def test_lookups_through_the_cache_are_the_same(pooling: Pooling) -> None:
    """Two formats and widths, weights, several requests of which one is wrong; twice, so that rows are missing and there."""
    backend = Fused(tables.DEVICE, choose())
    cache = backend.open_cache(60_000, 32)
    held = [table_of(RowFormat.INT8, 24), table_of(RowFormat.FP16, 36)]
    views = [(t, None if backend.is_interpreted else registered(t)) for t in held]
    cached = [backend.cached(t, v) for t, v in views]
    ids, lengths = np.array([3, 199, 0, 3, 7, 11, 150]), np.array([2, 0, 5], np.int32)
    inputs = ids.tobytes() + lengths.tobytes()
    bad = ids.copy()
    bad[5] = 200
    plans = [backend.plan([Lookup(t, pooling, 0, 7, 0, bags=3, lengths_at=56)]) for t in cached]
    for _ in range(2):
        first, refused, second = backend.run(
            [(plans[0], inputs), (plans[1], bad.tobytes() + lengths.tobytes()), (plans[1], inputs)]
        )
        assert isinstance(refused, BadIds) and (refused.position, refused.value) == (5, 200)
        for table, found in zip(held, (first, second), strict=True):
            wanted = expected_of(table, ids, None if pooling is Pooling.NONE else lengths, pooling)
            assert isinstance(found, np.ndarray)
            np.testing.assert_allclose(found.view(np.float32).reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-4)
    assert sum(s.hits for s in cache.statistics(wait=True).tables.values()) == 20
    del cached, plans
    backend.cached(*views[0])
    assert len(cache.statistics(wait=True).tables) == 1


def registered(table: Any) -> torch.Tensor:
    """A table's rows where the GPU reads them."""
    memory = torch.empty(table.packed.size, dtype=torch.uint8, pin_memory=True)
    memory.numpy()[:] = table.packed.reshape(-1)
    return memory


def test_prefetched_and_forwarded() -> None:
    """Two batches ahead: each call reads what its own ticket brought."""
    backend = Fused(tables.DEVICE, choose())
    backend.open_cache(40_000, 48, CacheSettings(pads=3))
    table = table_of(RowFormat.INT8, 40)
    cached = backend.cached(table, None if backend.is_interpreted else registered(table))
    lookup = backend.prepare(backend.plan([Lookup(cached, Pooling.NONE, 0, 7, 0)]))
    batches = [np.random.default_rng(n).integers(0, 200, 7) for n in range(4)]
    inputs = [torch.from_numpy(b).to(backend.device).view(torch.uint8) for b in batches]
    tickets = [lookup.prefetch(i) for i in inputs[:2]]
    for n, batch in enumerate(batches):
        if n + 2 < len(inputs):
            tickets.append(lookup.prefetch(inputs[n + 2]))
        outputs = torch.empty(lookup.out_bytes, dtype=torch.uint8, device=backend.device)
        lookup(inputs[n], outputs, tickets[n])
        np.testing.assert_array_equal(outputs.cpu().numpy().view(np.float32).reshape(7, 40), expected_of(table, batch))
    assert not lookup.flags.any()


@pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="captures a CUDA graph")
def test_a_lookup_is_a_graph() -> None:
    """Prefetch and lookup of a batch, hits and misses, wait for nothing: they can be captured, and replayed on other ids."""
    backend = Fused(tables.DEVICE, choose())
    backend.open_cache(40_000, 48, CacheSettings(pads=3, gather_threads=2, gather_from=5))
    table = table_of(RowFormat.INT8, 40)
    cached = backend.cached(table, registered(table))
    lookup = backend.prepare(backend.plan([Lookup(cached, Pooling.NONE, 0, 50, 0)]))
    inputs = torch.zeros(400, dtype=torch.uint8, device=backend.device)
    outputs = torch.empty(lookup.out_bytes, dtype=torch.uint8, device=backend.device)
    captured = lookup.capture(inputs, outputs)
    others, found = torch.zeros_like(inputs), torch.empty_like(outputs)
    for seed in range(30):
        other = np.random.default_rng(100 + seed).integers(0, 200, 50)
        others.copy_(torch.from_numpy(other).view(torch.uint8))
        ticket = lookup.prefetch(others) if seed % 3 == 0 else None  # is out while the graph runs
        if seed % 3 == 1:
            lookup(others, found)
        batch = np.random.default_rng(seed).integers(0, 200, 50)
        inputs.copy_(torch.from_numpy(batch).view(torch.uint8))
        if seed == 10:
            backend.cached(table_of(RowFormat.INT8, 40, rows=30_000), registered(table_of(RowFormat.INT8, 40, rows=30_000)))
        captured()
        if ticket is not None:
            lookup(others, found, ticket)
        if seed % 3 != 2:
            np.testing.assert_array_equal(found.cpu().numpy().view(np.float32).reshape(50, 40), expected_of(table, other))
        np.testing.assert_array_equal(outputs.cpu().numpy().view(np.float32).reshape(50, 40), expected_of(table, batch))
    backend.cache.check_integrity()  # type: ignore[union-attr]
    captured.close()


@pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="needs a GPU: 10 M ids")
@pytest.mark.parametrize("policy", list(Policy), ids=lambda p: p.value)
def test_ten_million_ids(policy: Policy) -> None:
    """Prefetched two batches ahead on one stream, looked up on another, evicting all the time, while a second table comes and
    goes: the same bytes as without the cache."""
    backend = Fused(tables.DEVICE, choose())
    device, rows, ids = backend.device, 300_000, 131_072
    backend.open_cache(6 << 20, 48, CacheSettings(policy, pads=3))
    small = table_of(RowFormat.INT8, 40, rows=1000)
    packed = np.tile(small.packed, (rows // 1000, 1))
    packed[:, 4:8] = np.arange(rows, dtype=np.uint32)[:, None].view(np.uint8)  # every row another
    table = Table(packed, RowFormat.INT8, 40)
    memory = registered(table)
    cached, held = backend.cached(table, memory), backend.hold(table)
    lookup = backend.prepare(backend.plan([Lookup(cached, Pooling.NONE, 0, ids, 0)]))
    plain = backend.prepare(backend.plan([Lookup(held, Pooling.NONE, 0, ids, 0)]))
    generator = torch.Generator(device=device).manual_seed(1)
    found, wanted = (torch.empty(lookup.out_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    loader, tickets, batches, wrong = torch.cuda.Stream(), deque(), deque(), torch.zeros((), dtype=torch.int64, device=device)
    for n in range(82):
        with torch.cuda.stream(loader):
            uniform = torch.rand(ids, device=device, generator=generator)
            batch = (uniform**3 * rows).long().clamp(max=rows - 1)
            batches.append(batch)
            tickets.append(lookup.prefetch(batch.view(torch.uint8)))
        if n % 20 == 10:
            other = backend.cached(small, registered(small))
            del other
        if n >= 2:
            torch.cuda.current_stream().wait_stream(loader)
            ours = batches.popleft()
            lookup(ours.view(torch.uint8), found, tickets.popleft())
            plain(ours.view(torch.uint8), wanted)
            wrong += (found != wanted).sum()
    assert int(wrong) == 0
    backend.cache.check_integrity(lambda number, id: packed[id].tobytes())  # type: ignore[union-attr]
    statistics = backend.cache.statistics(wait=True)  # type: ignore[union-attr]
    assert statistics.evicted > 10_000 and statistics.tables[0].ids == 82 * ids


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cache(torch.device("cpu"), 100), "a cache of 100 bytes holds no page"),
        (lambda: CacheSettings(half_life=0), "half_life of a cache is 0; expected 1 to 65536"),
        (lambda: CacheSettings(page_bytes=100), "page_bytes of a cache is 100; expected a multiple of 16"),
        (lambda: Tables(9_000, settings()).cache.register(0, 5, 50), "rows of 50 bytes cannot be cached"),
        (lambda: Tables(9_000, settings()).add(5, 2048), "rows of 2048 bytes do not fit this cache"),
        (lambda: Tables(2_000, settings()), "cannot hold 2 sizes of rows"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(QuantError, match=message):
        make()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tableside.quant.cache import kernels as k

LFU, TILE = dict(LFU=True), dict(ROWS=128, WORDS=64)
KERNELS = {
    "begin": (dict(CLASS_LANES=64), 1), "release": ({}, 1), "probe": (dict(**LFU, BLOCK=128), 1),
    "enumerate_missing": (dict(**LFU, MARKS=1), 4), "choose": (dict(**LFU, SAMPLE=1024, CLASS_LANES=64), 8),
    "admit": (dict(**LFU, BLOCK=256), 4), "evict": (dict(ANY=False, **LFU, BLOCK=512, CLASS_LANES=64), 1),
    "unlink": (dict(BLOCK=1024), 4), "take_in": (dict(**LFU, BLOCK=512), 4), "list_rows": (dict(BLOCK=256), 4),
    "bring": (dict(PIECES=2048), 8), "fetch": (dict(GATHERS=True, REST=False, **TILE), 8), "place": (TILE, 8),
    "resolve": (dict(BLOCK=128), 1), "end": (dict(BLOCK=256), 4), "link_all": (dict(BLOCK=1024), 4),
    "forget": (dict(BLOCK=1024), 4),
}
for name, (constants, warps) in KERNELS.items():
    kernel = getattr(k, name)
    arguments = [a for a in kernel.arg_names if a not in constants]
    signature = {**dict.fromkeys(arguments, "i64"), **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    assert ".local" not in ptx, f"{name}: registers spill, or arrays are in local memory"
    if name in ("bring", "fetch", "place"):
        assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "rows are not copied 16 bytes at a time"
print("compiled")
"""


def test_the_kernels_compile_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sm_90, without a GPU: no local memory, wide loads and stores."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-c", COMPILE]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "compiled"
