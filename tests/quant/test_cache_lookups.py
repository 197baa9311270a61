"""Lookups through the cache give what lookups of tables in HBM give: prefetched, captured as a graph,
evicting all the time.
"""

from collections import deque
from typing import Any

import numpy as np
import pytest
import tables
import torch
from rounding import expect
from tables import expected_of, table_of

from tableside.quant import BadIds, Lookup, Pooling, RowFormat, Table, choose
from tableside.quant.cache.settings import CacheSettings, Policy
from tableside.quant.gpu.backend import GpuBackend


@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.MEAN])
def test_lookups_through_the_cache_are_the_same(pooling: Pooling) -> None:
    """Two formats and widths, weights, several requests of which one is wrong; twice, so that rows are
    missing and there.
    """
    backend = GpuBackend(tables.DEVICE, choose())
    cache = backend.open_cache(60_000, 32)
    held = [table_of(RowFormat.INT8, 24), table_of(RowFormat.FP16, 36)]
    views = [(t, None if backend.device.reads_all_memory else registered(t)) for t in held]
    cached = [backend.to_cache(t, v) for t, v in views]
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
            assert isinstance(found, np.ndarray)
            wanted = expect(table, ids, None if pooling is Pooling.NONE else lengths, pooling=pooling)
            wanted.check(found.view(np.float32).reshape(-1, table.dim))
    assert sum(s.hits for s in cache.statistics(wait=True).tables.values()) == 20
    del cached, plans
    backend.to_cache(*views[0])
    assert len(cache.statistics(wait=True).tables) == 1


def registered(table: Any) -> torch.Tensor:
    """A table's rows where the GPU reads them."""
    memory = torch.empty(table.packed.size, dtype=torch.uint8, pin_memory=True)
    memory.numpy()[:] = table.packed.reshape(-1)
    return memory


def test_prefetched_and_forwarded() -> None:
    """Two batches ahead: each call reads what its own ticket brought."""
    backend = GpuBackend(tables.DEVICE, choose())
    backend.open_cache(40_000, 48, CacheSettings(staging_buffers=3))
    table = table_of(RowFormat.INT8, 40)
    cached = backend.to_cache(table, None if backend.device.reads_all_memory else registered(table))
    lookup = backend.prepare(backend.plan([Lookup(cached, Pooling.NONE, 0, 7, 0)]))
    batches = [np.random.default_rng(n).integers(0, 200, 7) for n in range(4)]
    inputs = [torch.from_numpy(b).to(backend.device.torch_device).view(torch.uint8) for b in batches]
    tickets = [lookup.prefetch(i) for i in inputs[:2]]
    for n, batch in enumerate(batches):
        if n + 2 < len(inputs):
            tickets.append(lookup.prefetch(inputs[n + 2]))
        outputs = torch.empty(lookup.out_bytes, dtype=torch.uint8, device=backend.device.torch_device)
        lookup(inputs[n], outputs, tickets[n])
        np.testing.assert_array_equal(outputs.cpu().numpy().view(np.float32).reshape(7, 40), expected_of(table, batch))
    assert not lookup.flags.any()


@pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="captures a CUDA graph")
def test_a_lookup_is_a_graph() -> None:
    """Prefetch and lookup of a batch, hits and misses, wait for nothing: they can be captured, and replayed
    on other ids.
    """
    backend = GpuBackend(tables.DEVICE, choose())
    backend.open_cache(40_000, 48, CacheSettings(staging_buffers=3, gather_threads=2, gather_from=5))
    table = table_of(RowFormat.INT8, 40)
    cached = backend.to_cache(table, registered(table))
    lookup = backend.prepare(backend.plan([Lookup(cached, Pooling.NONE, 0, 50, 0)]))
    inputs = torch.zeros(400, dtype=torch.uint8, device=backend.device.torch_device)
    outputs = torch.empty(lookup.out_bytes, dtype=torch.uint8, device=backend.device.torch_device)
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
            backend.to_cache(table_of(RowFormat.INT8, 40, rows=30_000), registered(table_of(RowFormat.INT8, 40, rows=30_000)))
        captured()
        if ticket is not None:
            lookup(others, found, ticket)
        if seed % 3 != 2:
            np.testing.assert_array_equal(found.cpu().numpy().view(np.float32).reshape(50, 40), expected_of(table, other))
        np.testing.assert_array_equal(outputs.cpu().numpy().view(np.float32).reshape(50, 40), expected_of(table, batch))
    backend.cache.check_integrity()  # type: ignore[union-attr]
    captured.close()


@pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="needs a GPU: 10 M ids")
@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("policy", list(Policy), ids=lambda p: p.value)
def test_ten_million_ids(policy: Policy, replays: bool) -> None:
    """Prefetched two batches ahead on one stream, looked up on another, evicting all the time, while a second
    table comes and goes: the same bytes as without the cache, whether launches are replayed or not.
    """
    backend = GpuBackend(tables.DEVICE, choose())
    device, rows, ids = backend.device.torch_device, 300_000, 131_072
    backend.open_cache(6 << 20, 48, CacheSettings(policy, staging_buffers=3, replays=replays))
    small = table_of(RowFormat.INT8, 40, rows=1000)
    packed = np.tile(small.packed, (rows // 1000, 1))
    packed[:, 4:8] = np.arange(rows, dtype=np.uint32)[:, None].view(np.uint8)  # every row another
    table = Table(packed, RowFormat.INT8, 40)
    memory = registered(table)
    cached, held = backend.to_cache(table, memory), backend.to_hbm(table)
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
            other = backend.to_cache(small, registered(small))
            del other
        if n >= 2:
            torch.cuda.current_stream().wait_stream(loader)
            ours = batches.popleft()
            for stream in (torch.cuda.current_stream(), backend.stream):  # they read it; `loader`, which wrote it, may not know
                ours.record_stream(stream)
            lookup(ours.view(torch.uint8), found, tickets.popleft())
            plain(ours.view(torch.uint8), wanted)
            wrong += (found != wanted).sum()
    assert int(wrong) == 0
    backend.cache.check_integrity(lambda number, id: packed[id].tobytes())  # type: ignore[union-attr]
    statistics = backend.cache.statistics(wait=True)  # type: ignore[union-attr]
    assert statistics.evicted > 10_000 and statistics.tables[0].ids == 82 * ids
    assert bool(backend.cache._pipeline._replays.graphs) == replays  # type: ignore[union-attr]
