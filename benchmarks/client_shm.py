"""A client on the server's host: Triton's system shared memory against binary bodies, for the same requests.

    python benchmarks/client_shm.py

One worker has one core and the client another. Requests take turns between

    body      ids in the request's body, vectors in the answer's
    regions   ids and vectors in a region of shared memory, of which request and answer tell the places

in three forms: all lengths the same (one tensor a feature), the named form, and the compact form, both with
lengths of their own in every request. `call us` is a call of tritonclient, the client that has such regions:
from arrays of ids to arrays of vectors. `bare us` is one without a client's work: the header is ready, ids
are put where they are sent from, and the call ends when the vectors lie in memory. `requests/s` is what 4
connections get, with the ids put in place before. `cpu us` is what the worker uses for one of those. Vectors
are compared with the lookups in process first, bit by bit.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Any
from urllib.parse import urlsplit

import http_cases
import httpx
import numpy as np
import orjson
from common import console, report, shared_folder
from http_cases import Case, InProcess, Server, line, serving, warm_up
from make_model import publish_random
from numpy.typing import NDArray
from triton_calls import Tensors, TritonCalls, tensors, triton_calls

from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.bench import HEADER_LENGTH
from tableside.serving.cli.commands.generator import run

DIM, ROWS = 128, 200_000
CASE = Case(26, 32, 20)
WAYS = ("body", "regions")
FORMS: dict[str, tuple[bool, bench.Form]] = http_cases.WAYS
REQUESTS, CALLS, ROUNDS = 64, 120, 7
CONNECTIONS, SECONDS = 4, 0.6
SLOTS = 2 * CONNECTIONS  # of answers, so that requests under way write to different ones
TARGET = 1.6
SERVER_CORE, LOAD_CORE = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Call:
    """One request. tensors: its ids and lengths, as bytes; head: what is sent before them, or without them.

    ids_at, out_at: where they, and the vectors, lie in the region.
    """

    head: bytes
    tensors: bytes
    ids_at: int
    out_at: int


class Layout:
    """Where requests of a form have their ids and vectors in one region: ids one after another, vectors in
    SLOTS turns."""

    def __init__(self, drawn: Sequence[tuple[NDArray[np.int64], NDArray[np.int32]]]) -> None:
        self.out_bytes = CASE.features * CASE.batch * DIM * 4
        self.ids_bytes = max(values.nbytes + lengths.nbytes for values, lengths in drawn)
        self.bytes = len(drawn) * self.ids_bytes + SLOTS * self.out_bytes

    def ids_at(self, k: int) -> int:
        return SLOTS * self.out_bytes + k * self.ids_bytes

    def out_at(self, k: int) -> int:
        return k % SLOTS * self.out_bytes


def described() -> dict[str, Any]:
    tables = [{"name": f"t{i}", "rows": ROWS} for i in range(CASE.features)]
    return {
        "name": CASE.model,
        "tables": tables,
        "features": [{"name": t["name"], "table": t["name"]} for t in tables],
    }


def in_regions(head: dict[str, Any], form: bench.Form, ids_at: int, out_at: int) -> dict[str, Any]:
    """The same request, its tensors in the region `r`."""
    inputs = []
    for entry in head["inputs"]:
        size = entry["parameters"]["binary_data_size"]
        inputs.append({**entry, "parameters": place(ids_at, size)})
        ids_at += size
    names = ["kjt"] if form == "compact" else [f"t{i}" for i in range(CASE.features)]
    size = CASE.features * CASE.batch * DIM * 4 // len(names)
    return {
        "inputs": inputs,
        "outputs": [{"name": n, "parameters": place(out_at + k * size, size)} for k, n in enumerate(names)],
    }


def place(at: int, size: int) -> dict[str, Any]:
    return {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": at}


def calls(
    url: str, form: str, drawn: Sequence[tuple[NDArray[np.int64], NDArray[np.int32]]], layout: Layout
) -> dict[str, list[Call]]:
    """The requests of a form, both ways."""
    same, on_wire = FORMS[form]
    path = f"{url}/v2/models/{CASE.model}/infer"
    found: dict[str, list[Call]] = {way: [] for way in WAYS}
    for k, (values, lengths) in enumerate(drawn):
        headers, body = bench.encode(described(), values, lengths, same=same, form=on_wire)
        length = int(headers[HEADER_LENGTH])
        tensors, ids_at, out_at = body[length:], layout.ids_at(k), layout.out_at(k)
        whole = bench.request_bytes(path, headers, body)
        found["body"].append(Call(whole[: len(whole) - len(tensors)], tensors, ids_at, out_at))
        header = orjson.dumps(in_regions(orjson.loads(body[:length]), on_wire, ids_at, out_at))
        told = bench.request_bytes(path, {"Content-Type": "application/json"}, header)
        found["regions"].append(Call(told, tensors, ids_at, out_at))
    return found


@contextmanager
def region(url: str, size: int) -> Iterator[memoryview]:
    """Shared memory of `size` bytes, registered as `r`."""
    memory = SharedMemory(create=True, size=size)
    try:
        asked = {"key": memory.name, "offset": 0, "byte_size": size}
        httpx.post(f"{url}/v2/systemsharedmemory/region/r/register", json=asked).raise_for_status()
        assert memory.buf is not None
        memory.buf[:] = bytes(size)
        yield memory.buf
    finally:
        httpx.post(f"{url}/v2/systemsharedmemory/region/r/unregister", content=b"").raise_for_status()
        memory.close()
        memory.unlink()


class Connection:
    """One connection that calls. Answers are received into one buffer."""

    def __init__(self, url: str, memory: memoryview) -> None:
        parts = urlsplit(url)
        self._sock = socket.create_connection((parts.hostname or "", parts.port or 0))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory, self._buffer = memory, memoryview(bytearray(16 << 20))

    def body(self, call: Call) -> memoryview:
        """The answer's body of a request whose ids are sent."""
        self._sock.sendall(call.head + call.tensors)
        return self._received()

    def regions(self, call: Call) -> memoryview:
        """The answer's body of a request whose ids are put into the region."""
        self._memory[call.ids_at : call.ids_at + len(call.tensors)] = call.tensors
        self._sock.sendall(call.head)
        return self._received()

    def _received(self) -> memoryview:
        at, end, start = 0, -1, 0
        while end < 0 or at < end:
            count = self._sock.recv_into(self._buffer[at:])
            if not count:
                raise SystemExit("the server closed the connection")
            at += count
            if end < 0 and (start := bytes(self._buffer[:at]).find(b"\r\n\r\n") + 4) > 3:
                head = bytes(self._buffer[:start]).lower()
                if b" 200 " not in head:
                    raise SystemExit(f"the server answered {bytes(self._buffer[:at])[:500]!r}")
                end = start + int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return self._buffer[start:end]

    def close(self) -> None:
        self._sock.close()
        self._buffer.release()


