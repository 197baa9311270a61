"""Big headers: requests whose size or shape costs a worker more than it costs their sender.

Promised: whatever comes, a worker's memory stays within `max_in_flight_bytes`, two bodies that are joined or
widened, and what a worker keeps of freed memory. Wished on a quiet machine: a health check beside one such
request waits 20 ms at most, as none keeps the event loop for longer.

The oracle of the one is the kernel's high-water mark of the worker's memory, of the other a process of its
own that asks the server all the time for a health check, and notes the longest answer. Every case is sent
alone, and several times at once.
"""

import contextlib
import gzip
import itertools
import json
import multiprocessing
import random
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import numpy as np

from campaigns.common import folders, publish, random_of, standalone, workers_of
from campaigns.raw_cases import length, request
from tableside.serving.cli.local import local_server

MIB = 1 << 20
BODY, RESPONSE, JSON, IN_FLIGHT = 16 * MIB, 16 * MIB, 4 * MIB, 160 * MIB
KEPT_BYTES = 256 * MIB  # serving/kept_memory.py: of freed memory, which it gives back beyond that
MOST_BYTES = IN_FLIGHT + 2 * BODY + KEPT_BYTES
AT_ONCE, PATIENCE_S, SLOW_S = (1, 12), 5.0, 0.02
OPTIONS = [
    *("--max-body-bytes", BODY, "--max-response-bytes", RESPONSE),
    *("--max-json-bytes", JSON, "--max-in-flight-bytes", IN_FLIGHT),
]
INFER, LOOKUP = b"/v2/models/demo/infer", b"/v1/lookup"

Case = Callable[[random.Random], bytes]


def _v1(body: bytes, *headers: bytes) -> bytes:
    return request(body, length(body), *headers, path=LOOKUP)


def _v2(header: bytes, binary: bytes = b"", *headers: bytes) -> bytes:
    body = header + binary
    return request(body, length(body), b"Inference-Header-Content-Length: %d" % len(header), *headers)


