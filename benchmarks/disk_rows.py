"""Rows of a table on a disk, beside fio on the same file, and beside the same table in shared memory.

    python benchmarks/disk_rows.py                    # 8 GB of int8 rows below build/; some two minutes
    python benchmarks/disk_rows.py --folder /mnt/ssd  # another disk
    python benchmarks/disk_rows.py --gb 1             # smaller; printed and not written

Cold: the page cache has forgotten the file, and batches of uniform ids bring each row's block; fio (Debian's)
reads 4 KiB at random places of the same file by as many threads, buffered as we do, and direct. They take
turns. Warm: the file is in the page cache; a lookup that pools 20 ids a bag is timed on the table on the disk
and on a copy in /dev/shm. Every vector is compared first.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import alternate, report, shared_folder
from make_model import publish_random

from tableside.loader.segment.blocks import _READERS as THREADS
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import LookupKind, Place, Pooling, choose
from tableside.quant.contract import RowSource, Waiting
from tableside.quant.rows.fetched import FetchedTable, RowReader

DIM, BATCHES, BAG, ROUNDS, SECONDS = 64, (1000, 16_640), 20, 5, 3.0
TABLE = "t"


def fetched(segment: Segment) -> FetchedTable:
    reader = segment.readers[TABLE]
    return segment.tables[TABLE].fetched_by(RowReader(reader, reader.ready, away=reader.away))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def forget(path: Path, segment: Segment) -> None:
    """Drops the file's pages from the page cache; they were written. Those that are mapped would stay."""
    if _libc.madvise(segment.mapping.address, segment.size, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")
    drop(path)


def drop(path: Path) -> None:
    """Drops the pages of a file that is not mapped from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cold(segment: Segment, batch: int, rng: np.random.Generator) -> tuple[float, float]:
    """Rows a second, and microseconds of a core a row."""
    table = fetched(segment)
    forget(segment.files[1].path, segment)
    rows, began, spent = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - began) < SECONDS:
        ids = np.unique(rng.integers(0, table.rows, batch))
        out, state = np.empty((ids.size, table.row_bytes), np.uint8), np.zeros(ids.size, np.uint8)
        table.reader.fetch(ids, out, state, None)
        assert not state.any()
        rows += ids.size
    return rows / elapsed, 1e6 * (time.process_time() - spent) / rows


def fio(segment: Segment, direct: bool, batch: int = 0) -> float:
    """Reads a second. batch: so many at once, and the next ones when all have come; 0: by THREADS, without a
    pause."""
    path = segment.files[1].path
    forget(path, segment)
    options = ["--rw=randread", "--bs=4k", "--thread", "--group_reporting", "--time_based"]
    options += [f"--runtime={SECONDS}", f"--direct={int(direct)}"]
    if batch:
        options += ["--ioengine=io_uring", f"--iodepth={batch}", f"--iodepth_batch={batch}"]
        options += [f"--iodepth_batch_complete_min={batch}"]
    else:
        options += ["--ioengine=psync", f"--numjobs={THREADS}"]
    options += [
        "--readonly",
        "--norandommap",
        "--fadvise_hint=random",
        "--randseed=7",
        "--allow_file_create=0",
    ]
    command = ["fio", "--name=reads", f"--filename={path}", "--output-format=json", *options]
    (job,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"]
    return float(job["read"]["iops"])


def lookup_of(table: RowSource, ids: np.ndarray) -> Any:
    """Calls that pool these ids."""
    bags = ids.size // BAG
    places = np.array([Place(0, 0, ids.size, -1, BAG, bags, -1, 0)], np.int64).tobytes()
    plan = choose().planner([LookupKind(table, Pooling.SUM)]).plan(places)
    out, inputs = np.empty(bags * 4 * DIM, np.uint8), ids.tobytes()

    def run() -> np.ndarray:
        begun = plan.begin(inputs)
        ready = begun.wait() if isinstance(begun, Waiting) else begun
        assert ready.run(inputs, out) is None
        return out

    return run


def options_of(text: str | None) -> argparse.Namespace:
    """What the command line says: how many GB, and where. text: what the benchmark does."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "build")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not here; install Debian's package of that name")
    return options


def main() -> None:
    options = options_of(__doc__)
    root, rng = options.folder / "disk-rows", np.random.default_rng(1)
    count = int(options.gb * 1e9) // 80
    try:
        publish_random(root, "m", {TABLE: (count, DIM, "int8")})
        segment = Model(root, "m").attach(verify="header")
        rows: list[dict[str, Any]] = []
        for batch in BATCHES:
            ours, buffered, direct = [], [], []
            for _ in range(ROUNDS):
                ours.append(cold(segment, batch, rng))
                buffered.append(fio(segment, False))
                direct.append(fio(segment, True))
            found = {"ids": batch, "krows_s": statistics.median(rate for rate, _ in ours) / 1e3}
            found |= {"fio_kreads_s": statistics.median(buffered) / 1e3}
            found |= {"fio_direct_kreads_s": statistics.median(direct) / 1e3}
            found |= {
                "ratio_to_fio": statistics.median(a / b for (a, _), b in zip(ours, buffered, strict=True))
            }
            rows.append(found | {"cpu_us_a_row": statistics.median(spent for _, spent in ours)})
        table = fetched(segment)
        with shared_folder() as memory:
            publish_random(memory, "m", {TABLE: (count, DIM, "int8")})
            plain = Model(memory, "m").attach(verify="header").tables[TABLE]
            for first in range(0, count, 100_000):  # as a server that has answered for every row
                ids = np.arange(first, min(first + 100_000, count))
                table.reader.fetch(
                    ids, np.empty((ids.size, 80), np.uint8), np.zeros(ids.size, np.uint8), None
                )
            warm: list[dict[str, Any]] = []
            for batch in BATCHES:
                ids = rng.integers(0, count, batch)
                calls = {"disk": lookup_of(table, ids), "memory": lookup_of(plain, ids)}
                assert calls["disk"]().tobytes() == calls["memory"]().tobytes()
                times = alternate(calls, seconds=2.0)
                of = {f"{name}_mrows_s": batch / each / 1e6 for name, each in times.items()}
                warm.append({"ids": batch, **of, "ratio": times["memory"] / times["disk"]})
        title = f"rows of {options.gb:g} GB on a disk, int8 dim {DIM}, uniform"
        if options.gb < 8:
            os.environ["TRIAL"] = "1"
        report("disk_rows", title, rows, threads=THREADS, warm=warm)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
