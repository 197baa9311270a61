"""Rows in Redis, beside redis-py's MGET of the same rows, a key each, from a server of its own.

    python benchmarks/redis_rows.py                  # some two minutes
    python benchmarks/redis_rows.py --rows 50000     # smaller; printed and not written

One client thread asks for rows of int8 with 64 values, each once, and has them in one array. MGET is used as
it is for this: a list of keys, and the values joined. Both take turns, and share the machine's cores with
their servers; so rows by the client's CPU time say what one core of it would give. Every row is compared
first. Memory: what the servers use for the rows, by the bytes of the rows.

Hot rows: lookups that pool 20 ids a bag, of ids by Zipf's law with 1.05, without a hot segment and with one
of a tenth of the table's bytes, made from other ids of that law. Every vector is compared first.
"""

import argparse
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import redis
from common import alternate, report, shared_folder
from disk_rows import BATCHES, lookup_of

from tableside.loader.hot.counts import MOST, RowCounts
from tableside.loader.hot.hot import clear_hot, hot_folder
from tableside.loader.hot.warm import warm
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.redis.reader import RedisRows
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.quant.rows.fetched import RowsAsked
from tableside.serving.model.placement import Placer
from tableside.serving.settings import ServerSettings

DIM, TABLES, ROUNDS, SECONDS, REQUESTS = 64, 26, 3, 1.0, 20
_AT_ONCE = 10_000  # keys that are written together
SHARE, ALPHA, COUNTED = 0.1, 1.05, 4_000_000

Request = dict[str, np.ndarray]  # table -> row numbers, ascending
Read = Callable[[Request], np.ndarray]  # packed rows, table after table


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """A server on a port, which it gives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = ["redis-server", "--port", str(port), "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        client = redis.Redis(port=port)
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert process.poll() is None, "redis-server did not start"
                time.sleep(0.01)
        try:
            yield port
        finally:
            process.kill()


def used(client: Any) -> int:
    return int(client.info("memory")["used_memory"])


def by_mget(client: Any, row_bytes: int) -> Read:
    def read(request: Request) -> np.ndarray:
        keys = [b"%s:%d" % (table.encode(), row) for table, rows in request.items() for row in rows.tolist()]
        return np.frombuffer(b"".join(client.mget(keys)), np.uint8).reshape(-1, row_bytes)

    return read


def by_us(rows_of: RedisRows, row_bytes: int) -> Read:
    def read(request: Request) -> np.ndarray:
        counts = np.array([[rows.size, 0] for rows in request.values()])
        of_tables = np.full(len(request), row_bytes)
        ends = counts.cumsum().reshape(-1, 2) * row_bytes
        ids = np.concatenate(list(request.values()))
        out, state = np.empty(ids.size * row_bytes, np.uint8), np.zeros(ids.size, np.uint8)
        asked = RowsAsked(list(request), of_tables, ids, counts, ends - counts * row_bytes, out, state)
        rows_of.fetch(asked, None)
        assert not state.any()
        return out.reshape(-1, row_bytes)

    return read


def speed(read: Read, requests: list[Request]) -> tuple[float, float]:
    """Rows in a second, and in a second of this process's CPU."""
    rows, began, before = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < SECONDS:
        for request in requests:
            read(request)
            rows += sum(one.size for one in request.values())
    return rows / (time.perf_counter() - began), rows / (time.process_time() - before)


def compare(readers: dict[str, Read], requests: list[Request]) -> dict[str, Any]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for _ in range(ROUNDS):
        for name, read in readers.items():
            found[name].append(speed(read, requests))
    wall, cpu = (
        {name: statistics.median(one[which] for one in speeds) / 1e6 for name, speeds in found.items()}
        for which in (0, 1)
    )
    return {
        "MGET, M rows/s": wall["MGET"],
        "M rows/s": wall["ours"],
        "ratio": wall["ours"] / wall["MGET"],
        "MGET, M rows/CPU s": cpu["MGET"],
        "M rows/CPU s": cpu["ours"],
        "CPU ratio": cpu["ours"] / cpu["MGET"],
    }