def _filled(before: bytes, piece: bytes, after: bytes, size: int) -> bytes:
    return (
        before + (piece + b",") * ((size - len(before) - len(after)) // (len(piece) + 1) - 1) + piece + after
    )


def _size(chance: random.Random, most: int = JSON) -> int:
    return int(most * chance.choice((1, 1, 0.5, 0.1, 0.016)))


_IDS = {"name": "user", "datatype": "INT64", "shape": [1, 1], "parameters": {"binary_data_size": 8}}
PIECES = (b"1", b"123456", b"[]", b"{}", b'""', b"0.25", b'{"a":1}', b"[[]]", b"true", b"-1", b'"\\u0041"')


def _header_with_numbers(chance: random.Random) -> bytes:
    """A header that is right, but for a field that nobody reads."""
    head = json.dumps({"inputs": [_IDS]}).encode()[:-1]
    return _v2(_filled(head + b',"junk":[', chance.choice(PIECES), b"]}", _size(chance)), bytes(8))


def _header_with_inputs(chance: random.Random) -> bytes:
    one = json.dumps({**_IDS, "name": f"user{chance.randrange(10)}"}, separators=(",", ":")).encode()
    return _v2(_filled(b'{"inputs":[', chance.choice((one, *PIECES)), b"]}", _size(chance)), bytes(8))


def _header_with_outputs(chance: random.Random) -> bytes:
    head = json.dumps({"inputs": [_IDS]}).encode()[:-1]
    return _v2(
        _filled(head + b',"outputs":[', chance.choice((b'{"name":"user"}', *PIECES)), b"]}", _size(chance)),
        bytes(8),
    )


def _header_with_id(chance: random.Random) -> bytes:
    size = _size(chance)
    return _v2(json.dumps({"id": chance.choice('a1{["é') * (size // 8), "inputs": [_IDS]}).encode(), bytes(8))


def _inline_ids(chance: random.Random) -> bytes:
    piece = chance.choice((b"1", b"1234", b"[1]", b"[]"))
    head = b'{"inputs":[{"name":"user","datatype":"INT64","shape":[%d,1],"data":['
    body = _filled(head, piece, b"]}]}", _size(chance))
    body = body.replace(b"%d", b"%d" % (body.count(b",") - 3), 1)
    return request(body, length(body))


def _header_of_spaces(chance: random.Random) -> bytes:
    return _v2(json.dumps({"inputs": [_IDS]}).encode() + b" " * _size(chance, JSON - 1000), bytes(8))


def _unknown_features(chance: random.Random) -> bytes:
    value = chance.choice((b"[]", b"[[1]]", b"{}", b'{"values":[1]}', b"1"))
    count = _size(chance) // (len(value) + 10)
    features = b",".join(b'"%06x":%s' % (k, value) for k in range(count))
    return _v1(b'{"model":"demo","features":{%s}}' % features)


def _bags(chance: random.Random) -> bytes:
    feature = chance.choice((b"user", b"bought"))
    piece = chance.choice(
        (b"[]", b"[1]", b"[1,2,3]", b"[12345]", b"1", b"{}", b'""', b"[1.5]", b"[true]", b"[[]]")
    )
    return _v1(_filled(b'{"model":"demo","features":{"%s":[' % feature, piece, b"]}}", _size(chance)))


def _one_bag(chance: random.Random) -> bytes:
    piece = chance.choice((b"1", b"1999", b"999999", b"1.5", b"true", b"null"))
    ids = _filled(b'{"model":"demo","features":{"bought":[[', piece, b"]]}}", _size(chance))
    return _v1(ids)


def _jagged(chance: random.Random) -> bytes:
    count = _size(chance) // 8
    values = b",".join([chance.choice((b"7", b"1999"))] * count)
    lengths = b",".join([b"1"] * count)
    return _v1(
        b'{"model":"demo","found":%s,"features":{"bought":{"values":[%s],"lengths":[%s]}}}'
        % (chance.choice((b"true", b"false")), values, lengths)
    )


def _vectors_as_json(chance: random.Random) -> bytes:
    """As many vectors as a JSON answer may hold."""
    count = _size(chance) // 32 - 1
    if chance.random() < 0.5:
        return _v1(b'{"model":"demo","features":{"user":[[%s]]}}' % b",".join([b"7"] * count))
    entry = {
        "name": "user",
        "datatype": "INT64",
        "shape": [1, count],
        "parameters": {"binary_data_size": 8 * count},
    }
    return _v2(json.dumps({"inputs": [entry]}).encode(), np.full(count, 7).tobytes())


def _zipped(chance: random.Random) -> bytes:
    size = chance.choice((BODY - 100, BODY + 100, 64 * MIB, JSON - 100))
    plain = b" " * size if chance.random() < 0.7 else chance.randbytes(MIB) * (size // MIB)
    body = gzip.compress(plain, 1)[:BODY]
    if chance.random() < 0.3:
        body = body[:-9] + b"garbage"
    path = chance.choice((INFER, LOOKUP))
    return request(body, length(body), b"Content-Encoding: gzip", path=path)


def _binary_ids(chance: random.Random, datatype: str, bags: bool) -> bytes:
    item = 8 if datatype == "INT64" else 4
    count = int((BODY - 4096) * chance.choice((1, 0.5, 0.1)) / (item + 4 * bags))
    entries = [
        {
            "name": "bought.values",
            "datatype": datatype,
            "shape": [count],
            "parameters": {"binary_data_size": item * count},
        }
    ]
    bodies = [np.full(count, 7, np.int64 if item == 8 else np.int32).tobytes()]
    lengths = np.ones(count if bags else 1, np.int32) if bags else np.array([count], np.int32)
    entries.append(
        {
            "name": "bought.lengths",
            "datatype": "INT32",
            "shape": [len(lengths)],
            "parameters": {"binary_data_size": lengths.nbytes},
        }
    )
    asked = {"inputs": entries, "parameters": {"binary_data_output": True}}
    return _v2(json.dumps(asked).encode(), b"".join([*bodies, lengths.tobytes()]))


def _wide_ids(chance: random.Random) -> bytes:
    return _binary_ids(chance, "INT64", False)


def _narrow_ids(chance: random.Random) -> bytes:
    return _binary_ids(chance, "INT32", chance.random() < 0.3)


def _twice(case: Case) -> Case:
    """The same request three times over one connection: a header is learned by its second."""

    def sent(chance: random.Random) -> bytes:
        return case(chance) * 3

    return sent


def _empty_bags(chance: random.Random) -> bytes:
    """No ids, and as many bags as vectors that a response may hold."""
    bags = RESPONSE // 32
    entry = {"name": "bought", "datatype": "INT64", "shape": [bags, 0], "parameters": {"binary_data_size": 0}}
    return _v2(json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode())


def _chunks(chance: random.Random) -> bytes:
    """A body in the smallest chunks that there are."""
    size = chance.choice((1, 2, 3, 16))
    count = 2 * MIB // (size + 5)
    return (
        request(b"", b"Transfer-Encoding: chunked")
        + (b"%x\r\n%s\r\n" % (size, b"x" * size)) * count
        + b"0\r\n\r\n"
    )


SMALL = (
    b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v2/models/demo/infer HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
)


def _pipelined(chance: random.Random) -> bytes:
    small = chance.choice(SMALL)
    return small * (2 * MIB // len(small))


def _unread(chance: random.Random) -> bytes:
    """A body that the application refuses without reading it."""
    body = bytes(BODY - 1000)
    return request(body, length(body), path=b"/v1/models")


def _headers(chance: random.Random) -> bytes:
    line = chance.choice((b"a:\r\n", b"Accept: */*\r\n", b"a: %s\r\n" % (b"x" * 8000)))
    return (
        b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
        + line * ((16 << 10) // len(line) - 20)
        + b"\r\n"
    )


CASES: dict[str, Case] = {
    "header with numbers": _twice(_header_with_numbers),
    "header with inputs": _twice(_header_with_inputs),
    "header with outputs": _twice(_header_with_outputs),
    "header with an id": _twice(_header_with_id),
    "header of spaces": _twice(_header_of_spaces),
    "inline ids": _inline_ids,
    "unknown features": _unknown_features,
    "bags": _bags,
    "one bag": _one_bag,
    "jagged": _jagged,
    "vectors as JSON": _vectors_as_json,
    "zipped": _zipped,
    "wide ids": _twice(_wide_ids),
    "narrow ids": _twice(_narrow_ids),
    "empty bags": _twice(_empty_bags),
    "chunks": _chunks,
    "pipelined": _pipelined,
    "unread": _unread,
    "HTTP headers": _headers,
}


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
