"""The cache in HBM against FBGEMM's, over the same rows: a segment in shared memory, registered with CUDA.

    python benchmarks/gpu_cache.py --tables     # 26 tables x 500 k rows, pooled, 4096 bags of 20 ids: 5 % and 20 % of rows cached
    python benchmarks/gpu_cache.py --keys       # one table, 262,144 keys a call, not pooled and pooled: 60 M rows, 10 % cached
    python benchmarks/gpu_cache.py --wide       # the same, 400 M rows (57 GB), 5 % cached
    python benchmarks/gpu_cache.py --pipeline   # prefetched 0, 1 and 2 batches ahead of 2 ms of dense work
    python benchmarks/gpu_cache.py --shift      # hit rates while the hot ids move, with a scan in it
    python benchmarks/gpu_cache.py --index      # the index alone: 128 M slots, 1 M keys a call

Every batch is new, drawn by Zipf's law over the rows; times are medians of steady state. What comes out is compared with a lookup
without cache, bit by bit, before and after. The floor is the lookup with all rows in HBM plus the missing rows at a copy's speed.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from common import console, report, shared_folder
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from make_model import publish_random

from loader.registration import Registration
from loader.versions import Model
from quant import Lookup, Pooling, Precision, RowFormat, Table, choose
from quant.cache import Cache
from quant.cache_launch import cache_jobs, cached_bytes
from quant.cache_settings import CacheSettings, Policy
from quant.cache_statistics import Statistics
from quant.contract import DeviceTable
from quant.fused import Fused, PreparedLookup
from quant.fused_plan import CacheJob

DEVICE = torch.device("cuda:0")
DIM = 128
ROW_BYTES = RowFormat.INT8.row_bytes(DIM)
INDEX_BYTES = 44  # of a slot, beside its row
WARM, TIMED = 60, 30


class Workload:
    """A registered segment of int8 tables, and batches of ids for them on the device: int64 [tables * ids]."""

    def __init__(
        self, root: Path, tables: int, rows: int, ids: int, zipf: float, batches: int, bag_length: int = 1, seed: int = 0
    ) -> None:
        self.tables, self.rows, self.ids, self.bag_length = tables, rows, ids, bag_length
        self.generator = torch.Generator(device=DEVICE).manual_seed(seed)
        name = f"{tables}x{rows}"
        if not (root / name).exists():
            console.print(f"making {tables} tables of {rows:,} rows")
            publish_random(root, name, {f"t{i:02}": (rows, DIM, "int8") for i in range(tables)})
        self.segment = Model(root, name).attach(verify="header")
        self.registration = Registration(self.segment, DEVICE)
        self.batches = [self.draw(zipf) for _ in range(batches)]

    def draw(self, zipf: float, shift: int = 0) -> torch.Tensor:
        """Ids by Zipf's law over the rows, hot ids scattered; `shift` moves which rows are hot."""
        uniform = torch.rand(self.tables * self.ids, dtype=torch.float64, device=DEVICE, generator=self.generator)
        power = 1 - zipf
        ranks = (((self.rows + 1.0) ** power - 1) * uniform + 1) ** (1 / power)
        return ((ranks.clamp(max=self.rows).long() - 1) * 2654435761 + shift) % self.rows

    def seen(self, t: int) -> tuple[Table, torch.Tensor]:
        """A table, and its rows where the device reads them."""
        stored = self.segment.header.tables[t]
        return self.segment.tables[stored.name], self.registration.view(stored.offset, stored.bytes)

    def prepare(self, fused: Fused, tables: Sequence[DeviceTable]) -> PreparedLookup:
        pooling = Pooling.SUM if self.bag_length > 1 else Pooling.NONE
        lookups, at, bags = [], 0, self.ids // self.bag_length
        for n, table in enumerate(tables):
            lk = Lookup(table, pooling, 8 * self.ids * n, self.ids, at, Precision.FP16, bags=bags, bag_length=self.bag_length)
            lookups.append(lk)
            at += lk.out_bytes
        return fused.prepare(fused.plan(lookups))

    def ours(self, share: float, policy: Policy, **more: Any) -> "Ours":
        fused = Fused(str(DEVICE), choose())
        settings = CacheSettings(policy, **{"pad_fraction": 0.35, **more})
        budget = int(self.tables * self.rows * share * (ROW_BYTES + INDEX_BYTES) / (1 - settings.pad_fraction))
        cache = fused.open_cache(budget, ROW_BYTES, settings)
        tables = [fused.cached(*self.seen(t)) for t in range(self.tables)]
        return Ours(cache, fused._stream, self.prepare(fused, tables))

    def uncached(self, in_hbm: bool) -> PreparedLookup:
        fused = Fused(str(DEVICE), choose(), gather_from=1 << 60)
        hold = fused.hold if in_hbm else fused.view
        return self.prepare(fused, [hold(*self.seen(t)) for t in range(self.tables)])

    def fbgemm(self, share: float, policy: Policy) -> Callable[[torch.Tensor], torch.Tensor]:
        """FBGEMM's module over the same memory; its cache holds as many rows."""
        specs = [(f"t{t}", self.rows, DIM, SparseType.INT8, EmbeddingLocation.MANAGED_CACHING) for t in range(self.tables)]
        module = IntNBitTableBatchedEmbeddingBagsCodegen(
            specs,
            pooling_mode=PoolingMode.SUM if self.bag_length > 1 else PoolingMode.NONE,
            device=DEVICE,
            output_dtype=SparseType.FP16,
            row_alignment=16,
            bounds_check_mode=BoundsCheckMode.NONE,
            cache_algorithm=CacheAlgorithm.LFU if policy.is_lfu else CacheAlgorithm.LRU,
            cache_load_factor=share,
            gather_uvm_cache_stats=True,
        )
        module.weights_physical_offsets = [t.offset for t in self.segment.header.tables]
        module.initialize_logical_weights_placements_and_offsets()
        module.weights_uvm = self.registration.view(0, self.segment.size)
        module.weight_initialized = True
        offsets = torch.arange(0, self.tables * self.ids + 1, self.bag_length, device=DEVICE)
        self.module = module
        return lambda ids: torch.as_tensor(module(ids, offsets))


