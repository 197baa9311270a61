"""Rates at which changes of rows are applied: from files, and from a Redis stream beside what its bare client
reads.

read     the changes as arrays, from the file, or from Redis by a client that does nothing else with its
         answers
floor    that, and each block quantized, on one thread
apply    `apply`, or the loop of `tableside follow`: read, quantized, written, checksummed and visible
Rows are applied to a table of twice as many, which is published anew each time. Files are in the page cache;
Redis runs on the same cores.
"""

import argparse
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import console, report, shared_folder

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.change_files import read_changes
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, RowFormat, Source, choose
from tableside.serving.follow.loop import Step, follow, open_source

DIM, GROUP = 64, 1 << 17
FILE_GOAL, REDIS_GOAL = 1_000_000, 200_000  # rows/s


def changed(rows: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """(ids, vectors) in groups: each row of the first half of the table, in any order."""
    ids = np.random.default_rng(0).permutation(rows)
    for first in range(0, rows, GROUP):
        n = min(GROUP, rows - first)
        yield ids[first : first + n], np.random.default_rng(first).standard_normal((n, DIM), dtype=np.float32)


def write_parquet(folder: Path, rows: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "changes.parquet"
    schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), DIM))])
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for ids, vectors in changed(rows):
            columns = [pa.array(ids), pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIM)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=GROUP)
    return path


def write_npz(folder: Path, rows: int) -> Path:
    path = folder / "changes.npz"
    ids, vectors = zip(*changed(rows), strict=True)
    arrays: dict[str, Any] = {"user.ids": np.concatenate(ids), "user.vectors": np.concatenate(vectors)}
    np.savez(path, **arrays)
    return path


@contextmanager
def published(rows: int) -> Iterator[Model]:
    """A model with a table of so many rows, int8."""
    with shared_folder() as root, TemporaryDirectory() as text:
        np.savez(Path(text) / "rows.npz", user=np.zeros((rows, DIM), np.float32))
        model = {
            "name": "rates",
            "checkpoint": "rows.npz",
            "tables": {"user": {"key": "user", "row_format": "int8"}},
        }
        load(parse_model(model, Path(text)), root)
        yield Model(root, "rates")


