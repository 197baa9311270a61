"""Lookups through the cache give what lookups of tables in HBM give: prefetched, evicting all the time."""

from typing import Any

import numpy as np
import pytest
import tables
import torch
from cache_check import check
from cached_tables import registered
from rounding import expect
from tables import expected_of, fitting, table_of

from tableside.quant import BadIds, Lookup, LookupKind, Pooling, RowFormat, Table, choose
from tableside.quant.cache.settings import CacheSettings, Policy
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.tensors.calls import StagedLookup, TensorInput
from tableside.quant.gpu.tensors.tensors import TensorLookup

pytestmark = pytest.mark.gpu


@pytest.mark.sanitized_gpu
@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.MEAN])
@pytest.mark.drawn(1)
def test_lookups_through_the_cache_are_the_same(pooling: Pooling) -> None:
    """Two formats and widths, weights, several requests of which one is wrong; twice, so that rows are
    missing and there.
    """
    backend = GpuBackend(tables.DEVICE, choose())
    cache = backend.open_cache(60_000, 32)
    held = [table_of(RowFormat.INT8, 24), table_of(RowFormat.FP16, 36)]
    views = [(t, None if backend.device.reads_all_memory else registered(t)) for t in held]
    cached = [backend.place("cached", t, v) for t, v in views]
    ids, lengths = np.array([3, 199, 0, 3, 7, 11, 150]), np.array([2, 0, 5], np.int32)
    inputs = ids.tobytes() + lengths.tobytes()
    bad = ids.copy()
    bad[5] = 200
    plans = [backend.plan([Lookup(t, pooling, 0, 7, 0, bags=3, lengths_at=56)]) for t in cached]
    for _ in range(2):
        first, refused, second = tables.run_batch(
            backend, [(plans[0], inputs), (plans[1], bad.tobytes() + lengths.tobytes()), (plans[1], inputs)]
        )
        assert isinstance(refused, BadIds) and (refused.position, refused.value) == (5, 200)
        for table, found in zip(held, (first, second), strict=True):
            assert isinstance(found, np.ndarray)
            wanted = expect(table, ids, None if pooling is Pooling.NONE else lengths, pooling=pooling)
            wanted.check(found.view(np.float32).reshape(-1, table.dim))
    assert sum(s.hits for s in cache.statistics(wait=True).tables.values()) == 20
    del cached, plans
    backend.place("cached", *views[0])
    assert len(cache.statistics(wait=True).tables) == 1


@pytest.mark.sanitized_gpu
@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
@pytest.mark.drawn(1 / 3)
def test_rows_that_are_not_padded_are_padded_on_their_way(row_format: RowFormat) -> None:
    """To slots, to the staging buffer, and where neither has room, read as they lie: the last row ends where
    its memory does. Beside a table with padded rows, whose slots have the same size; pooled and not."""
    backend = GpuBackend(tables.DEVICE, choose())
    dims = (fitting(row_format, dim) for dim in range(36, 200, 1 if row_format is RowFormat.FP32 else 4))
    dim = next(dim for dim in dims if row_format.row_bytes(dim, 4) % 16)
    held = [
        table_of(row_format, dim, alignment=4),
        table_of(row_format, dim, seed=1),
        table_of(row_format, dim, alignment=4, seed=2),
    ]
    size = held[1].row_bytes
    few = CacheSettings(page_bytes=8 * size, staging_bytes=8 * size, staging_fraction=0.5)
    cache = backend.open_cache(40 * size, size, few)
    views = [None if backend.device.reads_all_memory else registered(t) for t in held]
    cached = [backend.place("cached", t, v) for t, v in zip(held, views, strict=True)]
    ids, lengths = np.array([3, 199, *range(20, 40), 0, 3, 199]), np.array([2, 0, 23], np.int32)
    weights = np.random.default_rng(1).standard_normal(ids.size).astype(np.float32)
    inputs = ids.tobytes() + weights.tobytes() + lengths.tobytes()
    for pooling in (Pooling.NONE, Pooling.SUM):
        how = {"weights": None if pooling is Pooling.NONE else weights, "pooling": pooling}
        at = {} if pooling is Pooling.NONE else {"weights_at": ids.nbytes, "lengths_at": len(inputs) - 12}
        plans = [backend.plan([Lookup(t, pooling, 0, ids.size, 0, bags=3, **at)]) for t in cached]
        for _ in range(2):
            for table, found in zip(
                held, tables.run_batch(backend, [(plan, inputs) for plan in plans]), strict=True
            ):
                assert isinstance(found, np.ndarray)
                wanted = expect(table, ids, None if pooling is Pooling.NONE else lengths, **how)
                wanted.check(found.view(np.float32).reshape(-1, table.dim))
    counts = cache.statistics(wait=True).tables.values()
    hits, in_place, fetched = (sum(getattr(c, n) for c in counts) for n in ("hits", "in_place", "fetched"))
    assert hits and in_place and fetched > in_place, counts


