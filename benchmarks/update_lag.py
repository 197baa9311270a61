"""How long rows take from their source to an answer, and what updates cost the lookups beside them.

`tableside follow --every-s 1` applies streams of rows while `tableside serve` answers half of what it could:
a folder in which a file of 50,000 rows appears ten times a second, and a Redis stream to which a hundred
entries of 1,000 rows are sent a second. Each file and each entry also writes its number to two rows. A reader
asks for these rows over HTTP all the time; the first answer with a number shows that its rows are visible.
Lag is from the rename, or from before XADD, to that answer. It is that of rows, since every file or entry has
as many. The two numbers of an answer must be the same, and may not fall; in the end the rows of the table
must be what was written last.

Lookups are measured by an open loop, in stretches without updates, from files and from Redis that take turns.
The server and the followers run on `--server-cores`, what makes rows, load and questions on `--load-cores`.
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

from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose

ROWS, EVERY_S = 4_000_000, 1.0
POOL = 1 << 17  # vectors, of which each file or entry takes others
FILE_ROWS, ENTRY_ROWS = 50_000, 1000
GOALS = {"lag p99 s": 1.5, "times p99": 1.3}
Send = Callable[
    [int, NDArray[np.int64], NDArray[np.float32]], float
]  # (number, ids, vectors) -> when they were made


class Rows:
    """The rows of each file or entry of a source, by its number, from 1 on. numbered: the two rows that
    hold the number; ids: the first and the last of the others."""

    def __init__(self, rows: int, numbered: tuple[int, int], ids: tuple[int, int]) -> None:
        self.rows, self.numbered, self._ids = rows, numbered, ids
        self._pool = np.random.default_rng(0).standard_normal((POOL + rows, DIM), dtype=np.float32)

    def of(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(ids, vectors) of a file or entry."""
        ids, first = self._drawn(number)
        vectors = self._pool[first : first + self.rows].copy()
        vectors[:2] = numbered(number)
        return ids, vectors

    def _drawn(self, number: int) -> tuple[NDArray[np.int64], int]:
        """The ids, and where in the pool their vectors begin."""
        rng = np.random.default_rng(number)
        ids = rng.integers(*self._ids, self.rows, endpoint=True)
        ids[:2] = self.numbered
        return ids, int(rng.integers(POOL))

    def check(self, model: Model, last: int) -> None:
        """The rows of the table are what the files or entries up to `last` wrote, as int8 holds them."""
        vector_of = np.full(ROWS, -1)
        for number in range(1, last + 1):
            ids, first = self._drawn(number)
            vector_of[ids] = first + np.arange(self.rows)
        vector_of[list(self.numbered)] = -1
        ids = np.random.default_rng(1).choice(np.flatnonzero(vector_of >= 0), 50_000)
        expected = self._pool[vector_of[ids]]
        found = choose("native").lookup(attach_state(model).tables["t"], ids, None, pooling=Pooling.NONE)
        steps = np.ptp(expected, axis=1, keepdims=True) / 255
        assert (np.abs(found - expected) <= steps).all(), "rows are not what was written last"


def numbered(number: int) -> NDArray[np.float32]:
    """A vector that holds a number in bytes, which int8 represents as they are: its values go from 0 to
    255."""
    vector = np.zeros(DIM, np.float32)
    vector[:6] = [0, 255, *number.to_bytes(4, "big")]
    return vector


class Sender(threading.Thread):
    """Sends so many files or entries a second while it is not paused. made: number -> when it was made, of
    time.time()."""

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
            due = max(
                due, time.monotonic() - 1.0
            )  # one that is late catches up, but not with more than a second
            time.sleep(max(0.0, due - time.monotonic()))
            if not self.stopped.is_set():
                self.made[number] = self.send(number, ids, vectors)
                number, due = number + 1, due + self.pause_s

    def end(self) -> None:
        self.stopped.set()
        self.going.set()
        self.join()


