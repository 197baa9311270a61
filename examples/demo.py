"""The whole path in half a minute: checkpoint -> quantized segment in /dev/shm -> two worker processes ->
lookups over HTTP.

Makes a small but realistic model, loads it, serves it on a free loopback port, looks ids up with the client
(binary) and as JSON, compares every answer with the checkpoint, and prints what it cost. Leaves nothing
behind. Exit code 0 only if every answer matched. With --keep-serving it keeps the server running and prints
the curl lines to try.
"""

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from tableside.loader.load.load import Loaded, load
from tableside.loader.model.model import read_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.segment.memory import processes_below, pss_bytes
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable
from tableside.quant import RowFormat, choose
from tableside.serving.cli.commands import bench, generator
from tableside.serving.cli.local import local_server
from tableside.serving.cli.output import mb, progress_bar
from tableside.serving.client import Client, Jagged

console = Console(highlight=False, soft_wrap=True, width=120)

TABLES = {  # name: (rows, dim, row format)
    "user": (800_000, 64, "int8"),
    "item": (400_000, 64, "int4"),
    "query": (200_000, 128, "fp8"),
    "category": (5_000, 32, "fp16"),
}
FEATURES = {
    "user": ("user", "sum"),
    "clicked": ("item", "mean"),
    "shown": ("item", "sum"),
    "query_tokens": ("query", "none"),
    "category": ("category", "sum"),
}
BATCH = 64


