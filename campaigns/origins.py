"""Web pages: what a browser sends for a page of another site, to a server on loopback that clients may share
memory with.

Promised: none of them registers a region, writes to shared memory, loads or unloads anything, or is answered
with rows. The server's own pages, and programs, are answered. Pages send what browsers let them: `Origin` and
`Sec-Fetch-Site` are the browser's, and a `Content-Type` that asks the server first (a preflight) is not
theirs to choose.

The oracle: bytes in shared memory that another program keeps, and the server's list of regions, stay as they
were.
"""

import json
import random
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from campaigns.common import folders, publish, random_of, standalone
from tableside.serving.cli.local import local_server

MEMORY_BYTES, TOKEN = 4096, "a token of the operator"
PAGES = (
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil.localhost.example",
    "xn--e1afmkfd.example",
)
SIMPLE = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    None,
)


@dataclass
class Asked:
    """A request as its bytes, and whether it comes from where it may."""

    data: bytes
    is_own: bool


def _head(method: str, path: str, body: bytes, lines: list[str]) -> bytes:
    return (
        "\r\n".join(
            [f"{method} {path} HTTP/1.1", *lines, f"Content-Length: {len(body)}", "Connection: close", "", ""]
        ).encode()
        + body
    )


def asked(chance: random.Random, port: int, key: str) -> Asked:
    """A request of a page, of one whose name points here, or of this server's own page or a program."""
    register = json.dumps({"key": key, "offset": 0, "byte_size": MEMORY_BYTES}).encode()
    entry = {"name": "user", "datatype": "INT64", "shape": [1, 1], "data": [chance.randrange(100)]}
    output = {
        "name": "user",
        "parameters": {"shared_memory_region": "own", "shared_memory_byte_size": MEMORY_BYTES},
    }
    method, path, body = chance.choice(
        [
            ("POST", "/v2/systemsharedmemory/region/theirs/register", register),
            ("POST", "/v2/systemsharedmemory/region/own/unregister", b""),
            ("POST", "/v2/models/demo/infer", json.dumps({"inputs": [entry], "outputs": [output]}).encode()),
            ("POST", "/v2/models/demo/infer", json.dumps({"inputs": [entry]}).encode()),
            ("POST", "/v1/lookup", json.dumps({"model": "demo", "features": {"user": [[1]]}}).encode()),
            ("POST", "/v2/repository/models/demo/unload", b""),
        ]
    )
    own = chance.choice([f"localhost:{port}", f"127.0.0.1:{port}", "localhost"])
    page, scheme = chance.choice(PAGES), chance.choice(["http", "https"])
    kind = chance.choice(SIMPLE)
    types = [] if kind is None else [f"Content-Type: {kind}"]
    who = chance.choice(["cross", "old", "null", "rebound", "rebound", "program", "own page"])
    if who == "program" or who == "own page":
        lines = [
            f"Host: {own}",
            *([f"Origin: http://{own}", "Sec-Fetch-Site: same-origin"] if who == "own page" else []),
        ]
        return Asked(_head("GET", chance.choice(["/v1/models", "/v2/health/ready", "/"]), b"", lines), True)
    if who == "rebound":
        named = chance.choice([page, f"{page}:{port}", page.upper()])
        site = chance.choice(
            [
                [],
                [f"Origin: {scheme}://{named}"],
                [f"Origin: {scheme}://{named}", "Sec-Fetch-Site: same-origin"],
            ]
        )
        if chance.random() < 0.3:
            method, path, body = "GET", chance.choice(["/v1/models", "/v2/systemsharedmemory/status"]), b""
        return Asked(_head(method, path, body, [f"Host: {named}", *site, *types]), False)
    origin = (
        "null"
        if who == "null"
        else f"{scheme}://{chance.choice([page, f'localhost:{port + 1}', own + '.' + page])}"
    )
    site = [] if who == "old" else [f"Sec-Fetch-Site: {chance.choice(['cross-site', 'same-site'])}"]
    lines = [f"Host: {own}", f"Origin: {origin}", *site, *types]
    chance.shuffle(lines)
    return Asked(_head(method, path, body, lines), False)


def _ask(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        with connection.makefile("rb") as answer:
            head = b"".join(
                iter(answer.readline, b"\r\n")
            )  # a refused connection stays open for a moment more
            size = re.search(rb"content-length: (\d+)", head, re.I)
            return head + b"\r\n" + answer.read(int(size[1]) if size else 0)


@contextmanager
def _memory() -> Iterator[Path]:
    """What another program of this user keeps in shared memory."""
    path = Path("/dev/shm") / f"of-another-{secrets.token_hex(6)}"
    path.write_bytes(secrets.token_bytes(MEMORY_BYTES))
    try:
        yield path
    finally:
        path.unlink()


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign."""
    end = time.monotonic() + seconds
    counts = dict.fromkeys(
        ("requests of pages", "taken from a page", "own requests", "own requests refused"), 0.0
    )
    changed = 0
    with folders() as (root, files), _memory() as memory:
        publish(root, files, 1)
        options = ("--allow-client-shm", "--admin-token", TOKEN)
        with local_server(["demo"], *options, root=root, workers=2) as server:
            port = int(urlsplit(server.url).port or 0)
            register = json.dumps({"key": memory.name, "offset": 0, "byte_size": MEMORY_BYTES}).encode()
            mine = [f"Host: localhost:{port}", "Content-Type: application/json"]
            first = _ask(port, _head("POST", "/v2/systemsharedmemory/region/own/register", register, mine))
            if not first.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the campaign's own region was not registered: {first!r}")
            before = memory.read_bytes()
            number = 0
            while time.monotonic() < end or number < 200:
                one = asked(random_of(seed, "origins", number), port, memory.name)
                found = _ask(port, one.data)
                is_taken = found.startswith(b"HTTP/1.1 2")
                counts["own requests" if one.is_own else "requests of pages"] += 1
                counts["own requests refused"] += one.is_own and not is_taken
                counts["taken from a page"] += not one.is_own and is_taken
                changed += memory.read_bytes() != before
                if one.is_own != is_taken:
                    print(f"origins: seed {seed} case {number}: {one.data!r} -> {found[:100]!r}", flush=True)
                number += 1
            status = _ask(port, _head("GET", "/v2/systemsharedmemory/status", b"", mine)).partition(
                b"\r\n\r\n"
            )[2]
            regions = [entry["name"] for entry in json.loads(status)]
    return {**counts, "changes of memory": changed, "changes of regions": regions != ["own"]}


if __name__ == "__main__":
    standalone(run)