class Reader(threading.Thread):
    """Asks for two rows over and over. seen: number -> when it was answered first."""

    def __init__(self, url: str, numbered: tuple[int, int]) -> None:
        super().__init__(daemon=True)
        self.url, self.numbered, self.stopped = url, numbered, threading.Event()
        self.last, self.seen = 0, dict[int, float]()
        self.error: BaseException | None = None

    def run(self) -> None:
        body = {"model": "ads", "features": {"t": [[row] for row in self.numbered]}}
        try:
            with httpx.Client(timeout=30) as client:
                while not self.stopped.wait(0.005):
                    answer = client.post(f"{self.url}/v1/lookup", json=body)
                    assert answer.is_success, f"{answer.status_code} {answer.text[:500]}"
                    self._note(answer.json())
        except Exception as error:
            self.error = error
            raise

    def _note(self, answer: dict[str, Any]) -> None:
        now, (row, other) = time.time(), answer["vectors"]["t"]
        if row[1] != 255 and other[1] != 255:
            return  # nothing was sent yet
        assert row == other, f"rows of two states in one answer: {row} {other}"
        number = int.from_bytes(bytes(map(int, row[2:6])), "big")
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


class Stream:
    """A source that is followed: what sends to it, and who sees what was sent."""

    def __init__(
        self, name: str, source: str, rows: Rows, send: Send, a_second: float, model: Model, url: str
    ) -> None:
        self.name, self.model = name, model
        command = [
            sys.executable,
            "-m",
            "tableside",
            "follow",
            "ads",
            source,
            "--root",
            str(model.root),
            "--table",
            "t",
        ]
        command += ["--every-s", str(EVERY_S), "--json"]
        self._follower = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.sender, self._reader = Sender(rows, send, a_second / rows.rows), Reader(url, rows.numbered)

    def start(self) -> None:
        """Begins to ask; what is sent waits for `going`."""
        self.sender.start()
        self._reader.start()

    @contextmanager
    def going(self) -> Iterator[None]:
        """Sends meanwhile, and waits until all that was sent is visible."""
        self.sender.going.set()
        yield
        self.sender.going.clear()
        self._reader.wait_for(max(self.sender.made))

    def end(self) -> NDArray[np.float64]:
        """Ends and checks everything; the lag of each file or entry, in seconds."""
        self.sender.end()
        self._reader.wait_for(max(self.sender.made))
        self._reader.stopped.set()
        self._reader.join()
        self._follower.terminate()
        _, said = self._follower.communicate(timeout=60)
        assert self._follower.returncode == 0, said
        self.sender.rows.check(self.model, max(self.sender.made))
        return np.array([self._reader.seen[number] - made for number, made in self.sender.made.items()])

    def kill(self) -> None:
        """Ends what may still run after an error."""
        self.sender.stopped.set()
        self._reader.stopped.set()
        self._follower.kill()
        self._follower.wait()


def bench(url: str, seconds: float, rate: float | None = None) -> dict[str, Any]:
    """What `tableside bench` says of a server. rate: requests a second; None: as many as it answers."""
    command = [
        sys.executable,
        "-m",
        "tableside",
        "bench",
        "ads",
        "--url",
        url,
        "--seconds",
        str(seconds),
        "--json",
    ]
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
        pq.write_table(
            pa.table(columns, names=["id", "vector"]), written, compression="none", use_dictionary=False
        )
        made = time.time()
        written.rename(folder / f"{number}.parquet")
        (folder / f"{number - 200}.parquet").unlink(missing_ok=True)  # which was applied long ago
        return made

    return send


