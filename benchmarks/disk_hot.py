"""The hot segment over a table on a disk: how fast its rows are read, and how many of the ids it has.

    python benchmarks/disk_hot.py              # 4 GB of int8 rows below build/; some three minutes
    python benchmarks/disk_hot.py --gb 0.5     # smaller; printed and not written

Hits: a tenth of the rows is hot; lookups that pool 20 of their ids a bag, of one table and of as many rows in
26, and the same on copies in /dev/shm. They are planned each time, as those of requests are. Every vector is
compared first.
Hit rate: ids come by Zipf's law with 1.05, a million a second, over 4 M rows, whose hot segment has a tenth
of the bytes, and is made anew every two seconds. Beside it what an LRU of as many bytes of rows would have
had of the same ids. After 8 of 14 times other rows become the frequent ones.
Counting: the share of a core, while 10 M ids a second come.
"""

import argparse
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import alternate, report, shared_folder
from disk_rows import BAG, BATCHES, DIM
from make_model import publish_random

from tableside.loader.hot.counts import HOT, STEP, RowCounts
from tableside.loader.hot.hot import clear_hot, hot_folder
from tableside.loader.hot.warm import warm
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import LookupKind, Place, Pooling, RowSource, choose
from tableside.quant.contract import Waiting
from tableside.serving.model.placement import Placer
from tableside.serving.settings import ServerSettings

MODEL, TABLE, TABLES = "m", "t0", 26
SHARE, BATCH, ALPHA = 0.1, 16_640, 1.05
ZIPF_ROWS, ZIPF_RATE, PERIODS, SHIFT, PERIOD_S = 4_000_000, 1e6, 14, 8, 2.0
COUNTED_RATE, COUNTED_S = 10e6, 3.0


def counts_of(root: Path, version: Segment) -> RowCounts:
    with hot_folder(root, MODEL) as folder:
        return RowCounts.shared(folder, version)


def request_of(tables: Sequence[RowSource], ids: np.ndarray) -> Any:
    """What a request does that pools as many of the ids of each table."""
    n, bags = ids.size // len(tables), ids.size // len(tables) // BAG
    planner = choose().planner([LookupKind(table, Pooling.SUM) for table in tables])
    each = [Place(k, 8 * n * k, n, -1, BAG, bags, -1, 4 * DIM * bags * k) for k in range(len(tables))]
    places, inputs = np.array(each, np.int64).tobytes(), ids.tobytes()
    out = np.empty(len(tables) * bags * 4 * DIM, np.uint8)

    def run() -> np.ndarray:
        plan = planner.plan(places)
        if plan.waits and plan.run_at_once(inputs, out) is not None:
            return out
        begun = plan.begin(inputs)
        assert not isinstance(begun, Waiting) and begun.run(inputs, out) is None
        return out

    return run


