"""Big headers: requests whose size or shape costs a worker more than it costs their sender (`header_cases`).

Promised: whatever comes, a worker's memory stays within `max_in_flight_bytes`, two bodies that are joined or
widened, and what a worker keeps of freed memory. Wished on a quiet machine: a health check beside one such
request waits 20 ms at most, as none keeps the event loop for longer.

The oracle of the one is the kernel's high-water mark of the worker's memory, of the other a process of its
own that asks the server all the time for a health check, and notes the longest answer. Every case is sent
alone, and several times at once.
"""

import contextlib
import itertools
import multiprocessing
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from campaigns.common import folders, publish, random_of, standalone, workers_of
from campaigns.header_cases import BODY, CASES, IN_FLIGHT, JSON, MIB, RESPONSE
from tableside.serving.cli.local import local_server

KEPT_BYTES = 256 * MIB  # serving/kept_memory.py: of freed memory, which it gives back beyond that
MOST_BYTES = IN_FLIGHT + 2 * BODY + KEPT_BYTES
AT_ONCE, PATIENCE_S, SLOW_S = (1, 12), 5.0, 0.02
OPTIONS = [
    *("--max-body-bytes", BODY, "--max-response-bytes", RESPONSE),
    *("--max-json-bytes", JSON, "--max-in-flight-bytes", IN_FLIGHT),
]


# ---- what is seen ----


class Watch:
    """A process of its own that asks for health checks all the time. `worst_s`: of the answers since it
    was asked last."""

    def __init__(self, port: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_ask_all_the_time, args=(port, theirs), daemon=True
        )
        self._process.start()
        self.worst_s()

    def worst_s(self) -> float:
        self._pipe.send(None)
        return float(self._pipe.recv())

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _ask_all_the_time(port: int, pipe: Connection) -> None:
    worst = 0.0
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        ):
            while True:
                if pipe.poll():
                    pipe.recv()
                    pipe.send(worst)
                    worst = 0.0
                began = time.perf_counter()
                connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                data = b""
                while not data.endswith(b"true}"):
                    if not (part := connection.recv(4096)):
                        raise ConnectionResetError
                    data += part
                worst = max(worst, time.perf_counter() - began)
                time.sleep(0.001)


def peak_bytes(pid: int, reset: bool = False) -> int:
    """The most memory that a process has had since it was reset."""
    if reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _send(port: int, data: bytes) -> None:
    """Sends a case over a connection, and reads until it is answered, closed, or the patience is over."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection,
    ):
        reading = Thread(target=_read, args=(connection,))
        reading.start()
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.sendall(
                b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
        reading.join(PATIENCE_S)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        reading.join()


def _read(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(1 << 20):
            pass


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign: each shape at least once, alone and several at once; then more of them as long as
    there is time."""
    end, sent, worst_alone, worst, most = time.monotonic() + seconds, 0, 0.0, 0.0, 0
    with folders() as (root, files):
        publish(root, files, 1)
        with local_server(["demo"], *map(str, OPTIONS), root=root, workers=1) as server:
            port = int(urlsplit(server.url).port or 0)
            (worker,) = workers_of(server.pid, root)
            watch = Watch(port)
            base = peak_bytes(worker, reset=True)
            for number in itertools.count():
                name = list(CASES)[number % len(CASES)]
                if number >= len(CASES) and time.monotonic() > end:
                    break
                data = CASES[name](random_of(seed, "headers", number))
                for at_once in AT_ONCE:
                    peak_bytes(worker, reset=True)
                    watch.worst_s()
                    with ThreadPoolExecutor(at_once) as pool:
                        list(pool.map(_send, [port] * at_once, [data] * at_once))
                    sent += at_once
                    waited, grown = watch.worst_s(), peak_bytes(worker) - base
                    most = max(most, grown)
                    worst_alone, worst = (
                        (max(worst_alone, waited), worst)
                        if at_once == 1
                        else (worst_alone, max(worst, waited))
                    )
                    if waited > SLOW_S or grown > MOST_BYTES:
                        print(
                            f"headers: seed {seed} case {number}, {name} x {at_once}: {waited * 1e3:.0f} ms, "
                            f"{grown >> 20} MiB"
                        )
            watch.close()
            crashed = workers_of(server.pid, root) != [worker]
    return {
        "requests": sent,
        "shapes": len(CASES),
        "crashed workers": crashed,
        "memory beyond what is counted, MB": max(0, most - MOST_BYTES) / 1e6,
        "most memory, MB": most / 1e6,
        "health check beside one of them, slowest ms": worst_alone * 1e3,
        f"health check beside {AT_ONCE[-1]} of them, slowest ms": worst * 1e3,
    }


if __name__ == "__main__":
    standalone(run)