def to_redis(client: Any) -> Send:
    def send(_: int, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> float:
        made = time.time()
        client.xadd("rows", {"ids": ids.tobytes(), "vectors": vectors.tobytes()}, maxlen=5000)
        return made

    return send


def measured(asked: argparse.Namespace, folder: Path, redis: tuple[str, Any] | None) -> list[dict[str, Any]]:
    """Lag and lookups, for each source. redis: (URL, client) of a server; None: there is none."""
    with ExitStack() as stack:
        model = stack.enter_context(published(ROWS))
        options = ("--root", model.root, "--port", 0, "--workers", asked.workers, "--drain-s", 0)
        with on(asked.server_cores):
            url = stack.enter_context(serving("-m", "tableside", "serve", "ads", *options)).url
            rows = Rows(FILE_ROWS, (0, 1), (4, ROWS // 2 - 1))
            streams = [
                Stream("files of 50,000 rows", str(folder), rows, to_folder(folder), asked.rows, model, url)
            ]
            if redis is not None:
                rows = Rows(ENTRY_ROWS, (2, 3), (ROWS // 2, ROWS - 1))
                sent = (f"{redis[0]}?stream=rows", rows, to_redis(redis[1]), asked.redis_rows)
                streams.append(Stream("Redis, 1,000 rows an entry", *sent, model, url))
            for stream in streams:
                stack.callback(stream.kill)
        stack.enter_context(on(asked.load_cores))
        for stream in streams:
            stream.start()
        load = asked.load * bench(url, 3)["requests_per_s"]
        found: dict[str, list[float]] = {name: [] for name in ("without", *(s.name for s in streams))}
        for _ in range(asked.stretches):
            found["without"].append(bench(url, asked.seconds, load)["p99_ms"])
            for stream in streams:
                with stream.going():
                    found[stream.name].append(bench(url, asked.seconds, load)["p99_ms"])
        plain = float(np.median(found["without"]))
        return [line(stream, found[stream.name], plain, load) for stream in streams]


def line(stream: Stream, p99_ms: list[float], plain_ms: float, requests: float) -> dict[str, Any]:
    """What was found of one source."""
    lags, sent = stream.end(), list(stream.sender.made.values())
    steps = np.diff(sent)  # those of pauses are far from the others
    return {
        "source": stream.name,
        "rows/s": stream.sender.rows.rows / float(np.mean(steps[steps < 1.0])),
        "lag p50 s": float(np.quantile(lags, 0.5)),
        "lag p99 s": float(np.quantile(lags, 0.99)),
        "longest s": float(lags.max()),
        "requests/s": requests,
        "p99 without ms": plain_ms,
        "p99 with ms": float(np.median(p99_ms)),
        "times p99": float(np.median(p99_ms)) / plain_ms,
    }


def cores(text: str) -> set[int]:
    """The cores of a list as 0,1 or 2-7."""
    parts = [part.partition("-") for part in text.split(",")]
    return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of a stretch (default: %(default)s)")
    parser.add_argument(
        "--stretches", type=int, default=3, help="with updates, and without (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", type=int, default=500_000, help="a second from files (default: %(default)s)"
    )
    parser.add_argument(
        "--redis-rows", type=int, default=100_000, help="a second from Redis (default: %(default)s)"
    )
    parser.add_argument(
        "--load", type=float, default=0.5, help="share of what it could answer (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=1, help="of the server (default: %(default)s)")
    parser.add_argument(
        "--server-cores", type=cores, default=set(), help="of server and follower, as 0,1 (default: all)"
    )
    parser.add_argument(
        "--load-cores", type=cores, default=set(), help="of what measures, as 2-7 (default: all)"
    )
    asked = parser.parse_args()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        redis = None
        try:
            redis = stack.enter_context(redis_server())
        except SystemExit as missing:
            console.print(f"Redis is not measured: {missing}")
        rows = measured(asked, Path(folder), redis)
    every = os.sched_getaffinity(0)
    placed = {"server cores": len(asked.server_cores or every), "load cores": len(asked.load_cores or every)}
    report(
        "update_lag",
        f"changes every {EVERY_S:.0f} s beside lookups, int8 D {DIM}",
        rows,
        goals=GOALS,
        **placed,
    )


if __name__ == "__main__":
    main()