def hits(root: Path, rows: int, tables: int) -> list[dict[str, Any]]:
    """rows: of all tables."""
    rows //= tables
    spec = {f"t{k}": (rows, DIM, "int8") for k in range(tables)}
    publish_random(root, MODEL, spec)
    model = Model(root, MODEL)
    version = model.attach(verify="header")
    hot = np.random.default_rng(2).choice(rows, int(SHARE * rows), replace=False)
    for counted in counts_of(root, version).tables.values():
        counted[hot] = STEP
    made = warm(model, version.header.version, 1 << 40)
    assert made.rows == hot.size * tables
    placed = Placer(ServerSettings(host_cache=1 << 40, root=root), choose()).place(version)
    found: list[dict[str, Any]] = []
    with shared_folder() as memory:
        publish_random(memory, MODEL, spec)
        plain = Model(memory, MODEL).attach(verify="header").tables
        for batch in BATCHES:
            ids = np.random.default_rng(3).choice(hot, batch // (BAG * tables) * BAG * tables)
            of_tables: dict[str, Mapping[str, RowSource]] = {"hot": placed.tables, "memory": plain}
            calls = {name: request_of([of[t] for t in spec], ids) for name, of in of_tables.items()}
            assert calls["hot"]().tobytes() == calls["memory"]().tobytes()
            times = alternate(calls, seconds=2.0)
            rates = {f"{name}_mrows_s": ids.size / each / 1e6 for name, each in times.items()}
            ratio = times["memory"] / times["hot"]
            found.append({"tables": tables, "ids": ids.size, **rates, "ratio": ratio})
    return found


class Lru:
    """What an LRU of rows has of the ids that it is asked for."""

    def __init__(self, rows: int) -> None:
        self._rows, self._kept = rows, OrderedDict[int, None]()

    def hits(self, ids: np.ndarray) -> int:
        found, kept = 0, self._kept
        for one in ids.tolist():
            if one in kept:
                kept.move_to_end(one)
                found += 1
            else:
                kept[one] = None
                if len(kept) > self._rows:
                    kept.popitem(last=False)
        return found


def hit_rates(root: Path) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    publish_random(root, MODEL, {TABLE: (ZIPF_ROWS, DIM, "int8")})
    model = Model(root, MODEL)
    version = model.attach(verify="header")
    table, counts = version.tables[TABLE], counts_of(root, version)
    budget = int(SHARE * ZIPF_ROWS * table.row_bytes)
    count, lru = counts.counter(TABLE, None), Lru(budget // table.row_bytes)
    ranks = np.cumsum(np.arange(1, ZIPF_ROWS + 1) ** -ALPHA)
    order = rng.permutation(ZIPF_ROWS)
    found: list[dict[str, Any]] = []
    for period in range(PERIODS):
        if period == SHIFT:
            order = rng.permutation(ZIPF_ROWS)
        batches = rng.random((int(ZIPF_RATE * PERIOD_S) // BATCH, BATCH)) * ranks[-1]
        asked = [order[ranks.searchsorted(batch)] for batch in batches]
        was_hot, began = counts.tables[TABLE] & HOT, time.monotonic()
        for number, ids in enumerate(asked):
            count(ids)
            time.sleep(max(0.0, began + (number + 1) * BATCH / ZIPF_RATE - time.monotonic()))
        every = np.concatenate(asked)
        rates = {
            "hot": float(np.count_nonzero(was_hot[every]) / every.size),
            "lru": lru.hits(every) / every.size,
        }
        found.append({"rebuilds_since_shift": period - SHIFT * (period >= SHIFT), "period": period, **rates})
        warm(model, 1, budget)
    return found


def counting(root: Path) -> float:
    """The share of a core. It leaves out what makes the ids."""
    version = Model(root, MODEL).attach(verify="header")
    counts, rng = counts_of(root, version), np.random.default_rng(4)
    assert counts.tables[TABLE].max()  # reads all of it, as after some time in use
    count = counts.counter(TABLE, None)
    batches = [rng.integers(0, version.tables[TABLE].rows, BATCH) for _ in range(64)]
    spent, asked = 0.0, int(COUNTED_RATE * COUNTED_S) // BATCH
    began = time.monotonic()
    for number in range(asked):
        before = time.thread_time()
        count(batches[number % len(batches)])
        spent += time.thread_time() - before
        time.sleep(max(0.0, began + (number + 1) * BATCH / COUNTED_RATE - time.monotonic()))
    return spent / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "build")
    options = parser.parse_args()
    roots = [options.folder / name for name in ("disk-hot", "disk-hot-tables", "disk-hot-zipf")]
    large, many, small = roots
    try:
        rows = hits(large, int(options.gb * 1e9) // 80, 1)
        share = counting(large)
        rows += hits(many, int(options.gb * 1e9) // 80, TABLES)
        rates = hit_rates(small)
        after = [r for r in rates if r["period"] >= SHIFT]
        if options.gb < 4:
            os.environ["TRIAL"] = "1"
        report(
            "disk_hot",
            f"a hot segment of {SHARE:.0%} of {options.gb:g} GB on a disk, int8 dim {DIM}",
            rows,
            rates=rates,
            steady=rates[SHIFT - 1],
            after_two_rebuilds=after[2],
            counting_core_share=share,
        )
    finally:
        for root in roots:
            clear_hot(root, MODEL, tuple)
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
