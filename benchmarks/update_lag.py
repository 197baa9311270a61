"""How long rows take from their source to an answer, and what updates cost the lookups beside them.

`tableside follow --every-s 1` applies a stream of rows while `tableside serve` answers at half of what it could: a folder in which
a file of 50,000 rows appears ten times a second, and a Redis stream to which a hundred entries of 1,000 rows are sent a second.
Each file and each entry also overwrites rows 0 and 1 with its number. A reader asks for both rows over HTTP all the time; the
first answer with a number shows that its rows are visible. Lag is from the rename, or from before XADD, to that answer. It is
that of rows: every file or entry has as many. The two numbers of an answer must be the same, and may not fall; in the end the
rows of the table must be what was written last.

Lookups are measured by an open loop, in stretches with and without updates that take turns. The server and the follower run on
`--server-cores`, what makes rows, load and questions on `--load-cores`.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from common import console, report
from http_cases import serving
from numpy.typing import NDArray
from update_reads import DIM, published
from updates import redis_server

from tableside.loader.states import attach_state
from tableside.loader.versions import Model
from tableside.quant import Pooling, choose

ROWS, EVERY_S = 4_000_000, 1.0
POOL = 1 << 17  # vectors, of which each file or entry takes others
FILE_ROWS, ENTRY_ROWS = 50_000, 1000
NUMBERED = 2  # the rows that say which file or entry was the last
GOALS = {"lag p99 s": 1.5, "times p99": 1.3}
Send = Callable[[int, NDArray[np.int64], NDArray[np.float32]], float]  # (number, ids, vectors) -> when they were made


class Rows:
    """The rows of each file or entry, by its number, from 1 on."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._pool = np.random.default_rng(0).standard_normal((POOL + rows, DIM), dtype=np.float32)

    def of(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(ids, vectors); the first rows are the numbered ones."""
        rng = np.random.default_rng(number)
        ids = rng.integers(NUMBERED, ROWS, self._rows)
        first = int(rng.integers(POOL))
        vectors = self._pool[first : first + self._rows].copy()
        ids[:NUMBERED] = range(NUMBERED)
        vectors[:NUMBERED] = numbered(number)
        return ids, vectors

    def check(self, model: Model, last: int) -> None:
        """The rows of the table are what the files or entries up to `last` wrote, as int8 holds them."""
        expected, writer = np.zeros((ROWS, DIM), np.float32), np.zeros(ROWS, np.int64)
        for number in range(1, last + 1):
            ids, vectors = self.of(number)
            expected[ids], writer[ids] = vectors, number
        ids = np.random.default_rng(1).choice(np.flatnonzero(writer), 50_000)
        found = choose("native").lookup(attach_state(model).tables["t"], ids, None, pooling=Pooling.NONE)
        steps = np.ptp(expected[ids], axis=1, keepdims=True) / 255
        assert (np.abs(found - expected[ids]) <= steps).all(), "rows are not what was written last"


def numbered(number: int) -> NDArray[np.float32]:
    """A vector that holds a number in bytes, which int8 represents as they are: its values go from 0 to 255."""
    vector = np.zeros(DIM, np.float32)
    vector[:6] = [0, 255, *number.to_bytes(4, "big")]
    return vector


class Sender(threading.Thread):
    """Sends so many files or entries a second while it is not paused. made: number -> when it was made, of time.time()."""

    def __init__(self, rows: Rows, send: Send, a_second: float) -> None:
        super().__init__(daemon=True)
        self.rows, self.send, self.pause_s = rows, send, 1 / a_second
        self.going, self.stopped, self.made = threading.Event(), threading.Event(), dict[int, float]()

    def run(self) -> None:
        number, due = 1, 0.0
        while not self.stopped.is_set():
            ids, vectors = self.rows.of(number)  # before they are due
            if not self.going.is_set():
                due = 0.0
                self.going.wait()
            due = max(due, time.monotonic() - 1.0)  # one that is late catches up, but not with more than a second
            time.sleep(max(0.0, due - time.monotonic()))
            if not self.stopped.is_set():
                self.made[number] = self.send(number, ids, vectors)
                number, due = number + 1, due + self.pause_s

    def end(self) -> None:
        self.stopped.set()
        self.going.set()
        self.join()


class Reader(threading.Thread):
    """Asks for the numbered rows over and over. seen: number -> when it was answered first."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.stopped, self.last, self.seen = url, threading.Event(), 0, dict[int, float]()
        self.error: BaseException | None = None

    def run(self) -> None:
        body = {"model": "ads", "features": {"t": [[n] for n in range(NUMBERED)]}}
        try:
            with httpx.Client(timeout=30) as client:
                while not self.stopped.wait(0.004):
                    self._note(client.post(f"{self.url}/v1/lookup", json=body).raise_for_status().json())
        except Exception as error:
            self.error = error
            raise

    def _note(self, answer: dict[str, Any]) -> None:
        now, rows = time.time(), answer["vectors"]["t"]
        if all(row[1] != 255 for row in rows):
            return  # nothing was sent yet
        assert len({tuple(row) for row in rows}) == 1, f"rows of two states in one answer: {rows}"
        number = int.from_bytes(bytes(map(int, rows[0][2:6])), "big")
        assert number >= self.last, f"rows of {self.last} were visible, and then those of {number}"
        self.seen |= dict.fromkeys(range(self.last + 1, number + 1), now)
        self.last = number

    def wait_for(self, number: int) -> None:
        """Until the rows of a number are visible."""
        end = time.monotonic() + 30
        while self.last < number:
            assert self.error is None, self.error
            assert time.monotonic() < end, f"{number} was sent, and {self.last} is visible after 30 s"
            time.sleep(0.01)


@contextmanager
def on(cores: set[int]) -> Iterator[None]:
    """Processes that are started meanwhile run on these cores; none: on all."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def following(model: Model, source: str) -> Iterator[None]:
    """`tableside follow`. It must end well."""
    command = [sys.executable, "-m", "tableside", "follow", "ads", source, "--root", str(model.root), "--table", "t"]
    command += ["--every-s", str(EVERY_S), "--name", "lag", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said


def bench(url: str, seconds: float, rate: float | None = None) -> dict[str, Any]:
    """What `tableside bench` says of a server. rate: requests a second; None: as many as it answers."""
    command = [sys.executable, "-m", "tableside", "bench", "ads", "--url", url, "--seconds", str(seconds), "--json"]
    command += ["--batch", "64", "--concurrency", "8", *(["--rate", str(rate)] if rate else [])]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(f"{told.stdout}{told.stderr}")
    found: dict[str, Any] = json.loads(told.stdout)["forms"][0]
    assert not found["failed"], found["failure"]
    return found


def to_folder(folder: Path) -> Send:
    def send(number: int, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> float:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = [pa.array(ids), pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIM)]
        written = folder / "next"
        pq.write_table(pa.table(columns, names=["id", "vector"]), written, compression="none", use_dictionary=False)
        made = time.time()
        written.rename(folder / f"{number}.parquet")
        (folder / f"{number - 200}.parquet").unlink(missing_ok=True)  # which was applied long ago
        return made

    return send


def to_redis(client: Any) -> Send:
    def send(_: int, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> float:
        made = time.time()
        client.xadd("rows", {"ids": ids.tobytes(), "vectors": vectors.tobytes()}, maxlen=2000)
        return made

    return send


def measured(what: str, source: str, sender: Sender, asked: argparse.Namespace) -> dict[str, Any]:
    """Lag and lookups while one source is followed."""
    with ExitStack() as stack:
        model = stack.enter_context(published(ROWS))
        options = ("--root", model.root, "--port", 0, "--workers", asked.workers, "--drain-s", 0)
        with on(asked.server_cores):
            server = stack.enter_context(serving("-m", "tableside", "serve", "ads", *options))
            stack.enter_context(following(model, source))
        stack.enter_context(on(asked.load_cores))
        most = bench(server.url, 3)["requests_per_s"]
        reader = Reader(server.url)
        reader.start()
        sender.start()
        found: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(asked.stretches):
            found["without"].append(bench(server.url, asked.seconds, most / 2)["p99_ms"])
            sender.going.set()
            found["with"].append(bench(server.url, asked.seconds, most / 2)["p99_ms"])
            sender.going.clear()
            reader.wait_for(max(sender.made))
        sender.end()
        reader.wait_for(max(sender.made))
        reader.stopped.set()
        reader.join()
        sender.rows.check(model, max(sender.made))
    lags = [reader.seen[number] - made for number, made in sender.made.items()]
    plain, changed = (float(np.median(found[name])) for name in ("without", "with"))
    rows = sum(len(sender.rows.of(1)[0]) for _ in sender.made)
    return {
        "source": what,
        "rows/s": rows / (asked.stretches * asked.seconds),
        "lag p50 s": float(np.quantile(lags, 0.5)),
        "lag p99 s": float(np.quantile(lags, 0.99)),
        "lag most s": max(lags),
        "requests/s": most / 2,
        "p99 without ms": plain,
        "p99 with ms": changed,
        "times p99": changed / plain,
    }


def cores(text: str) -> set[int]:
    """The cores of a list as 0,1 or 2-7."""
    parts = [part.partition("-") for part in text.split(",")]
    return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a stretch (default: %(default)s)")
    parser.add_argument("--stretches", type=int, default=3, help="with updates, and without (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=500_000, help="a second from files (default: %(default)s)")
    parser.add_argument("--redis-rows", type=int, default=100_000, help="a second from Redis (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="of the server (default: %(default)s)")
    parser.add_argument("--server-cores", type=cores, default=set(), help="of server and follower, as 0,1 (default: all)")
    parser.add_argument("--load-cores", type=cores, default=set(), help="of what measures, as 2-7 (default: all)")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        sender = Sender(Rows(FILE_ROWS), to_folder(Path(folder)), asked.rows / FILE_ROWS)
        rows = [measured(f"files of {FILE_ROWS:,} rows", folder, sender, asked)]
    try:
        with redis_server() as (url, client):
            sender = Sender(Rows(ENTRY_ROWS), to_redis(client), asked.redis_rows / ENTRY_ROWS)
            rows.append(measured(f"Redis, {ENTRY_ROWS:,} rows an entry", f"{url}?stream=rows", sender, asked))
    except SystemExit as missing:
        console.print(f"Redis was not measured: {missing}")
    placed = {"server cores": len(asked.server_cores) or os.cpu_count(), "load cores": len(asked.load_cores) or os.cpu_count()}
    report("update_lag", f"changes every {EVERY_S:.0f} s beside lookups, int8 D {DIM}", rows, goals=GOALS, placed=placed)


if __name__ == "__main__":
    main()
