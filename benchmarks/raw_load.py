"""Loads of a table of raw ids, from Parquet and from a DynamicEmb dump: against reading the file and
quantizing, in the same run.

read + quantize  what any load must do: ids and vectors read as the load reads them, and each block quantized,
                 on as many threads
load             that, and the index, the rows at their places, checksums and publication; each in a fresh
                 process
Private memory is the most that the load's process took (RssAnon) over what it had before. Files are in the
page cache.
"""

import argparse
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import console, report, shared_folder

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.quant import RowFormat, choose

DIM, GROUP = 16, 1 << 20
MEMORY_TARGET = 512 << 20


def ids_of(first: int, count: int) -> np.ndarray[Any, Any]:
    """Ids that differ, over all int64."""
    with np.errstate(over="ignore"):
        return np.arange(first, first + count, dtype=np.int64) * 0x2545F4914F6CDD1D


def write_parquet(folder: Path, count: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "user.parquet"
    schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), DIM))])
    with pq.ParquetWriter(path, schema, compression="NONE", use_dictionary=False) as writer:
        for first in range(0, count, GROUP):
            n = min(GROUP, count - first)
            vectors = np.random.default_rng(first).standard_normal((n, DIM), dtype=np.float32)
            columns = [
                pa.array(ids_of(first, n)),
                pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), DIM),
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=GROUP)
    return path


def write_dynamicemb(folder: Path, count: int) -> Path:
    dump = folder / "dump"
    dump.mkdir()
    half = count // 2
    for rank, (first, n) in enumerate(((0, half), (half, count - half))):
        with (
            (dump / f"user_emb_keys.rank_{rank}.world_size_2").open("wb") as keys,
            (dump / f"user_emb_values.rank_{rank}.world_size_2").open("wb") as values,
        ):
            for at in range(first, first + n, GROUP):
                m = min(GROUP, first + n - at)
                keys.write(ids_of(at, m).tobytes())
                values.write(np.random.default_rng(at).standard_normal((m, DIM), dtype=np.float32).tobytes())
    return dump


def anonymous_bytes() -> int:
    """Private memory of this process that no file holds."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def _load(spec: Any, root: Path, send: Any) -> None:
    done, peak, before = threading.Event(), [0], anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    loaded = load(spec, root)
    done.set()
    thread.join()
    (table,) = loaded.header.tables
    send.send((loaded.seconds, max(0, peak[0] - before), table.id_count, loaded.segment_bytes))


def read_and_quantize(spec: Any) -> float:
    """Seconds to read every block and quantize it, on as many threads as cores."""
    (t,) = spec.tables
    backend = choose("native")
    with open_checkpoint(spec.checkpoint) as checkpoint:
        source = checkpoint.keyed(t.key, t.raw.key)

        def work(piece: int) -> None:
            for block in source.blocks(piece):
                out = np.empty((len(block.ids), RowFormat.INT8.row_bytes(DIM)), np.uint8)
                backend.quantize(block.values, source.source, RowFormat.INT8, out)

        started = time.perf_counter()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(work, range(source.pieces)))
        return time.perf_counter() - started


def measure(name: str, path: Path, key: str, id_key: str | None, count: int, rounds: int) -> dict[str, Any]:
    table = {"key": key, "ids": "raw", **({"id_key": id_key} if id_key else {})}
    spec = parse_model({"name": "raw", "checkpoint": str(path), "tables": {"user": table}}, path.parent)
    floors, loads, peaks = [], [], []
    context = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        floors.append(read_and_quantize(spec))
        with shared_folder() as root:
            receive, send = context.Pipe(False)
            process = context.Process(target=_load, args=(spec, root, send))
            process.start()
            seconds, peak, ids, size = receive.recv()
            process.join()
        assert ids == count, f"{ids} ids were loaded of {count}"
        loads.append(seconds)
        peaks.append(peak)
    floor, seconds = float(np.median(floors)), float(np.median(loads))
    row_bytes = RowFormat.INT8.row_bytes(DIM)
    return {
        "from": name,
        "ids": count,
        "load s": seconds,
        "read + quantize s": floor,
        "M ids/s": count / seconds / 1e6,
        "times read + quantize": float(np.median([a / b for a, b in zip(loads, floors, strict=True)])),
        "private MiB": max(peaks) / 2**20,
        "target MiB": MEMORY_TARGET / 2**20,
        "bytes an id": size / count,
        "bytes an id beside its row": size / count - row_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        for name, write, key, id_key in (
            ("Parquet", write_parquet, "vector", "id"),
            ("DynamicEmb", write_dynamicemb, "user", None),
        ):
            console.print(f"writing {asked.ids:,} ids as {name}")
            path = write(Path(folder), asked.ids)
            rows.append(measure(name, path, key, id_key, asked.ids, asked.rounds))
            for file in [path] if path.is_file() else list(path.iterdir()):
                file.unlink()
    report("raw_load", f"loads of raw ids, int8 D {DIM}", rows)


if __name__ == "__main__":
    main()
