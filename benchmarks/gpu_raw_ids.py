"""Lookups of raw ids on one GPU against lookups of the same rows by their numbers, as a dense table's are.

    python benchmarks/gpu_raw_ids.py --tables   # 26 tables x 500 k ids, pooled, 4096 bags of 20 ids: all in
                                                # HBM, and 20 % cached
    python benchmarks/gpu_raw_ids.py --keys     # one table of 60 M ids, 262,144 keys a call, 10 % cached
    python benchmarks/gpu_raw_ids.py --wide     # 400 M ids, each as likely, so nearly all miss; ids in HBM
                                                # and in host memory
    python benchmarks/gpu_raw_ids.py            # all three

Every batch is new. Both sides read the same registered segment, with caches of one size, and are called batch
by batch, as they are used; times are medians of steady state. What comes out is compared bit by bit, before
and after. Goals: a cached lookup takes 1.1 times the dense one's time at most, one with everything in HBM
1.25 times.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from cache_workload import DEVICE, steady_ms
from common import console, report, shared_folder
from device_lookup import DeviceLookup
from raw_tables import distinct_ids, raw_table_in_shm

from tableside.loader.segment.registration import Registration
from tableside.quant import choose
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.residence.memory import InHost

WORKS = ("tables", "keys", "wide")
WARM, TIMED = 60, 30  # batches
INDEX_BYTES = 24  # of a slot of the cache, beside its row
GATHERERS, WIDE_BYTES = (
    8,
    4 << 30,
)  # from how many bytes of tables on `tableside serve` has the CPU gather, on this many cores


class Way(NamedTuple):
    """Where rows lie. share: of the rows that the cache has slots for; None: all rows are copied to HBM."""

    name: str
    share: float | None
    in_host: InHost = InHost.NOTHING


class Workload:
    """Tables of raw ids, and batches of ids for them with the rows that they have: int64 [tables * ids] on
    the device, each."""

    def __init__(
        self,
        root: Path,
        files: Path,
        tables: int,
        count: int,
        ids: int,
        bag_length: int,
        dim: int,
        zipf: float,
    ) -> None:
        self.tables, self.count, self.ids, self.bag_length, self.dim = tables, count, ids, bag_length, dim
        self.generator = torch.Generator(device=DEVICE).manual_seed(0)
        console.print(f"making {tables} tables of {count:,} ids")
        known = [distinct_ids(count, seed=n + 1) for n in range(tables)]
        self.segment = raw_table_in_shm(root, files, f"{tables}x{count}", known, dim)
        self.registration = Registration(self.segment, DEVICE)
        self.held = list(self.segment.tables.values())
        self.row_bytes = self.held[0].row_bytes
        self.batches = [self.draw(known, zipf) for _ in range(WARM + TIMED)]

    def draw(self, known: list[Any], zipf: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids by Zipf's law, and their rows."""
        uniform = torch.rand(
            (self.tables, self.ids), dtype=torch.float64, device=DEVICE, generator=self.generator
        )
        power = 1 - zipf
        ranks = (((self.count + 1.0) ** power - 1) * uniform + 1) ** (1 / power)
        places = ((ranks.clamp(max=self.count).long() - 1) * 2654435761 % self.count).cpu().numpy()
        ids = [of_table[at] for of_table, at in zip(known, places, strict=True)]
        rows = [
            table.row_map.find(some)
            for table, some in zip(self.held, ids, strict=True)
            if table.row_map is not None
        ]
        assert all((some >= 0).all() for some in rows)
        return self._sent(ids), self._sent(rows)

    def _sent(self, parts: list[Any]) -> torch.Tensor:
        return torch.cat([torch.from_numpy(part) for part in parts]).to(DEVICE)

    def lookup(self, way: Way, raw: bool) -> tuple[DeviceLookup, Any]:
        """A lookup of every table, and the stream to call it on."""
        backend = GpuBackend(str(DEVICE), choose())
        if way.share is not None:
            slots = int(self.tables * self.count * way.share)
            gatherers = GATHERERS if self.segment.size >= WIDE_BYTES else 0
            settings = CacheSettings(gather_threads=gatherers, replays=True)
            backend.open_cache(slots * (self.row_bytes + INDEX_BYTES) * 5 // 4, self.row_bytes, settings)
        tables = []
        for stored, table in zip(self.segment.header.tables, self.held, strict=True):
            rows = self.registration.view(stored.offset, stored.bytes)
            table = table if raw else replace(table, row_map=None)
            how: dict[str, Any] = {} if way.share is None else {"in_host": way.in_host}
            tables.append(backend.place("hbm" if way.share is None else "cached", table, rows, **how))
        return DeviceLookup(backend, tables, self.bag_length), backend.launcher.stream

    def compare(self, ways: list[Way], label: str) -> list[dict[str, Any]]:
        """Milliseconds a batch of both sides, in turn on fresh caches."""
        found = []
        for way in ways:
            outputs = {}
            times = {}
            for side in (0, 1):  # raw, dense
                lookup, stream = self.lookup(way, raw=side == 0)
                with torch.cuda.stream(stream):
                    batches = [batch[side] for batch in self.batches]
                    for batch in batches[:WARM]:
                        lookup(batch)
                    outputs[side] = [lookup(batches[0]).cpu()]
                    times[side] = steady_ms(lookup, batches[WARM:])
                    outputs[side].append(lookup(batches[-1]).cpu())
                lookup.check()
                del lookup
                torch.cuda.empty_cache()
            assert all(torch.equal(a, b) for a, b in zip(outputs[0], outputs[1], strict=True)), (
                f"{label}, {way.name}: they differ"
            )
            ratio, rate = times[0] / times[1], self.tables * self.ids / times[0] / 1e3
            row = {
                "work": label,
                "rows": way.name,
                "raw ms": times[0],
                "dense ms": times[1],
                "ratio": ratio,
                "M ids/s": rate,
            }
            found.append(row)
            console.print(row)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in WORKS:
        parser.add_argument(f"--{name}", action="store_true")
    asked = vars(parser.parse_args())
    works = [name for name in WORKS if asked[name]] or WORKS
    rows = []
    with shared_folder() as root, TemporaryDirectory(dir="/dev/shm") as folder:
        files = Path(folder)
        hbm = Way("hbm", None)
        if "tables" in works:
            work = Workload(root, files, 26, 500_000, 4096 * 20, 20, 128, 1.05)
            rows += work.compare([hbm, Way("cached, 20 %", 0.2)], "26 tables")
            del work
        if "keys" in works:
            work = Workload(root, files, 1, 60_000_000, 262_144, 1, 128, 1.05)
            rows += work.compare([hbm, Way("cached, 10 %", 0.1)], "60 M ids")
            del work
        if "wide" in works:
            work = Workload(root, files, 1, 400_000_000, 262_144, 1, 32, 0.0)
            ways = [
                Way("cached, 5 %", 0.05),
                Way("cached, 5 %, ids in host memory", 0.05, in_host=InHost.SOME),
            ]
            rows += work.compare(ways, "400 M ids, every one as likely")
    report(
        "gpu_raw_ids", "raw ids against row numbers, on one GPU", rows, gpu=torch.cuda.get_device_name(DEVICE)
    )


if __name__ == "__main__":
    main()