def hot(model: Model, table: str, rows: int, row_bytes: int, plain: Any) -> list[dict[str, Any]]:
    """Lookups with and without a hot segment. plain: the table in memory."""
    rng, version = np.random.default_rng(1), model.attach(verify="header")
    ranks, order = np.cumsum(np.arange(1, rows + 1) ** -ALPHA), rng.permutation(rows)

    def draw(n: int) -> Any:
        return order[ranks.searchsorted(rng.random(n) * ranks[-1])]

    with hot_folder(model.root, model.name) as folder:
        uses = np.minimum(np.bincount(draw(COUNTED), minlength=rows), MOST).astype(np.uint8)
        RowCounts.shared(folder, version).add(table, np.arange(rows), uses)
    try:
        warm(model, version.header.version, int(SHARE * rows * row_bytes))
        placed: dict[str, Any] = {
            name: Placer(ServerSettings(host_cache=size), choose()).place(version).tables[table]
            for name, size in (("without", 0), ("with", 1 << 40))
        }
        is_hot = np.isin(np.arange(rows), placed["with"].hot.numbers())
        found = []
        for batch in BATCHES:
            ids = draw(batch)
            calls = {name: lookup_of(source, ids) for name, source in placed.items()}
            assert {call().tobytes() for call in calls.values()} == {lookup_of(plain, ids)().tobytes()}
            times = alternate(calls, seconds=2.0)
            rates = {f"{name} it, M rows/s": batch / each / 1e6 for name, each in times.items()}
            ratio = times["without"] / times["with"]
            found.append({"ids": batch, "hot": float(is_hot[ids].mean()), **rates, "ratio": ratio})
        return found
    finally:
        clear_hot(model.root, model.name, tuple)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=500_000, help="of the large table")
    rows = parser.parse_args().rows
    sizes = {"large": rows, **{f"t{n}": rows // 25 for n in range(TABLES)}}
    with ExitStack() as stack:
        base = stack.enter_context(shared_folder())
        base.mkdir()
        rng = np.random.default_rng(0)
        arrays: dict[str, Any] = {
            name: rng.standard_normal((n, DIM), np.float32) for name, n in sizes.items()
        }
        np.savez(base / "c.npz", **arrays)
        del arrays
        ours, theirs = (stack.enter_context(redis_server(base)) for _ in range(2))
        clients = [redis.Redis(port=port, protocol=2) for port in (ours, theirs)]
        before = [used(client) for client in clients]
        for name, tier in (("plain", None), ("ads", f"redis://127.0.0.1:{ours}")):
            more = {} if tier is None else {"tier": tier}
            tables = {table: {"key": table, "row_alignment": 4, **more} for table in sizes}
            load(parse_model({"name": name, "checkpoint": "c.npz", "tables": tables}, base), base)
        (base / "c.npz").unlink()
        plain, segment = Model(base, "plain").attach(), Model(base, "ads").attach()
        packed = {name: table.packed for name, table in plain.tables.items()}
        for name, table in packed.items():
            for first in range(0, len(table), _AT_ONCE):
                part = table[first : first + _AT_ONCE]
                keys = {b"%s:%d" % (name.encode(), first + n): row.tobytes() for n, row in enumerate(part)}
                clients[1].mset(keys)
        payload = sum(table.size for table in packed.values())
        memory = [(used(c) - b) / payload for c, b in zip(clients, before, strict=True)]
        row_bytes = packed["large"].shape[1]
        rows_of = RedisRows(segment.header.remote, segment.path.parent, 60, lambda *told: None)
        readers = {"MGET": by_mget(clients[1], row_bytes), "ours": by_us(rows_of, row_bytes)}
        shapes = {f"{n:,} of a table": {"large": n} for n in (100, 1000, 10_000)}
        shapes[f"640 of each of {TABLES}"] = {f"t{n}": 640 for n in range(TABLES)}
        found = []
        for title, shape in shapes.items():
            requests = [
                {t: np.sort(rng.choice(sizes[t], n, replace=False)) for t, n in shape.items()}
                for _ in range(REQUESTS)
            ]
            for request in requests:
                expected = np.concatenate([packed[name][rows] for name, rows in request.items()])
                assert all(np.array_equal(read(request), expected) for read in readers.values())
            found.append({"rows of a request": title, **compare(readers, requests)})
        of_hot = hot(Model(base, "ads"), "large", sizes["large"], row_bytes, plain.tables["large"])
        if rows < 500_000:
            os.environ["TRIAL"] = "1"
        report(
            "redis_rows",
            f"{sum(sizes.values()):,} rows of {row_bytes} bytes",
            found,
            redis=clients[0].info("server")["redis_version"],
            memory_ratio=memory[0],
            mget_memory_ratio=memory[1],
            hot=of_hot,
        )


if __name__ == "__main__":
    main()
