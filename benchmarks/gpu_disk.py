"""A GPU's cache over a table on a disk, beside the same cache over the same rows in shared memory.

    python benchmarks/gpu_disk.py                      # 400 M rows, 27 GB below build/ and in /dev/shm
    python benchmarks/gpu_disk.py --rows 1e7           # smaller; printed and not written
    python benchmarks/gpu_disk.py --folder /mnt/ssd    # another disk

One table of int8 rows with 64 values; keys by Zipf's law with 1.05, not pooled. Both are placed as
`tableside serve --placement cached` places them, with equal caches that begin with the twentieth of the rows
that is used most. On the disk the fifth of the rows that comes next lies in a hot segment. Each batch is new,
and is prefetched while the one before it is looked up; times are wall time. In memory the GPU, or eight
threads of the CPU, read what is missing. On the disk it is read from the hot segment, and from the page
cache, which has all of the file or, cold, none of it when a round begins. Every vector is compared first.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import console, report, shared_folder
from device_lookup import DeviceLookup
from disk_rows import forget
from make_model import publish_random

from tableside.loader.hot.counts import STEP, RowCounts
from tableside.loader.hot.hot import clear_hot, hot_folder
from tableside.loader.hot.warm import warm
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.model.placement import Placer
from tableside.serving.settings import ServerSettings

MODEL, TABLE, DIM, ALPHA = "m", "t", 64, 1.05
CACHED, HOT = 0.05, 0.2  # of the rows
SLOT_BYTES, MORE = (
    80 + 24,
    1.4,
)  # of a row in the cache; what staging, maps and deltas take of a budget beside it
BATCHES = {262_144: 20, 16_384: 60, 1_280: 200}  # keys of a batch: so many of a round
ROUNDS, WARM_UP, WARM_IDS = 3, 20, 1 << 22


def ranked(ranks: np.ndarray, rows: int) -> np.ndarray:
    """The rows with these places among those that are used most, from 0."""
    return ranks * 2654435761 % rows


class Keys:
    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self._device, self._rng = rows, device, np.random.default_rng(7)

    def draw(self, keys: int) -> torch.Tensor:
        power = 1 - ALPHA
        ranks = (((self.rows + 1.0) ** power - 1) * self._rng.random(keys) + 1) ** (1 / power)
        ids = ranked(np.minimum(ranks.astype(np.int64), self.rows) - 1, self.rows)
        return torch.from_numpy(ids).to(self._device)


class Cached:
    """The table of a version, placed in a cache that has the rows used most."""

    def __init__(self, segment: Segment, device: str, budget: int) -> None:
        self.read = read = dict[str, int]()

        def count(where: str, rows: int) -> None:
            read[where] = read.get(where, 0) + rows

        def count_reads(reader: Any, *table: str) -> None:
            reader.count = count

        device_settings: dict[str, Any] = {"devices": (device,), "placement": "cached", "hbm_budget": budget}
        settings = ServerSettings(**device_settings, host_cache=1 << 40)
        placer = Placer(settings, choose(), ahead=1, count_reads=count_reads)
        placer.open()
        self.placed = placer.place(segment)
        assert placer.gpu is not None and placer.cache is not None
        self.gpu, self.cache = placer.gpu, placer.cache
        self.table = self.placed.on_gpu[TABLE]
        self.lookup = DeviceLookup(self.gpu, [self.table])

    def run(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """The vectors of the last one."""
        ahead = self.lookup.prefetch(batches[0])
        for following in [*batches[1:], None]:
            staged, ahead = ahead, ahead if following is None else self.lookup.prefetch(following)
            found = self.lookup.run(staged)
        self.gpu.device.synchronize()
        return found

    def ms(self, batches: list[torch.Tensor]) -> float:
        """A batch."""
        self.gpu.device.synchronize()
        began = time.perf_counter()
        self.run(batches)
        return 1e3 * (time.perf_counter() - began) / len(batches)

    def counts(self) -> tuple[int, int, int]:
        (of,) = self.cache.statistics(wait=True).tables.values()
        return of.ids, of.hits, of.fetched


def compare(
    memory: Cached, disk: Cached, segment: Segment, keys: Keys, size: int, count: int
) -> dict[str, Any]:
    for way in (memory, disk):
        way.run([keys.draw(size) for _ in range(WARM_UP)])
    checked = keys.draw(size)
    found = [way.run([checked]).view(torch.int16) for way in (memory, disk)]
    assert torch.equal(*found), f"{int((found[0] != found[1]).sum())} values differ"
    times: dict[str, list[float]] = {"memory": [], "page_cache": [], "cold": []}
    ways: dict[str, tuple[Cached, Callable[[], None]]] = {
        "memory": (memory, lambda: None),
        "page_cache": (disk, lambda: read_all(segment)),
        "cold": (disk, lambda: forget(segment.files[1].path, segment)),
    }
    row: dict[str, Any] = {"keys": size}
    for _ in range(ROUNDS):
        for name, (way, prepare) in ways.items():
            prepare()
            batches = [keys.draw(size) for _ in range(count)]
            way.read.clear()
            before = way.counts()
            times[name].append(way.ms(batches))
            ids, hits, fetched = (a - b for a, b in zip(way.counts(), before, strict=True))
            row |= {f"{name}_hit_rate": hits / ids, f"{name}_fetched": fetched / count}
            if way is disk:
                row |= {f"{name}_not_hot": sum(way.read.values()) / count}
                row |= {f"{name}_from_disk": way.read.get("disk", 0) / count}
    found_ms = {f"{name}_ms": statistics.median(of) for name, of in times.items()}
    row |= found_ms
    row["page_cache_times"] = found_ms["page_cache_ms"] / found_ms["memory_ms"]
    row["cold_times"] = found_ms["cold_ms"] / found_ms["memory_ms"]
    row["disk_rows_per_s"] = 1e3 * row["cold_from_disk"] / found_ms["cold_ms"]
    console.print(row)
    return row


def read_all(segment: Segment) -> None:
    """Has the page cache have all of the file."""
    with segment.files[1].path.open("rb", buffering=0) as file:
        part = bytearray(64 << 20)
        while file.readinto(part):
            pass


@contextmanager
def published(folder: Path, rows: int) -> Iterator[Segment]:
    try:
        publish_random(folder, MODEL, {TABLE: (rows, DIM, "int8")}, alignment=4)
        yield Model(folder, MODEL).attach(verify="header")
    finally:
        clear_hot(folder, MODEL, tuple)
        shutil.rmtree(folder, ignore_errors=True)


def make_hot(root: Path, segment: Segment, rows: int) -> int:
    with hot_folder(root, MODEL) as folder:
        counts = RowCounts.shared(folder, segment)
    counts.tables[TABLE][ranked(np.arange(int(CACHED * rows), int((CACHED + HOT) * rows)), rows)] = STEP
    made = warm(Model(root, MODEL), 1, 1 << 40)
    assert made.rows == int((CACHED + HOT) * rows) - int(CACHED * rows), made
    return made.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=float, default=4e8)
    parser.add_argument("--device", default="0")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "build")
    options = parser.parse_args()
    rows, began = int(options.rows), time.perf_counter()

    def told(what: str) -> None:
        console.print(f"{time.perf_counter() - began:.0f} s: {what}")

    with shared_folder() as memory_root, published(options.folder / "gpu-disk", rows) as on_disk:
        told("on the disk")
        with published(memory_root, rows) as in_memory:
            told("in memory")
            hot_bytes = make_hot(options.folder / "gpu-disk", on_disk, rows)
            told("hot segment")
            budget = int(rows * CACHED * SLOT_BYTES * MORE) + (64 << 20)
            memory, disk = (Cached(s, options.device, budget) for s in (in_memory, on_disk))
            assert memory.placed.placements[TABLE] == "cached"
            assert disk.placed.placements[TABLE] == "cached_stored" and disk.placed.hot == 1
            told("placed")
            used = ranked(np.arange(int(CACHED * rows)), rows)
            for part in np.split(used, range(WARM_IDS, used.size, WARM_IDS)):
                memory.table.residence.warm(part)
                disk.table.residence.warm(part)
            told("warm")
            keys = Keys(rows, disk.cache.device.torch_device)
            found = [compare(memory, disk, on_disk, keys, size, count) for size, count in BATCHES.items()]
            if rows < 4e8:
                os.environ["TRIAL"] = "1"
            report(
                "gpu_disk",
                f"a cache over {rows:,} rows on a disk and in memory, int8 dim {DIM}, Zipf {ALPHA}",
                found,
                cached_rows=disk.cache.slots,
                hot_bytes=hot_bytes,
                gpu=disk.gpu.device.description,
            )
            del memory, disk


if __name__ == "__main__":
    main()