class Ours:
    """A lookup through a cache, on the cache's stream."""

    def __init__(self, cache: Cache, stream: Any, lookup: PreparedLookup) -> None:
        self.cache, self.stream, self.lookup = cache, stream, lookup
        self.outputs = torch.empty(lookup.out_bytes, dtype=torch.uint8, device=DEVICE)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self.lookup(ids.view(torch.uint8), self.outputs)
        return self.outputs

    def capture(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The same, as a graph that is replayed."""
        inputs = torch.zeros(self.lookup.in_bytes, dtype=torch.uint8, device=DEVICE)
        captured = self.lookup.capture(inputs, self.outputs)

        def call(ids: torch.Tensor) -> torch.Tensor:
            inputs.copy_(ids.view(torch.uint8), non_blocking=True)
            captured()
            return self.outputs

        return call


def steady_ms(call: Callable[[torch.Tensor], Any], batches: Sequence[torch.Tensor]) -> float:
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
        sum(getattr(t, name) for t in after.tables.values()) - sum(getattr(t, name) for t in before.tables.values())
        for name in ("ids", "hits", "fetched", "in_place")
    )
    return {"hit rate": hits / ids, "fetched": fetched / batches, "in place": in_place / batches}


def check(work: Workload, ours: Ours, reference: PreparedLookup, batch: torch.Tensor) -> None:
    """The same bytes as without a cache."""
    wanted = torch.empty_like(ours.outputs)
    reference(batch.view(torch.uint8), wanted)
    ours.outputs.fill_(0xEE)
    found = ours(batch)
    torch.cuda.synchronize()
    assert torch.equal(found, wanted), f"{int((found != wanted).sum())} bytes differ"


def copy_gb_s(work: Workload) -> float:
    """The speed of a copy from the segment to the device."""
    target = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    source = work.registration.view(0, target.numel())
    return 1e3 * target.numel() / 1e9 / steady_ms(lambda _: target.copy_(source), [target] * 8)


def compare(work: Workload, shares: Sequence[float], label: str, threads: Sequence[int] = (0,)) -> list[dict[str, Any]]:
    """threads: of the CPU that gather what is missing; 0: the GPU reads it."""
    copy = copy_gb_s(work)
    warm, timed = work.batches[:WARM], work.batches[WARM:]
    keys = work.tables * work.ids
    in_hbm = work.tables * work.rows * ROW_BYTES < 30e9
    reference = work.uncached(in_hbm)
    outputs = torch.empty(reference.out_bytes, dtype=torch.uint8, device=DEVICE)
    base_ms = steady_ms(lambda b: reference(b.view(torch.uint8), outputs), timed) if in_hbm else float("nan")
    found = []
    for share, policy in product(shares, Policy):
        theirs = work.fbgemm(share, policy)
        for batch in warm:
            theirs(batch)
        work.module.reset_uvm_cache_stats()
        fbgemm_ms = steady_ms(theirs, timed)
        # Calls, requested, unique, unique misses, unique conflict misses, conflict misses.
        stats = work.module.get_uvm_cache_stats().tolist()
        del theirs
        work.module = None
        torch.cuda.empty_cache()
        for count in threads:
            ours = work.ours(share, policy, gather_threads=count)
            with torch.cuda.stream(ours.stream):
                for batch in warm:
                    ours(batch)
                check(work, ours, reference, warm[-1])
                before = ours.cache.statistics(wait=True)
                launched_ms = steady_ms(ours, timed[: TIMED // 2])
                ms = steady_ms(ours.capture(), timed[TIMED // 2 :])
                after = ours.cache.statistics(wait=True)
                check(work, ours, reference, timed[0])
            counts = per_batch(before, after, len(timed))
            found.append(
                {
                    "work": label,
                    "cached": f"{share:.0%}",
                    "policy": policy.value,
                    "CPU threads": count,
                    "ours_ms": ms,
                    "launched_ms": launched_ms,
                    "fbgemm_ms": fbgemm_ms,
                    "times_faster": fbgemm_ms / ms,
                    "M keys/s": keys / ms / 1e3,
                    "fbgemm M keys/s": keys / fbgemm_ms / 1e3,
                    "all_hbm_ms": base_ms,
                    "floor_ms": base_ms + counts["fetched"] * ROW_BYTES / copy / 1e6,
                    **counts,
                    "fbgemm hit rate of unique": 1 - stats[3] / max(1, stats[2]),
                    "fbgemm conflict misses": stats[5],
                    "slots": after.slots,
                    "HBM MB": ours.cache.bytes / 1e6,
                }
            )
            console.print(found[-1])
            del ours
            torch.cuda.empty_cache()
    return found


def pipeline(work: Workload) -> list[dict[str, Any]]:
    """Batches prefetched ahead on the cache's stream, while the compute stream looks up and multiplies matrices for 2 ms."""
    side = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    one = steady_ms(lambda _: side @ side, [side] * 20)
    times = max(1, round(2.0 / one))
    reference = work.uncached(True)
    outputs = torch.empty(reference.out_bytes, dtype=torch.uint8, device=DEVICE)

    def dense() -> None:
        for _ in range(times):
            side @ side

    def all_hbm(batch: torch.Tensor) -> None:
        reference(batch.view(torch.uint8), outputs)
        dense()

    warm, timed = work.batches[:WARM], work.batches[WARM:]
    steady_ms(all_hbm, warm[:10])
    base_ms = steady_ms(all_hbm, timed)
    found = []
    for ahead, programs in ((0, 1056), (1, 16), (1, 32), (1, 64), (1, 132), (2, 32)):
        ours = work.ours(0.2, Policy.LFU, pads=ahead + 1, pad_fraction=0.3, row_programs=programs)
        tickets: list[Any] = []
        loader = torch.cuda.Stream()
        inputs = [b.view(torch.uint8) for b in work.batches]
        marks = [torch.cuda.Event(enable_timing=True) for _ in inputs]
        before = None
        for n, mark in enumerate(marks):
            if n == WARM:
                before = ours.cache.statistics(wait=True)
            while len(tickets) <= min(n + ahead, len(inputs) - 1):
                with torch.cuda.stream(loader):  # where inputs come from; it waits for no dense part
                    tickets.append(ours.lookup.prefetch(inputs[len(tickets)]))
            ours.lookup(inputs[n], ours.outputs, tickets[n])
            dense()
            mark.record()
        torch.cuda.synchronize()
        assert before is not None
        counts = per_batch(before, ours.cache.statistics(wait=True), len(timed))
        ms = statistics.median(a.elapsed_time(b) for a, b in pairwise(marks[WARM:]))
        reference(inputs[-1], outputs)
        torch.cuda.synchronize()
        assert torch.equal(outputs, ours.outputs)
        found.append({"ahead": ahead, "row programs": programs, "ms": ms, "all_hbm_ms": base_ms, "ratio": ms / base_ms, **counts})
        console.print(found[-1])
        del ours, tickets
        torch.cuda.empty_cache()
    return found


def shift(work: Workload) -> list[dict[str, Any]]:
    """100 batches; every 25 a fifth of the hot ids moves away; batches 50 to 59 are half a scan over the table."""
    batches = []
    for n in range(100):
        ids = work.draw(1.05, shift=0)
        moved = torch.rand(ids.numel(), device=DEVICE, generator=work.generator) < 0.2 * (n // 25)
        ids = torch.where(moved, (ids + 7_654_321 * (n // 25)) % work.rows, ids)
        if 50 <= n < 60:
            half = ids.numel() // 2
            ids[:half] = torch.arange(half, device=DEVICE) + (n - 50) * half
        batches.append(ids)
    found = []
    for policy in Policy:
        for half_life in (20, 1000) if policy.is_lfu else (1000,):
            ours = work.ours(0.05, policy, half_life=half_life)
            rates = []
            with torch.cuda.stream(ours.stream):
                last = ours.cache.statistics(wait=True)
                for batch in batches:
                    ours(batch)
                    now = ours.cache.statistics(wait=True)
                    rates.append(per_batch(last, now, 1)["hit rate"])
                    last = now
            name = f"{policy.value}, half life {half_life}" if policy.is_lfu else policy.value
            found.append(phases(name, rates))
            del ours
            torch.cuda.empty_cache()
    theirs = work.fbgemm(0.05, Policy.LRU)  # with LFU it counts no misses
    rates = []
    for batch in batches:
        work.module.reset_uvm_cache_stats()
        theirs(batch)
        stats = work.module.get_uvm_cache_stats().tolist()
        rates.append(1 - stats[3] / max(1, stats[2]))
    found.append(phases("FBGEMM lru, of unique ids", rates))
    return found


def phases(name: str, rates: list[float]) -> dict[str, Any]:
    parts = {"first": (10, 25), "moved": (25, 30), "later": (40, 50), "scan": (50, 60), "after it": (60, 65), "end": (90, 100)}
    row = {"policy": name, **{label: statistics.mean(rates[a:b]) for label, (a, b) in parts.items()}}
    console.print(row)
    return row


def index() -> list[dict[str, Any]]:
    """Keys of rows of 16 bytes that lie in HBM, so that what is timed is the index: LRU, 1 M keys a call."""
    slots, keys, rows = 128 << 20, 1 << 20, 1 << 28
    table = torch.empty(rows * 16, dtype=torch.uint8, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cache = Cache(
            DEVICE,
            int(slots * (16 + 20 + 8.2)),
            CacheSettings(Policy.LRU, pad_fraction=0.0),
            smallest_row_bytes=16,
            stream=stream,
        )
        number = cache.register(table.data_ptr(), rows, 16)
        total = cache.slots
        order = torch.randperm(rows, device=DEVICE)
        jobs = [CacheJob(number, 0, keys, 0)]
        memory = torch.empty(cached_bytes(jobs), dtype=torch.uint8, device=DEVICE)
        written, launched = cache_jobs(jobs, memory.data_ptr(), False)
        memory[: len(written)].copy_(torch.frombuffer(bytearray(written), dtype=torch.uint8))

        def call(ids: torch.Tensor) -> None:
            cache.prefetch(launched, ids.view(torch.uint8)).release()

        found = []
        done = 0

        def insert(until: int) -> float:
            nonlocal done
            parts = []
            while done < until:
                at = done % rows
                parts.append(order[at : at + keys])
                done += keys
            return steady_ms(call, parts) if parts else float("nan")

        def add(label: str, insert_ms: float, held: torch.Tensor) -> None:
            ids = [held[torch.randint(0, held.numel(), (keys,), device=DEVICE)] for _ in range(12)]
            before = cache.statistics(wait=True)
            hit_ms = steady_ms(call, ids)
            after = cache.statistics(wait=True)
            hits = per_batch(before, after, len(ids))["hit rate"]
            find_ms = steady_ms(lambda i: cache.probe(launched, i.view(torch.uint8)), ids)
            found.append(
                {
                    "state": label,
                    "load": after.occupied / total,
                    "find G keys/s": keys / find_ms / 1e6,
                    "prefetch of hits G keys/s": keys / hit_ms / 1e6,
                    "insert G keys/s": keys / insert_ms / 1e6,
                    "hit rate": hits,
                    "mean chain": cache.mean_chain(),
                    "locked out": after.locked_out,
                }
            )
            console.print(found[-1])

        for load in (0.5, 0.75, 1.0):
            ms = insert(int(total * load) // keys * keys)
            add(f"filled to {load}", ms, order[:done])
        ms = insert(done + 16 * keys)
        add("full: each insert evicts", ms, order[done - total // 2 : done])
        insert(done + 84 * keys)
        ms = insert(done + 16 * keys)
        held = torch.cat([order, order])[done - total // 2 : done]
        add("after 100 M inserts and evictions", ms, held)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tables", "keys", "wide", "pipeline", "shift", "index"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    with shared_folder() as root:
        measure(options, root)


def measure(options: argparse.Namespace, root: Path) -> None:
    gpu = torch.cuda.get_device_name(DEVICE)
    batches = WARM + TIMED
    if options.tables or options.pipeline:
        work = Workload(root, 26, 500_000, 4096 * 20, 1.05, batches, 20)
        if options.tables:
            report("gpu_cache_tables", "26 tables, pooled", compare(work, (0.05, 0.2), "26 tables"), gpu=gpu)
        if options.pipeline:
            report("gpu_cache_pipeline", "prefetched ahead of 2 ms of dense work", pipeline(work), gpu=gpu)
        del work
    if options.keys:
        rows = []
        for zipf, bag_length in ((1.05, 1), (1.2, 1), (1.05, 1024)):
            work = Workload(root, 1, 60_000_000, 262_144, zipf, batches, bag_length)
            label = f"60 M rows, Zipf {zipf}" + (", 256 bags of 1024" if bag_length > 1 else "")
            rows += compare(work, (0.1,), label, (0, 16))
            del work
        report("gpu_cache_keys", "one table, 262,144 keys a call", rows, gpu=gpu)
    if options.wide:
        work = Workload(root, 1, 400_000_000, 262_144, 1.05, batches)
        report(
            "gpu_cache_wide", "400 M rows, 262,144 keys a call", compare(work, (0.05,), "400 M rows, Zipf 1.05", (0, 16)), gpu=gpu
        )
        del work
    if options.shift:
        work = Workload(root, 1, 10_000_000, 262_144, 1.05, 1)
        report("gpu_cache_shift", "hit rates while hot ids move, with a scan", shift(work), gpu=gpu)
        del work
    if options.index:
        report("gpu_index", "the index alone, 1 M keys a call", index(), gpu=gpu)


if __name__ == "__main__":
    main()
