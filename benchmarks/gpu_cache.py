"""The cache in HBM against FBGEMM's, over the same rows: a segment in shared memory, registered with CUDA.

    python benchmarks/gpu_cache.py --tables     # 26 tables x 500 k rows, pooled, 4096 bags of 20 ids: 5 % and
                                                # 20 % of rows cached
    python benchmarks/gpu_cache.py --keys       # one table, 262,144 keys a call, not pooled and pooled: 60 M
                                                # rows, 10 % cached
    python benchmarks/gpu_cache.py --wide       # the same, 400 M rows (57 GB), 5 % cached
    python benchmarks/gpu_cache.py --shift      # hit rates while the hot ids move, with a scan in it
    python benchmarks/gpu_cache.py --tight      # rows padded in host memory beside rows that are not
    python benchmarks/gpu_cache.py --hybrid     # a static split, where every id is as likely as any other

Every batch is new, drawn by Zipf's law over the rows; times are medians of steady state. Both are called
batch by batch, as they are used. Ours has the settings of `tableside serve` first (it replays the launches of
batches of a size, and gathers with eight threads where tables span 4 GiB or more), then others. Each is
measured with as many slots as FBGEMM's cache has, and with as many bytes of HBM as FBGEMM takes at most:
tables' maps, index, staging buffers, temporary arrays and outputs included.

What comes out is compared with a lookup without cache, bit by bit, before and after. Two floors are given:
the lookup with all rows in HBM, and the missing rows at the speed of one copy, or at that of a kernel that
does nothing but read as many rows.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from cache_workload import (
    DEVICE,
    FRESH,
    ROW_BYTES,
    TIMED,
    WARM,
    Ours,
    Workload,
    bare_fetch_ms,
    check,
    copy_gb_s,
    hbm_of,
    per_batch,
    steady_ms,
)
from common import console, report, shared_folder
from device_lookup import DeviceLookup

from tableside.quant.cache.settings import Policy
from tableside.quant.row_format import ALIGNMENTS, GPU_ALIGNMENT

WIDE_BYTES, GATHERERS = (
    4 << 30,
    8,
)  # from how many bytes of tables on `tableside serve` has the CPU gather, on this many cores


def compare(
    work: Workload, shares: Sequence[float], label: str, every_way: bool = True
) -> list[dict[str, Any]]:
    """Ours at FBGEMM's slots and at its bytes, for each policy and share of rows cached.

    every_way: with 16 threads and with launches that are not replayed, too.
    """
    copy = copy_gb_s(work)
    served = GATHERERS if work.segment.size >= WIDE_BYTES else 0
    reference = work.uncached(in_hbm=True)
    base_ms = steady_ms(reference, work.batches[WARM:-FRESH])
    found = []
    for share, policy in product(shares, Policy):
        theirs = measure_fbgemm(work, share, policy)
        slots_share = theirs["slots"] / (work.tables * work.rows)
        counts = dict.fromkeys((served, 0, 16) if every_way else (served, 0))
        ways: list[tuple[str, int, dict[str, Any]]] = [
            ("equal slots", n, {"gather_threads": n}) for n in counts
        ]
        if every_way:
            ways.append(
                ("equal slots, launches not replayed", served, {"gather_threads": served, "replays": False})
            )
        ways.append(("equal HBM", served, {"gather_threads": served}))
        more_bytes = 0
        for way, threads, more in ways:
            extra = more_bytes if way == "equal HBM" else 0
            row = measure_ours(work, slots_share, policy, reference, extra, **more)
            if way == "equal slots" and threads == served:
                more_bytes = int((theirs["HBM MB"] - row["HBM MB"]) * 1e6)
            fetched = round(row["fetched"])
            found.append(
                {
                    "work": label,
                    "cached": f"{share:.0%}",
                    "policy": policy.value,
                    "way": way,
                    "CPU threads": threads,
                    "as served": threads == served and way == "equal slots",
                    **row,
                    **{f"fbgemm {name}": value for name, value in theirs.items()},
                    "times_faster": theirs["ms"] / row["ms"],
                    "M keys/s": work.tables * work.ids / row["ms"] / 1e3,
                    "fbgemm M keys/s": work.tables * work.ids / theirs["ms"] / 1e3,
                    "all_hbm_ms": base_ms,
                    "copy floor ms": base_ms + fetched * ROW_BYTES / copy / 1e6,
                    "row floor ms": base_ms + bare_fetch_ms(work, fetched),
                }
            )
            console.print(found[-1])
            torch.cuda.empty_cache()
    return found


def measure_fbgemm(work: Workload, share: float, policy: Policy) -> dict[str, Any]:
    """FBGEMM's module: its time without statistics; its conflict misses, counted by another one over the
    same batches."""
    warm, timed = work.batches[:WARM], work.batches[WARM:-FRESH]

    def warmed(counts: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        call = work.fbgemm(share, policy, counts)
        for batch in warm:
            call(batch)
        return call

    theirs, hbm = hbm_of(lambda: warmed(False))
    ms = steady_ms(theirs, timed)
    slots = work.module.lxu_cache_state.numel()
    hit_rate = work.fbgemm_hit_rate(theirs, work.batches[-FRESH:])
    del theirs
    work.module = None
    torch.cuda.empty_cache()
    counting = warmed(True)
    work.module.reset_uvm_cache_stats()
    for batch in timed:
        counting(batch)
    conflicts = work.module.get_uvm_cache_stats().tolist()[5]
    del counting
    work.module = None
    torch.cuda.empty_cache()
    return {
        "ms": ms,
        "slots": slots,
        "HBM MB": hbm.peak,
        "HBM held MB": hbm.held,
        "hit rate": hit_rate,
        "conflict misses a batch": conflicts / len(timed),
    }


def measure_ours(
    work: Workload, share: float, policy: Policy, reference: DeviceLookup, more_bytes: int, **more: Any
) -> dict[str, Any]:
    """Our cache with slots for a share of the rows, and a budget larger by `more_bytes`."""
    warm, timed = work.batches[:WARM], work.batches[WARM:-FRESH]

    def warmed() -> Ours:
        made = work.ours(share, policy, more_bytes, **more)
        with torch.cuda.stream(made.stream):
            for batch in warm:
                made(batch)
        return made

    ours, hbm = hbm_of(warmed)
    with torch.cuda.stream(ours.stream):
        check(ours, reference, warm[-1])
        before = ours.cache.statistics(wait=True)
        ms = steady_ms(ours, timed)
        after = ours.cache.statistics(wait=True)
        check(ours, reference, timed[0])
    return {"ms": ms, "slots": after.slots, "HBM MB": hbm.peak, **per_batch(before, after, len(timed))}


def hybrid(work: Workload) -> list[dict[str, Any]]:
    """A fifth of the rows in HBM, and no id hotter than another, so that a cache earns nothing: a static
    split beside others."""
    warm, timed = work.batches[: WARM // 3], work.batches[WARM:-FRESH]
    reference = work.uncached(True)
    found = []

    def add(placement: str, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        vectors, wanted = call(timed[0]), reference(timed[0])
        torch.cuda.synchronize()
        assert torch.equal(vectors, wanted)
        found.append({"placement": placement, "ms": steady_ms(call, timed)})
        console.print(found[-1])

    for name, lookup in (
        ("hbm", reference),
        ("hybrid", work.split(205)),
        ("zero_copy", work.uncached(False)),
    ):
        add(name, lookup)
    for policy in Policy:
        ours = work.ours(0.2, policy)
        with torch.cuda.stream(ours.stream):
            for batch in warm:
                ours(batch)
            add(f"cached, {policy.value}", ours)
        del ours
        torch.cuda.empty_cache()
    theirs = work.fbgemm(0.2, Policy.LFU)
    for batch in warm:
        theirs(batch)
    found.append({"placement": "FBGEMM MANAGED_CACHING, lfu", "ms": steady_ms(theirs, timed)})
    console.print(found[-1])
    return found


def tight(root: Path) -> list[dict[str, Any]]:
    """Rows padded to 4 bytes in host memory beside rows padded to 16, with as many slots, in turns."""
    found = []
    for tables, rows, ids, share, bag_length in (
        (26, 500_000, 4096 * 20, 0.05, 20),
        (26, 500_000, 4096 * 20, 0.2, 20),
        (1, 60_000_000, 262_144, 0.1, 1),
    ):
        how = root, tables, rows, ids, 1.05, WARM + TIMED + FRESH, bag_length
        works = {a: Workload(*how, alignment=a) for a in ALIGNMENTS}
        references = {a: work.uncached(in_hbm=True) for a, work in works.items()}
        threads = GATHERERS if works[GPU_ALIGNMENT].segment.size >= WIDE_BYTES else 0
        row: dict[str, Any] = {
            "tables": tables,
            "rows": rows,
            "cached": f"{share:.0%}",
            "CPU threads": threads,
        }
        for turn, alignment in product(("", " again"), ALIGNMENTS):
            measured = measure_ours(
                works[alignment], share, Policy.LFU, references[alignment], 0, gather_threads=threads
            )
            row[f"ms at {alignment}{turn}"], row["hit rate"] = measured["ms"], measured["hit rate"]
            row[f"GB at {alignment}"] = works[alignment].segment.size / 1e9
            torch.cuda.empty_cache()
        tight, padded = (row[f"ms at {a}"] + row[f"ms at {a} again"] for a in ALIGNMENTS)
        found.append(row | {"times the time": tight / padded})
        console.print(found[-1])
        del works, references
    return found


def shift(work: Workload) -> list[dict[str, Any]]:
    """100 batches; every 25 a fifth of the hot ids moves away; batches 50 to 59 are half a scan over the
    table."""
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
    theirs = work.fbgemm(0.05, Policy.LRU, counts=True)  # with LFU it counts no misses
    rates = []
    for batch in batches:
        work.module.reset_uvm_cache_stats()
        theirs(batch)
        stats = work.module.get_uvm_cache_stats().tolist()
        rates.append(1 - stats[3] / max(1, stats[2]))
    found.append(phases("FBGEMM lru, of unique ids", rates))
    return found


def phases(name: str, rates: list[float]) -> dict[str, Any]:
    parts = {
        "first": (10, 25),
        "moved": (25, 30),
        "later": (40, 50),
        "scan": (50, 60),
        "after it": (60, 65),
        "end": (90, 100),
    }
    row = {"policy": name, **{label: statistics.mean(rates[a:b]) for label, (a, b) in parts.items()}}
    console.print(row)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("tables", "keys", "wide", "tight", "shift", "hybrid"):
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
        report(
            "gpu_cache_hybrid", "26 tables, pooled, every id as likely, a fifth in HBM", hybrid(work), gpu=gpu
        )
        del work
    if options.keys:
        rows = []
        for zipf, bag_length in ((1.05, 1), (1.2, 1), (1.05, 1024)):
            work = Workload(root, 1, 60_000_000, 262_144, zipf, batches, bag_length)
            label = f"60 M rows, Zipf {zipf}" + (", 256 bags of 1024" if bag_length > 1 else "")
            rows += compare(work, (0.1,), label)
            del work
        report("gpu_cache_keys", "one table, 262,144 keys a call", rows, gpu=gpu)
    if options.wide:
        work = Workload(root, 1, 400_000_000, 262_144, 1.05, batches)
        report(
            "gpu_cache_wide",
            "400 M rows, 262,144 keys a call",
            compare(work, (0.05,), "400 M rows, Zipf 1.05", False),
            gpu=gpu,
        )
        del work
    if options.tight:
        report("gpu_cache_tight", "rows padded in host memory, and not", tight(root), gpu=gpu)
    if options.shift:
        work = Workload(root, 1, 10_000_000, 262_144, 1.05, 1)
        report("gpu_cache_shift", "hit rates while hot ids move, with a scan", shift(work), gpu=gpu)
        del work


if __name__ == "__main__":
    main()