def unpooled(backend: GpuBackend, table: Any) -> TensorLookup:
    return TensorLookup(backend, ["a"], [LookupKind(table, Pooling.NONE)], Reports(backend.launcher))


def staged(lookup: TensorLookup, ids: torch.Tensor) -> StagedLookup:
    return lookup.stage_each([TensorInput(ids, None, 0, 0, None)])


@pytest.mark.sanitized_gpu
@pytest.mark.drawn(0.5)
def test_prefetched_and_forwarded() -> None:
    """Two batches ahead: each call reads what its own ticket brought."""
    backend = GpuBackend(tables.DEVICE, choose())
    backend.open_cache(40_000, 48, CacheSettings(staging_buffers=3))
    table = table_of(RowFormat.INT8, 40)
    cached = backend.place("cached", table, None if backend.device.reads_all_memory else registered(table))
    lookup = unpooled(backend, cached)
    batches = [np.random.default_rng(n).integers(0, 200, 7) for n in range(4)]
    calls = [staged(lookup, torch.from_numpy(b).to(backend.device.torch_device)) for b in batches]
    ahead = [lookup.prefetch(call) for call in calls[:2]]
    for n, batch in enumerate(batches):
        if n + 2 < len(calls):
            ahead.append(lookup.prefetch(calls[n + 2]))
        np.testing.assert_array_equal(
            lookup(ahead[n]).cpu().numpy().reshape(7, 40), expected_of(table, batch)
        )


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
    cached, held = backend.place("cached", table, memory), backend.place("hbm", table)
    lookup, plain = unpooled(backend, cached), unpooled(backend, held)
    generator = torch.Generator(device=device).manual_seed(1)
    loader, wrong = torch.cuda.Stream(), torch.zeros((), dtype=torch.int64, device=device)
    calls: list[StagedLookup] = []  # all stay, as two streams read what was allocated on a third
    batches: list[torch.Tensor] = []
    for n in range(82):
        with torch.cuda.stream(loader):
            uniform = torch.rand(ids, device=device, generator=generator)
            batch = (uniform**3 * rows).long().clamp(max=rows - 1)
            batches.append(batch)
            calls.append(lookup.prefetch(staged(lookup, batch)))
        if n % 20 == 10:
            other = backend.place("cached", small, registered(small))
            del other
        if n >= 2:
            torch.cuda.current_stream().wait_stream(loader)
            found, wanted = lookup(calls[n - 2]), plain(staged(plain, batches[n - 2]))
            wrong += (found.view(torch.int32) != wanted.view(torch.int32)).sum()
    assert int(wrong) == 0
    check(backend.cache, lambda number, id: packed[id].tobytes())  # type: ignore[arg-type]
    statistics = backend.cache.statistics(wait=True)  # type: ignore[union-attr]
    assert statistics.evicted > 10_000 and statistics.tables[0].ids == 82 * ids
    assert bool(backend.cache._pipeline._replays.graphs) == replays  # type: ignore[union-attr]