def vectors(answer: memoryview, memory: memoryview, call: Call, way: str, form: str) -> NDArray[np.float32]:
    """All vectors of an answer side by side, fp32 [bags, sum of dims]."""
    shape = (CASE.batch, CASE.features * DIM) if form == "compact" else (CASE.features, CASE.batch, DIM)
    size = 4 * CASE.features * CASE.batch * DIM
    source, at = (memory, call.out_at) if way == "regions" else (answer, answer.nbytes - size)
    found = np.frombuffer(source, np.float32, size // 4, at).reshape(shape)
    return found.copy() if form == "compact" else np.hstack(list(found))


class Form:
    """The requests of one form, both ways, and what was measured of each way."""

    def __init__(self, name: str, server: Server, inside: InProcess) -> None:
        self.name, self._server, self._inside = name, server, inside
        rng = np.random.default_rng(3)
        same, on_wire = FORMS[name]
        self._drawn = [bench.draw(rng, described(), CASE.shape(same)) for _ in range(REQUESTS)]
        self.layout = Layout(self._drawn)
        self._calls = calls(server.url, name, self._drawn, self.layout)
        encoded = (
            bench.encode(described(), values, lengths, same=same, form=on_wire)
            for values, lengths in self._drawn
        )
        self.tensors: list[Tensors] = [tensors(*one) for one in encoded]
        self.triton_s: dict[str, list[float]] = {way: [] for way in WAYS}
        self.bare_s: dict[str, list[float]] = {way: [] for way in WAYS}
        self.rates: dict[str, list[float]] = {way: [] for way in WAYS}
        self.cpu_s: dict[str, list[float]] = {way: [] for way in WAYS}

    def fill(self, memory: memoryview) -> None:
        """Puts the ids of all requests in place."""
        for call in self._calls["regions"]:
            memory[call.ids_at : call.ids_at + len(call.tensors)] = call.tensors

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """The vectors' names and shapes."""
        if self.name == "compact":
            return {"kjt": (CASE.batch, CASE.features * DIM)}
        return {f"t{i}": (CASE.batch, DIM) for i in range(CASE.features)}

    def check_triton(self, triton: TritonCalls) -> None:
        """As `check`, of tritonclient's calls."""
        for ask in _ways(triton).values():
            for k in (0, 1, 2, 0, 1, 2):
                np.testing.assert_array_equal(
                    np.hstack(ask(self.tensors[k])), self._inside.expected(*self._drawn[k])
                )

    def check(self, connection: Connection, memory: memoryview) -> None:
        """The vectors of three requests, both ways, bit by bit; each comes a second time when its header
        was learnt."""
        for way, ask in _ways(connection).items():
            for k in (0, 1, 2, 0, 1, 2):
                call, (values, lengths) = self._calls[way][k], self._drawn[k]
                memory[call.out_at : call.out_at + self.layout.out_bytes] = bytes(self.layout.out_bytes)
                found = vectors(ask(call), memory, call, way, self.name)
                np.testing.assert_array_equal(found, self._inside.expected(values, lengths))

    def measure(self, connection: Connection, triton: TritonCalls) -> None:
        """One round of both ways."""
        for way, ask in _ways(triton).items():
            self.triton_s[way].append(_seconds(ask, self.tensors))
        for way, ask in _ways(connection).items():
            self.bare_s[way].append(_seconds(ask, self._calls[way]))
        for way in WAYS:
            before = self._server.cpu_s()
            load = run(self._server.url, self.requests(way), concurrency=CONNECTIONS, seconds=SECONDS)
            if load.failed:
                raise SystemExit(f"{load.failed} of {load.latencies_s.size} requests failed: {load.failure}")
            self.rates[way].append(load.requests_per_s)
            self.cpu_s[way].append((self._server.cpu_s() - before) / load.latencies_s.size)

    def requests(self, way: str) -> list[bytes]:
        return [call.head + (call.tensors if way == "body" else b"") for call in self._calls[way]]

    def rows(self) -> list[dict[str, Any]]:
        measured = self.triton_s, self.bare_s, self.rates, self.cpu_s
        call_s, bare_s, rates, cpu_s = (
            {way: statistics.median(found[way]) for way in WAYS} for found in measured
        )
        return [
            {
                "form": self.name,
                "way": way,
                "call us": 1e6 * call_s[way],
                "calls/s over body": call_s["body"] / call_s[way],
                "bare us": 1e6 * bare_s[way],
                "bare over body": bare_s["body"] / bare_s[way],
                "requests/s": rates[way],
                "over body": rates[way] / rates["body"],
                "cpu us": 1e6 * cpu_s[way],
                "target": TARGET if way == "regions" else None,
                "met": call_s["body"] / call_s[way] >= TARGET if way == "regions" else None,
            }
            for way in WAYS
        ]


def _ways(client: Any) -> dict[str, Callable[[Any], Any]]:
    return {"body": client.body, "regions": client.regions}


def _seconds(ask: Callable[[Any], Any], requests: Sequence[Any]) -> float:
    """Of a call, of which CALLS are made."""
    started = time.perf_counter()
    for k in range(CALLS):
        ask(requests[k % REQUESTS])
    return (time.perf_counter() - started) / CALLS


def measure(name: str, server: Server, inside: InProcess) -> list[dict[str, Any]]:
    form = Form(name, server, inside)
    with (
        region(server.url, form.layout.bytes) as memory,
        triton_calls(server.url, CASE.model, form.outputs, form.tensors) as triton,
    ):
        connection = Connection(server.url, memory)
        try:
            form.fill(memory)
            form.check(connection, memory)
            form.check_triton(triton)
            for way in WAYS:
                warm_up(server.url, form.requests(way), CONNECTIONS)
            for _ in range(ROUNDS):
                form.measure(connection, triton)
        finally:
            connection.close()
    return form.rows()


def main() -> None:
    if SERVER_CORE == LOAD_CORE:
        raise SystemExit(
            "this process may use one core; expected two, one for the server and one for the client"
        )
    rows: list[dict[str, Any]] = []
    with shared_folder() as root:
        publish_random(root, CASE.model, {f"t{i}": (ROWS, DIM, "int8") for i in range(CASE.features)})
        os.sched_setaffinity(0, {SERVER_CORE})  # inherited by the server
        options = ("--root", root, "--port", 0, "--drain-s", 0, "--scrub-hours", 0, "--allow-client-shm")
        with serving("-m", "tableside", "serve", CASE.model, *options) as server:
            os.sched_setaffinity(0, {LOAD_CORE})
            inside = InProcess(root, CASE)
            for name in FORMS:
                rows += measure(name, server, inside)
                console.print(*map(line, rows[-len(WAYS) :]), sep="\n")
    title = (
        f"system shared memory against binary bodies, {CASE}, int8 D {DIM}, one worker on one core, "
        f"the client on another"
    )
    report("client_shm", title, rows)


if __name__ == "__main__":
    main()
