"""Rows of a registered segment and batches of ids for them, looked up through our cache, FBGEMM's, or none.

Both caches are called as they are used: FBGEMM's module eagerly, as in a server of PyTorch's, ours with the
settings that `tableside serve` gives it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from common import console
from device_lookup import DeviceLookup
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    CacheAlgorithm,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from make_model import publish_random

from tableside.loader.segment.registration import Registration
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat, Table, choose
from tableside.quant.cache.cache import Cache
from tableside.quant.cache.settings import CacheSettings, Policy
from tableside.quant.cache.statistics import Statistics
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.row_format import GPU_ALIGNMENT

T = TypeVar("T")
DEVICE = torch.device("cuda:0")
DIM = 128
ROW_BYTES = RowFormat.INT8.row_bytes(DIM)
INDEX_BYTES = {Policy.LRU: 20, Policy.LFU: 24}  # of a slot, beside its row
MOST_MISSES = 640_000  # rows of a batch that have room in a staging buffer
WARM, TIMED, FRESH = 60, 30, 5  # batches; the last ones for hit rates


class Workload:
    """A registered segment of int8 tables, and batches of ids for them on the device: int64 [tables *
    ids]."""

    def __init__(
        self,
        root: Path,
        tables: int,
        rows: int,
        ids: int,
        zipf: float,
        batches: int,
        bag_length: int = 1,
        seed: int = 0,
        alignment: int = GPU_ALIGNMENT,
    ) -> None:
        self.tables, self.rows, self.ids, self.bag_length = tables, rows, ids, bag_length
        self.generator = torch.Generator(device=DEVICE).manual_seed(seed)
        name = f"{tables}x{rows}x{alignment}"
        if not (root / name).exists():
            console.print(f"making {tables} tables of {rows:,} rows")
            shapes = {f"t{i:02}": (rows, DIM, "int8") for i in range(tables)}
            publish_random(root, name, shapes, alignment=alignment)
        self.segment = Model(root, name).attach(verify="header")
        self.registration = Registration(self.segment, DEVICE)
        self.batches = [self.draw(zipf) for _ in range(batches)]

    def draw(self, zipf: float, shift: int = 0) -> torch.Tensor:
        """Ids by Zipf's law over the rows, hot ids scattered; `shift` moves which rows are hot."""
        uniform = torch.rand(
            self.tables * self.ids, dtype=torch.float64, device=DEVICE, generator=self.generator
        )
        power = 1 - zipf
        ranks = (((self.rows + 1.0) ** power - 1) * uniform + 1) ** (1 / power)
        return ((ranks.clamp(max=self.rows).long() - 1) * 2654435761 + shift) % self.rows

    def seen(self, t: int) -> tuple[Table, torch.Tensor]:
        """A table, and its rows where the device reads them."""
        stored = self.segment.header.tables[t]
        return self.segment.tables[stored.name], self.registration.view(stored.offset, stored.bytes)

    def ours(self, share: float, policy: Policy, more_bytes: int = 0, **more: Any) -> "Ours":
        """A cache with slots for a share of the rows. more_bytes: what its budget is larger by."""
        backend = GpuBackend(str(DEVICE), choose())
        staging = more.get("staging_buffers", 1) * min(self.tables * self.ids, MOST_MISSES) * ROW_BYTES
        budget = (
            int(self.tables * self.rows * share * (ROW_BYTES + INDEX_BYTES[policy])) + staging + more_bytes
        )
        settings = CacheSettings(policy, staging_fraction=staging / budget, **{"replays": True} | more)
        cache = backend.open_cache(budget, ROW_BYTES, settings)
        tables = [backend.place("cached", *self.seen(t)) for t in range(self.tables)]
        return Ours(cache, backend.launcher.stream, DeviceLookup(backend, tables, self.bag_length))

    def uncached(self, in_hbm: bool) -> DeviceLookup:
        backend = GpuBackend(str(DEVICE), choose(), gather_from=1 << 60)
        kind = "hbm" if in_hbm else "zero_copy"
        tables = [backend.place(kind, *self.seen(t)) for t in range(self.tables)]
        return DeviceLookup(backend, tables, self.bag_length)

    def split(self, share: int) -> DeviceLookup:
        """Of every 1024 rows `share` in HBM, the others read in place."""
        backend = GpuBackend(str(DEVICE), choose())
        tables = [backend.place("hybrid", *self.seen(t), share=share) for t in range(self.tables)]
        return DeviceLookup(backend, tables, self.bag_length)

    def fbgemm(
        self, share: float, policy: Policy, counts: bool = False
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """FBGEMM's module over the same memory; its cache holds as many rows. counts: it keeps statistics."""
        specs = [
            (f"t{t}", self.rows, DIM, SparseType.INT8, EmbeddingLocation.MANAGED_CACHING)
            for t in range(self.tables)
        ]
        module = IntNBitTableBatchedEmbeddingBagsCodegen(
            specs,
            pooling_mode=PoolingMode.SUM if self.bag_length > 1 else PoolingMode.NONE,
            device=DEVICE,
            output_dtype=SparseType.FP16,
            row_alignment=16,
            bounds_check_mode=BoundsCheckMode.NONE,
            cache_algorithm=CacheAlgorithm.LFU if policy.is_lfu else CacheAlgorithm.LRU,
            cache_load_factor=share,
            gather_uvm_cache_stats=counts,
        )
        module.weights_physical_offsets = [t.offset for t in self.segment.header.tables]
        module.initialize_logical_weights_placements_and_offsets()
        module.weights_uvm = self.registration.view(0, self.segment.size)
        module.weight_initialized = True
        offsets = torch.arange(0, self.tables * self.ids + 1, self.bag_length, device=DEVICE)
        self.module = module
        return lambda ids: torch.as_tensor(module(ids, offsets))

    def fbgemm_hit_rate(
        self, theirs: Callable[[torch.Tensor], torch.Tensor], batches: Sequence[torch.Tensor]
    ) -> float:
        """Ids whose row FBGEMM's cache holds when their batch comes, counted in its state: with LFU it
        counts no misses."""
        firsts = torch.arange(self.tables, device=DEVICE) * self.rows
        hits = []
        for batch in batches:
            keys = (batch.view(self.tables, -1) + firsts[:, None]).view(-1)
            hits.append(float(torch.isin(keys, self.module.lxu_cache_state.view(-1)).float().mean()))
            theirs(batch)
        return statistics.mean(hits)


class Ours:
    """A lookup through a cache, on the cache's stream."""

    def __init__(self, cache: Cache, stream: Any, lookup: DeviceLookup) -> None:
        self.cache, self.stream, self.lookup = cache, stream, lookup

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lookup(ids)


@dataclass(frozen=True)
class Hbm:
    """MB of the device that something took, as torch's allocator counts them: at most, and when it was
    done."""

    peak: float
    held: float


def hbm_of(make: Callable[[], Any]) -> tuple[Any, Hbm]:
    """What `make` returns, and what it took of the device."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = make()
    torch.cuda.synchronize()
    return made, Hbm(
        (torch.cuda.max_memory_allocated() - before) / 1e6, (torch.cuda.memory_allocated() - before) / 1e6
    )


def bare_fetch_ms(work: Workload, rows: int) -> float:
    """Milliseconds of a kernel that does nothing but read so many rows of the segment, in the order of their
    addresses: the best of several shapes, each a median.
    """
    total = work.tables * work.rows
    firsts = torch.tensor([t.offset for t in work.segment.header.tables], device=DEVICE)
    ids = torch.randint(0, total, (12, max(1, rows)), device=DEVICE, generator=work.generator).sort(1).values
    places = list((firsts[ids // work.rows] + (ids % work.rows) * ROW_BYTES).unbind())
    source = work.registration.view(0, work.segment.size).data_ptr()
    target = torch.empty(max(1, rows) * ROW_BYTES // 4, dtype=torch.int32, device=DEVICE)

    def shape(programs: int, at_once: int, warps: int) -> float:
        def call(at: torch.Tensor) -> None:
            _read_rows[(programs,)](
                source, at, target, at.numel(), WORDS=ROW_BYTES // 4, ROWS=at_once, num_warps=warps
            )

        return steady_ms(call, places)

    return min(shape(*s) for s in ((66, 32, 4), (132, 128, 8), (264, 32, 4), (264, 64, 8)))


@triton.jit  # type: ignore[untyped-decorator]
def _read_rows(source, places, target, count, WORDS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies rows of WORDS int32, at bytes `places` int64 [count] of `source`, to `target`."""
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        n = block * ROWS + tl.arange(0, ROWS)
        row = tl.multiple_of((source + tl.load(places + n, n < count, 0)).to(tl.pointer_type(tl.int32)), 16)
        word = tl.arange(0, 64)[None, :]
        is_word = (n < count)[:, None] & (word < WORDS)
        tl.store(target + n[:, None] * WORDS + word, tl.load(row[:, None] + word, is_word, 0), is_word)


def steady_ms(call: Callable[[T], Any], batches: Sequence[T]) -> float:
    """Median milliseconds of a call, over batches in turn."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    marks[0].record()
    for batch, mark in zip(batches, marks[1:], strict=True):
        call(batch)
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


def per_batch(before: Statistics, after: Statistics, batches: int) -> dict[str, float]:
    ids, hits, fetched, in_place = (
        sum(getattr(t, name) for t in after.tables.values())
        - sum(getattr(t, name) for t in before.tables.values())
        for name in ("ids", "hits", "fetched", "in_place")
    )
    return {"hit rate": hits / ids, "fetched": fetched / batches, "in place": in_place / batches}


def check(ours: Ours, reference: DeviceLookup, batch: torch.Tensor) -> None:
    """The same vectors as without a cache, bit by bit."""
    found, wanted = (call(batch).view(torch.int16) for call in (ours, reference))
    torch.cuda.synchronize()
    assert torch.equal(found, wanted), f"{int((found != wanted).sum())} values differ"


def copy_gb_s(work: Workload) -> float:
    """The speed of a copy from the segment to the device."""
    target = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    source = work.registration.view(0, target.numel())
    return 1e3 * target.numel() / 1e9 / steady_ms(lambda _: target.copy_(source), [target] * 8)