def make_checkpoint(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Writes demo.npz and model.toml; returns the description's path and the original values."""
    rng = np.random.default_rng(2026)
    values = {
        t: rng.standard_normal((rows, dim), dtype=np.float32) * np.float32(0.1)
        for t, (rows, dim, _) in TABLES.items()
    }
    keys: dict[str, Any] = {f"embedding_bags.{t}.weight": v for t, v in values.items()}
    np.savez(folder / "demo.npz", **keys)
    lines = ['name = "demo"', 'checkpoint = "demo.npz"']
    for t, (_, _, row_format) in TABLES.items():
        lines += [f"[tables.{t}]", f'key = "embedding_bags.{t}.weight"', f'row_format = "{row_format}"']
    for f, (table, pooling) in FEATURES.items():
        lines += [f"[features.{f}]", f'table = "{table}"', f'pooling = "{pooling}"']
    (folder / "model.toml").write_text("\n".join(lines) + "\n")
    return folder / "model.toml", values


@dataclass(frozen=True)
class Question:
    """One feature's ids of a batch."""

    ids: np.ndarray
    lengths: np.ndarray

    def bags(self) -> list[list[int]]:
        return [part.tolist() for part in np.split(self.ids, np.cumsum(self.lengths)[:-1])]


def questions(rng: np.random.Generator) -> dict[str, Question]:
    """A batch of every feature, with empty bags."""
    asked = {}
    for name, (table, _) in FEATURES.items():
        lengths = rng.integers(0, 20, BATCH).astype(np.int32)
        asked[name] = Question(rng.integers(0, TABLES[table][0], int(lengths.sum())), lengths)
    return asked


def pooled(rows: np.ndarray, q: Question, pooling: str) -> np.ndarray:
    """What the original rows [ids, dim] give, in fp64."""
    if pooling == "none":
        return rows.astype(np.float64)
    bag = np.repeat(np.arange(BATCH), q.lengths)
    sums = np.zeros((BATCH, rows.shape[1]))
    np.add.at(sums, bag, rows.astype(np.float64))
    return sums / np.maximum(q.lengths, 1)[:, None] if pooling == "mean" else sums


def mismatches(
    answer: dict[str, np.ndarray], asked: dict[str, Question], values: dict[str, np.ndarray]
) -> list[str]:
    """Features whose vectors are further from the checkpoint's than the row format allows: each id may err
    by its bound."""
    wrong = []
    for name, q in asked.items():
        table, pooling = FEATURES[name]
        rows = values[table][q.ids]
        row_format = RowFormat.parse(TABLES[table][2])
        bounds = np.array([[row_format.error_bound(float(r.min()), float(r.max()))] for r in rows]).reshape(
            -1, 1
        )
        allowed = pooled(bounds, q, pooling) + 1e-5
        found = np.asarray(answer[name])
        if (
            found.shape != (len(allowed), rows.shape[1])
            or (np.abs(found - pooled(rows, q, pooling)) > allowed).any()
        ):
            wrong.append(name)
    return wrong


def ask(url: str, values: dict[str, np.ndarray], batches: int = 20) -> tuple[int, list[str]]:
    """Looks batches up over both protocols; returns the answers compared and what did not match."""
    rng, wrong, compared = np.random.default_rng(7), [], 0
    with Client(url) as client:
        for i in range(batches):
            asked = questions(rng)
            binary = client.lookup("demo", {n: Jagged(q.ids, q.lengths) for n, q in asked.items()})
            wrong += [f"{n} (binary, batch {i})" for n in mismatches(binary, asked, values)]
            body = {"model": "demo", "features": {n: q.bags() for n, q in asked.items()}}
            with urlopen(f"{url}/v1/lookup", orjson.dumps(body), timeout=10) as response:
                json = orjson.loads(response.read())["vectors"]
            wrong += [
                f"{n} (JSON, batch {i})"
                for n in asked
                if not np.array_equal(np.float32(json[n]).reshape(binary[n].shape), binary[n])
            ]
            compared += 2 * sum(len(v) for v in binary.values())
    return compared, wrong


def worst_error(segment: Segment, table: StoredTable, values: np.ndarray) -> float:
    """The largest |dequantized - original| of any value of a table."""
    worst, step = 0.0, 100_000
    for start in range(0, table.rows, step):
        found = choose().dequantize(segment.tables[table.name], start, min(start + step, table.rows))
        worst = max(worst, float(np.abs(found - values[start : start + step]).max()))
    return worst


def print_tables(loaded: Loaded, segment: Segment, values: dict[str, np.ndarray]) -> None:
    table = Table("table", "rows", "dim", "row format", "bytes", "fp32", "x less", "worst error", box=None)
    for t in loaded.header.tables:
        fp32 = 4 * t.rows * t.dim
        error = worst_error(segment, t, values[t.name])
        table.add_row(
            t.name,
            f"{t.rows:,}",
            str(t.dim),
            t.row_format,
            mb(t.bytes),
            mb(fp32),
            f"{fp32 / t.bytes:.1f}",
            f"{error:.1e}",
        )
    console.print(table)
    console.print(
        f"loaded at {loaded.source_bytes / loaded.seconds / 1e9:.2f} GB/s in {loaded.seconds:.2f} s, "
        f"{loaded.huge_fraction:.0%} of the segment on 2 MiB pages, lookups on {choose().description}"
    )


def print_memory(pid: int, root: Path, segment_bytes: int) -> None:
    """What each worker has of its own, beside the segment that all of them share."""
    table = Table("worker", "own memory", "share of the segment's size", "segment pages (shared)", box=None)
    for worker in processes_below(pid):
        if str(root) in Path(f"/proc/{worker}/maps").read_text():
            found = pss_bytes(worker)
            own = found["pss"] - found["pss_shmem"]
            table.add_row(str(worker), mb(own), f"{own / segment_bytes:.1%}", mb(found["pss_shmem"]))
    console.print(table)


def print_throughput(url: str) -> None:
    with Client(url) as client:
        requests = bench.make_requests(client.models()[0], url, bench.Shape(32, 20))
    load = generator.run(url, requests, concurrency=8, seconds=2.0)
    ids = 32 * 20 * len(FEATURES)
    console.print(
        f"{load.requests_per_s:,.0f} requests/s = {load.requests_per_s * ids:,.0f} lookups/s "
        f"({len(FEATURES)} features x batch 32 x 20 ids on average), "
        f"p50 {load.percentile_ms(50):.2f} ms, p99 {load.percentile_ms(99):.2f} ms"
    )


def curl_lines(url: str) -> str:
    body = '{"model": "demo", "features": {"user": [[1, 2, 3], [7]], "clicked": [[10, 20]]}}'
    return "\n".join(
        [
            f"curl -s {url}/v1/lookup -d '{body}'",
            f"curl -s {url}/v1/models",
            f"curl -s {url}/v2/models/demo",
            f"curl -s {url}/metrics",
            f"browse {url}/docs; end with Ctrl-C",
        ]
    )


def wait_for_signal() -> None:
    """Until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def run(root: Path, folder: Path, keep_serving: bool) -> int:
    path, values = make_checkpoint(folder)
    spec: ModelSpec = read_model(path)
    with progress_bar("demo") as progress:
        loaded = load(spec, root, progress=progress)
    segment = Segment(loaded.path)
    print_tables(loaded, segment, values)
    with local_server(["demo"], root=root, workers=2, port=8000 if keep_serving else 0) as server:
        url, pid = server.url, server.pid
        compared, wrong = ask(url, values)
        print_memory(pid, root, loaded.segment_bytes)
        print_throughput(url)
        console.print(
            f"{compared:,} vectors over both protocols, {len(wrong)} features wrong "
            f"{wrong[:3] if wrong else ''}"
        )
        if keep_serving and not wrong:
            console.print(curl_lines(url))
            wait_for_signal()
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep-serving", action="store_true", help="keep the server running on port 8000")
    options = parser.parse_args()
    root = Path("/dev/shm") / f"tableside-demo-{uuid.uuid4().hex[:8]}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            return run(root, Path(folder), options.keep_serving)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