def rate(rows: int, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return rows / (time.perf_counter() - began)


def quantized(changes: Iterable[TableChanges]) -> int:
    """Quantizes all changes; how many they are."""
    backend, rows = choose("native"), 0
    for c in changes:
        out = np.empty((c.rows, RowFormat.INT8.row_bytes(DIM)), np.uint8)
        backend.quantize(c.vectors, Source.FP32, RowFormat.INT8, out)
        rows += c.rows
    return rows


def of_file(kind: str, path: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Rates of a file: medians of rounds that take turns, after one untimed pass."""
    found: dict[str, list[float]] = {"read": [], "floor": [], "apply": []}
    for _ in range(rounds + 1):
        found["read"].append(rate(rows, lambda: sum(c.rows for c in read_changes(path, "user"))))
        found["floor"].append(rate(rows, lambda: quantized(read_changes(path, "user"))))
        with published(2 * rows) as model:
            found["apply"].append(
                rate(rows, lambda m=model: apply(m, ChangeBatch(read_changes(path, "user"))))  # type: ignore[misc]
            )
            check(model, rows)
    return line(kind, rows, {name: float(np.median(rates[1:])) for name, rates in found.items()}, FILE_GOAL)


def check(model: Model, rows: int) -> None:
    """Some rows that were applied are what was sent, as int8 holds it, and those that were not sent are
    zeros."""
    ids, vectors = next(changed(rows))
    table = attach_state(model).tables["user"]
    found = choose("native").lookup(table, np.append(ids[:1000], rows), None, pooling=Pooling.NONE)
    sent = vectors[:1000]
    steps = np.ptp(sent, axis=1, keepdims=True) / 255
    assert (np.abs(found[:-1] - sent) <= steps).all() and not found[-1].any(), "rows are not what was applied"


def line(kind: str, rows: int, rates: dict[str, float], goal: float | None) -> dict[str, Any]:
    return {
        "from": kind,
        "rows": rows,
        **{f"{name} k rows/s": found / 1e3 for name, found in rates.items()},
        "times the read rate": rates["apply"] / rates["read"],
        "goal k rows/s": None if goal is None else goal / 1e3,
    }


# ---- Redis ----


@contextmanager
def redis_server() -> Iterator[Any]:
    """(URL, client) of a server of its own."""
    import redis

    command = shutil.which("redis-server")
    if command is None:
        raise SystemExit("redis-server is not installed (Debian: apt-get install redis-server)")
    with TemporaryDirectory() as folder:
        socket = f"{folder}/redis.sock"
        server = subprocess.Popen(
            [command, "--port", "0", "--save", "", "--dir", folder, "--unixsocket", socket],
            stdout=subprocess.DEVNULL,
        )
        try:
            while not Path(socket).exists():
                time.sleep(0.01)
            yield f"unix://{socket}", redis.Redis.from_url(f"unix://{socket}")
        finally:
            server.terminate()
            server.wait(10)


def fill(client: Any, rows: int, an_entry: int) -> None:
    """Writes a stream anew; an_entry: rows of one, 1: a row as text."""
    client.delete("rows")
    line = client.pipeline(transaction=False)
    for ids, vectors in changed(rows):
        for at in range(0, len(ids), an_entry):
            part, values = ids[at : at + an_entry], vectors[at : at + an_entry]
            if an_entry > 1:
                line.xadd("rows", {"table": "user", "ids": part.tobytes(), "vectors": values.tobytes()})
            else:
                vector = "[" + ",".join(f"{v:.6g}" for v in values[0]) + "]"
                line.xadd("rows", {"table": "user", "id": int(part[0]), "vector": vector})
            if len(line) == 1000:
                line.execute()
    line.execute()


def read_bare(client: Any, an_entry: int) -> None:
    """The stream, by the client as it comes, and nothing done with it."""
    at, count = b"0-0", max(100, 10_000 // an_entry)
    while found := client.xread({"rows": at}, count=count):
        entries = next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
        at = entries[-1][0]


def of_redis(rows: int, an_entry: int, batch: int, rounds: int, goal: float | None) -> dict[str, Any]:
    """Rates of a stream that is there when the follower starts."""
    found: dict[str, list[float]] = {"read": [], "floor": [], "apply": []}
    with redis_server() as (url, client):
        fill(client, rows, an_entry)
        for _ in range(rounds + 1):
            found["read"].append(rate(rows, lambda: read_bare(client, an_entry)))
            found["floor"].append(rate(rows, lambda: quantized(of_stream(f"{url}?stream=rows", rows, batch))))
            with published(2 * rows) as model:
                found["apply"].append(
                    rate(rows, lambda m=model: follow_all(m, f"{url}?stream=rows", rows, batch))  # type: ignore[misc]
                )
                if an_entry > 1:
                    check(model, rows)
    rates = {name: float(np.median(rates[1:])) for name, rates in found.items()}
    return line(f"Redis, {an_entry:,} rows an entry, batches of {batch:,}", rows, rates, goal)


def of_stream(url: str, rows: int, batch: int) -> Iterator[TableChanges]:
    """The changes of a stream, read as the follower reads them."""
    source, at, read = open_source(url, None, None, "start", lambda: False), None, 0
    while read < rows:
        found = source.read(at, min(batch, rows - read), 60)
        assert found is not None
        for c in found.changes:
            read += c.rows
            yield c
        at = found.position
    source.close()


def follow_all(model: Model, url: str, rows: int, batch: int) -> None:
    """Follows the stream until all rows are applied."""
    applied = 0

    def told(step: Step) -> None:
        nonlocal applied
        applied += step.applied.rows

    source = open_source(url, None, None, "start", lambda: applied >= rows)
    follow(model, source, batch, 1.0, lambda: applied >= rows, told)
    source.close()
    assert applied == rows, f"{applied} rows were applied of {rows}"


def measure_rates(rows: int, rounds: int) -> None:
    found = []
    with TemporaryDirectory() as folder:
        for kind, write in (("Parquet", write_parquet), ("npz", write_npz)):
            console.print(f"writing {rows:,} rows as {kind}")
            path = write(Path(folder), rows)
            found.append(of_file(kind, path, rows, rounds))
            path.unlink()
    for an_entry, share, goal in ((1000, 1, REDIS_GOAL), (1, 20, None)):
        console.print(f"writing {rows // share:,} rows to Redis, {an_entry:,} an entry")
        found.append(of_redis(rows // share, an_entry, 100_000, rounds, goal))
    report("updates_rate", f"changes applied, int8 D {DIM}", found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    measure_rates(asked.rows, asked.rounds)


if __name__ == "__main__":
    main()
