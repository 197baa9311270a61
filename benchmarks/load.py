"""Load throughput and peak memory: against reading the file and against quantizing it, in the same run.

read      the same bytes with preadv into a buffer, as many threads as the load has
quantize  the same rows from memory to memory, as many threads
load      both, plus reserving, hashing and publishing the segment
attach    mapping the segment and verifying its bytes, as every worker does; in bytes of the segment
Private memory is the most that a load takes in a fresh process, over what that process had before.
The file is in the page cache (warm: the processor is the limit), or dropped from it first (cold: the disk
is).
verified  loads of the same tables: not verified (safetensors), by a manifest, by the CRC-32 of a .npz
"""

import argparse
import ctypes
import multiprocessing
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import console, report, shared_folder
from safetensors.numpy import save_file

from tableside.loader.load.load import load
from tableside.loader.load.manifest import write_manifest
from tableside.loader.load.settings import PIECE_BYTES
from tableside.loader.load.verification import summary
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat, Source, choose

DIM, TABLES, ROUNDS = 64, 4, 5
TARGET, MEMORY_TARGET = 0.7, 256 << 20
VERIFIED_ROUNDS, VERIFIED_TARGET = 11, 1.05


def write_checkpoint(path: Path, gib: float) -> int:
    """A safetensors file of fp32 tables; returns its rows a table."""
    rows = int(gib * 2**30 / 4 / DIM / TABLES)
    pool = np.random.default_rng(0).standard_normal((rows, DIM), dtype=np.float32)
    save_file({f"t{i}.weight": pool for i in range(TABLES)}, path)
    return rows


def drop_cache(path: Path) -> None:
    """Writes the file out and drops its pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_threads(work: Any, parts: int) -> float:
    """Seconds until work(i) is done for all parts, over as many threads as cores."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(work, range(parts)))
    return time.perf_counter() - started


