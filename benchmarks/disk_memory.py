"""How much memory a table on a disk needs: rows a second, and how many of them the disk has to give.

    python benchmarks/disk_memory.py              # 4 GB of int8 rows below build/; some six minutes
    python benchmarks/disk_memory.py --gb 0.5     # smaller; printed and not written

A process looks up ids by Zipf's law with 1.05 without a pause, frequent rows anywhere in the table. A control
group of the kernel gives it so much memory beside its own: once all of it is the page cache's, once it is a
hot segment of the rows that are most frequent. Both have 64 MiB of page cache beside that. The page cache is
empty at first and gets some time to fill. Needs root, to make control groups.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import report, shared_folder
from disk_hot import counts_of
from disk_rows import BAG, DIM, TABLE, drop
from make_model import publish_random

from tableside.loader.hot.counts import STEP
from tableside.loader.hot.hot import clear_hot
from tableside.loader.hot.warm import warm
from tableside.loader.segment.blocks import DISK
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import LookupKind, Place, Pooling, choose
from tableside.quant.contract import Waiting
from tableside.quant.rows.fetched import FetchedTable
from tableside.serving.model.placement import Placer
from tableside.serving.settings import ServerSettings

MODEL, ALPHA, BATCH, BATCHES = "m", 1.05, 16_640, 1500
SHARES = 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2  # of the table's bytes
BESIDE_BYTES, FILL_S, MEASURED_S = 64 << 20, 14.0, 5.0
_GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(pid: int) -> Iterator[tuple[Path, Path]]:
    """Puts a process in a control group until it has ended; gives the files of the bytes that it has, and may
    have."""
    is_old = (_GROUPS / "memory").is_dir()
    group = (_GROUPS / "memory" if is_old else _GROUPS) / f"tableside-{os.getpid()}"
    names = ("memory.usage_in_bytes", "memory.limit_in_bytes") if is_old else ("memory.current", "memory.max")
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield group / names[0], group / names[1]
    finally:
        group.rmdir()


def look_up(root: Path, ids: Path, host_cache: int, has_group: Any, says: Any) -> None:
    """A process: attaches, waits until it has a control group, says what it needs, and looks up."""
    has_group.recv()
    version = Model(root, MODEL).attach(verify="header")
    table = Placer(ServerSettings(host_cache=host_cache, root=root), choose()).place(version).tables[TABLE]
    assert isinstance(table, FetchedTable)
    came = Counter[str]()
    version.readers[TABLE].count = lambda where, rows: came.update({where: rows})
    bags = BATCH // BAG
    places = np.array([Place(0, 0, BATCH, -1, BAG, bags, -1, 0)], np.int64).tobytes()
    plan = choose().planner([LookupKind(table, Pooling.SUM)]).plan(places)
    every, out = np.load(ids, mmap_mode="r"), np.empty(bags * 4 * DIM, np.uint8)
    done = 0

    def run(seconds: float) -> tuple[int, float]:
        nonlocal done
        first, began = done, time.monotonic()
        while (elapsed := time.monotonic() - began) < seconds:
            inputs = every[done % len(every)].tobytes()
            begun = plan.begin(inputs)
            (begun.wait() if isinstance(begun, Waiting) else begun).run(inputs, out)
            done += 1
        return (done - first) * BATCH, elapsed

    says.send(None)
    has_group.recv()
    run(FILL_S)
    before = came[DISK]
    count, elapsed = run(MEASURED_S)
    says.send((count / elapsed, (came[DISK] - before) / count))


def measure(root: Path, ids: Path, memory: int, host_cache: int) -> dict[str, float]:
    """memory: bytes beside what the process needs before it looks anything up."""
    context = multiprocessing.get_context("spawn")
    (here, there), (hears, says) = context.Pipe(), context.Pipe()
    process = context.Process(target=look_up, args=(root, ids, host_cache, there, says))
    process.start()
    assert process.pid is not None
    with limited(process.pid) as (used, limit):
        try:
            here.send(None)
            hears.recv()
            drop(next((root / MODEL).glob("*.rows")))
            limit.write_text(str(int(used.read_text()) + memory))
            here.send(None)
            rate, from_disk = hears.recv()
        finally:
            process.terminate()
            process.join()
    return {"rows_s": rate, "from_disk": from_disk}


def draw_ids(rows: int, path: Path) -> np.ndarray:
    """Writes batches of ids; returns all rows, the most frequent one first."""
    rng = np.random.default_rng(1)
    ranks, order = np.cumsum(np.arange(1, rows + 1) ** -ALPHA), rng.permutation(rows)
    found = [order[ranks.searchsorted(rng.random(BATCH) * ranks[-1])] for _ in range(BATCHES)]
    np.save(path, np.stack(found))
    return order


def with_hot(root: Path, version: Segment, hot: np.ndarray) -> None:
    clear_hot(root, MODEL, tuple)
    counts_of(root, version).tables[TABLE][hot] = STEP
    assert warm(Model(root, MODEL), 1, 1 << 40).rows == hot.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "build")
    options = parser.parse_args()
    if os.geteuid():
        raise SystemExit("only root makes control groups here")
    root, count = options.folder / "disk-memory", int(options.gb * 1e9) // 80
    try:
        publish_random(root, MODEL, {TABLE: (count, DIM, "int8")})
        version = Model(root, MODEL).attach(verify="header")
        size = version.tables[TABLE].row_bytes * count
        rows: list[dict[str, Any]] = []
        with shared_folder() as memory:
            memory.mkdir()
            ids = memory / "ids.npy"
            order = draw_ids(count, ids)
            for share in SHARES:
                given = int(share * size)
                of = {"share": share, "gib": given / 2**30}
                pages = measure(root, ids, given + BESIDE_BYTES, 0)
                with_hot(root, version, np.sort(order[: int(share * count)]))
                hot = measure(root, ids, BESIDE_BYTES, 1 << 40)
                clear_hot(root, MODEL, tuple)
                rows.append(
                    of | {f"{k}_pages": v for k, v in pages.items()} | {f"{k}_hot": v for k, v in hot.items()}
                )
                print(rows[-1], flush=True)
        if options.gb < 4:
            os.environ["TRIAL"] = "1"
        report(
            "disk_memory",
            f"rows of {options.gb:g} GB on a disk over memory, int8 dim {DIM}, Zipf {ALPHA}",
            rows,
        )
    finally:
        clear_hot(root, MODEL, tuple)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
