"""The cache in HBM against FBGEMM's, over the same rows: a segment in shared memory, registered with CUDA.

    python benchmarks/gpu_cache.py --tables     # 26 tables x 500 k rows, pooled, 4096 bags of 20 ids: 5 % and 20 % of rows cached
    python benchmarks/gpu_cache.py --keys       # one table, 262,144 keys a call, not pooled and pooled: 60 M rows, 10 % cached
    python benchmarks/gpu_cache.py --wide       # the same, 400 M rows (57 GB), 5 % cached
    python benchmarks/gpu_cache.py --shift      # hit rates while the hot ids move, with a scan in it
    python benchmarks/gpu_cache.py --hybrid     # a static split, where every id is as likely as any other

Every batch is new, drawn by Zipf's law over the rows; times are medians of steady state. What comes out is compared with a lookup
without cache, bit by bit, before and after. The floor is the lookup with all rows in HBM plus the missing rows at a copy's speed.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from cache_workload import DEVICE, FRESH, ROW_BYTES, TIMED, WARM, Workload, check, copy_gb_s, per_batch, steady_ms
from common import console, report, shared_folder

from tableside.quant.cache.settings import Policy
from tableside.quant.gpu.prepared import PreparedLookup


def compare(work: Workload, shares: Sequence[float], label: str, threads: Sequence[int] = (0,)) -> list[dict[str, Any]]:
    """threads: of the CPU that gather misses; 0: the GPU reads them."""
    copy = copy_gb_s(work)
    warm, timed = work.batches[:WARM], work.batches[WARM:-FRESH]
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
        fbgemm_hits = work.fbgemm_hit_rate(theirs, work.batches[-FRESH:])
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
                    "fbgemm hit rate": fbgemm_hits,
                    "fbgemm conflict misses": stats[5],
                    "slots": after.slots,
                    "HBM MB": ours.cache.bytes / 1e6,
                }
            )
            console.print(found[-1])
            del ours
            torch.cuda.empty_cache()
    return found


def hybrid(work: Workload) -> list[dict[str, Any]]:
    """A fifth of the rows in HBM, and no id hotter than another, so that a cache earns nothing: a static split beside others."""
    warm, timed = work.batches[: WARM // 3], work.batches[WARM:-FRESH]
    reference = work.uncached(True)
    found = []

    def add(placement: str, call: Callable[[torch.Tensor], Any], lookup: PreparedLookup) -> None:
        outputs, wanted = (torch.empty(lookup.out_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        lookup(timed[0].view(torch.uint8), outputs)
        reference(timed[0].view(torch.uint8), wanted)
        torch.cuda.synchronize()
        assert torch.equal(outputs, wanted)
        found.append({"placement": placement, "ms": steady_ms(call, timed)})
        console.print(found[-1])

    outputs = torch.empty(reference.out_bytes, dtype=torch.uint8, device=DEVICE)

    def looked_up(lookup: PreparedLookup) -> Callable[[torch.Tensor], None]:
        return lambda batch: lookup(batch.view(torch.uint8), outputs)

    for name, lookup in (("hbm", reference), ("hybrid", work.split(205)), ("zero_copy", work.uncached(False))):
        add(name, looked_up(lookup), lookup)
    for policy in Policy:
        ours = work.ours(0.2, policy)
        with torch.cuda.stream(ours.stream):
            for batch in warm:
                ours(batch)
            add(f"cached, {policy.value}", ours, ours.lookup)
        del ours
        torch.cuda.empty_cache()
    theirs = work.fbgemm(0.2, Policy.LFU)
    for batch in warm:
        theirs(batch)
    found.append({"placement": "FBGEMM MANAGED_CACHING, lfu", "ms": steady_ms(theirs, timed)})
    console.print(found[-1])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tables", "keys", "wide", "shift", "hybrid"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    with shared_folder() as root:
        measure(options, root)


def measure(options: argparse.Namespace, root: Path) -> None:
    gpu = torch.cuda.get_device_name(DEVICE)
    batches = WARM + TIMED + FRESH
    if options.tables:
        work = Workload(root, 26, 500_000, 4096 * 20, 1.05, batches, 20)
        report("gpu_cache_tables", "26 tables, pooled", compare(work, (0.05, 0.2), "26 tables"), gpu=gpu)
        del work
    if options.hybrid:
        work = Workload(root, 26, 500_000, 4096 * 20, 0.0, batches, 20)
        report("gpu_cache_hybrid", "26 tables, pooled, every id as likely, a fifth in HBM", hybrid(work), gpu=gpu)
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


if __name__ == "__main__":
    main()