def read(path: Path) -> float:
    """Seconds to read the whole file."""
    size, step = path.stat().st_size, 16 << 20
    fd = os.open(path, os.O_RDONLY)
    local = threading.local()

    def part(i: int) -> None:
        buffer = getattr(local, "buffer", None) or bytearray(PIECE_BYTES)
        local.buffer = buffer
        for offset in range(i * step, min((i + 1) * step, size), PIECE_BYTES):
            os.preadv(fd, [memoryview(buffer)[: min(PIECE_BYTES, size - offset)]], offset)

    seconds = in_threads(part, -(-size // step))
    os.close(fd)
    return seconds


def quantize(row_format: RowFormat, values: np.ndarray, out: np.ndarray) -> float:
    """Seconds to quantize all rows from memory to memory, TABLES times, in pieces as large as a load's."""
    backend, piece = choose(), PIECE_BYTES // 4 // DIM

    def part(i: int) -> None:
        start = i % parts * piece
        backend.quantize(values[start : start + piece], Source.FP32, row_format, out[start : start + piece])

    parts = -(-len(values) // piece)
    return in_threads(part, parts * TABLES)


def peak_bytes(spec: ModelSpec, root: Path) -> int:
    """The most private memory of a load over what its process had before: a fresh process, whose heap
    holds nothing freed."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    process = context.Process(target=_load_watched, args=(spec, root, found))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(
            f"the load whose memory is measured ended with {process.exitcode}; its error stands above"
        )
    peak: int = found.get()
    return peak


def _load_watched(spec: ModelSpec, root: Path, found: Any) -> None:
    ctypes.CDLL(None).malloc_trim(0)
    idle = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    load(spec, root)
    done.set()
    watcher.join()
    found.put(peak - idle)


def anonymous_bytes() -> int:
    """This process's memory that is in no file: neither the segment's pages nor the page cache's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def attach_seconds(model: Model) -> float:
    """Of mapping the live version and verifying all of its bytes, as a worker does."""
    started = time.perf_counter()
    model.attach()
    return time.perf_counter() - started


def check(root: Path, spec: ModelSpec, values: np.ndarray) -> None:
    """A sample of the loaded rows equals the checkpoint within the format's bound."""
    rows, values = len(values), values[-1000:]
    segment = Model(root, spec.name).attach()
    for table in segment.tables.values():
        found = choose().dequantize(table, rows - 1000, rows)
        for error, row in zip(np.abs(found - values).max(1), values, strict=True):
            assert error <= table.row_format.error_bound(float(row.min()), float(row.max()))


def measure(path: Path, rows: int, row_format: RowFormat, cold: bool) -> dict[str, Any]:
    """Read, quantize and load in turns; medians."""
    tables = {f"t{i}": {"key": f"t{i}.weight", "row_format": row_format.label} for i in range(TABLES)}
    spec = parse_model({"name": "bench", "checkpoint": path.name, "tables": tables}, path.parent)
    times: dict[str, list[float]] = {"read": [], "quantize": [], "load": []}
    attaching: list[float] = []
    values = np.random.default_rng(0).standard_normal((rows, DIM), dtype=np.float32)
    out = np.zeros((rows, row_format.row_bytes(DIM)), np.uint8)
    with shared_folder() as root:
        peak = peak_bytes(spec, root)
        check(root, spec, values)
        segment_bytes = Model(root, spec.name).path(1).stat().st_size
        Model(root, spec.name).remove_all()
        for round_ in range(ROUNDS + 1):
            for name in times:
                if cold and name != "quantize":
                    drop_cache(path)
                if name == "load":
                    started = time.perf_counter()
                    load(spec, root)
                    seconds = time.perf_counter() - started
                    attaching.append(attach_seconds(Model(root, spec.name)))
                    Model(root, spec.name).remove_all()
                else:
                    seconds = read(path) if name == "read" else quantize(row_format, values, out)
                if round_:
                    times[name].append(seconds)
    source = path.stat().st_size
    rate = {name: source / float(np.median(found)) / 1e9 for name, found in times.items()}
    ratio = rate["load"] / min(rate["read"], rate["quantize"])
    return {
        "format": row_format.label,
        "file": "cold" if cold else "warm",
        "read GB/s": rate["read"],
        "quantize GB/s": rate["quantize"],
        "load GB/s": rate["load"],
        "load / slower": ratio,
        "target": TARGET,
        "met": bool(ratio >= TARGET),
        "attach GB/s": segment_bytes / float(np.median(attaching[1:])) / 1e9,
        "peak private MB": peak / 1e6,
        "peak met": bool(peak <= MEMORY_TARGET),
    }


def verified(path: Path, rows: int) -> list[dict[str, Any]]:
    """Loads of the same tables in turns: not verified, by a manifest, by CRC-32; medians, and their ratio
    to not verified."""
    with_manifest = path.with_name("manifest.safetensors")
    os.link(path, with_manifest)
    write_manifest(with_manifest)
    values = np.random.default_rng(0).standard_normal((rows, DIM), dtype=np.float32)
    keys: dict[str, Any] = {f"t{i}.weight": values for i in range(TABLES)}
    np.savez(path.with_suffix(".npz"), **keys)
    tables = {f"t{i}": {"key": f"t{i}.weight", "row_format": "int8"} for i in range(TABLES)}
    files = {"nothing": path, "manifest": with_manifest, "CRC-32": path.with_suffix(".npz")}
    specs = {
        by: parse_model({"name": "bench", "checkpoint": str(file), "tables": tables}, path.parent)
        for by, file in files.items()
    }
    times: dict[str, list[float]] = {by: [] for by in files}
    with shared_folder() as root:
        for round_ in range(VERIFIED_ROUNDS + 1):
            for by, spec in specs.items():
                started = time.perf_counter()
                loaded = load(spec, root)
                seconds = time.perf_counter() - started
                assert ("not verified" if by == "nothing" else f"verified by {by}") in summary(
                    loaded.header.source
                )
                Model(root, spec.name).remove_all()
                if round_:
                    times[by].append(seconds)
    medians = {by: float(np.median(found)) for by, found in times.items()}
    slower = {by: float(np.median(np.divide(times[by], times["nothing"]))) for by in times}
    return [
        {
            "format": "int8",
            "verified by": by,
            "load GB/s": path.stat().st_size / medians[by] / 1e9,
            "seconds / not verified": slower[by],
            "target": VERIFIED_TARGET,
            "met": bool(slower[by] <= VERIFIED_TARGET),
        }
        for by in files
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, default=2.0, help="size of the checkpoint (default: %(default)s)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        rows = write_checkpoint(path, options.gib)
        console.print(f"{path.stat().st_size / 1e9:.2f} GB of fp32 in {TABLES} tables of {rows:,} x {DIM}")
        result = [
            measure(path, rows, RowFormat.parse(f), False)
            for f in ("int8", "int4", "int2", "fp8", "fp16", "fp32")
        ]
        result += [measure(path, rows, RowFormat.INT8, True)]
        checked = verified(path, rows)
    report("load_verified", "loads that verify their rows, against one that cannot", checked)
    report("load", "throughput of a load, in bytes of the checkpoint", result)


if __name__ == "__main__":
    main()
