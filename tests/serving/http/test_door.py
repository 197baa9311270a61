"""Infer requests that do not go through ASGI: they are answered as those that do, in order, whoever else
waits."""

import gzip
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.wire import encode
from tableside.serving.client import Client

IDS = [[1, 2], [3]]


def plain(
    ids: Any = IDS, extra: str = "", version: str = "1.1", path: str = "/v2/models/demo/infer"
) -> bytes:
    """An infer request for the feature `user`, as bytes."""
    headers, body = encode({"user": ids})
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: localhost",
        f"Content-Length: {len(body)}",
        *(f"{k}: {v}" for k, v in headers.items()),
    ]
    return "\r\n".join([*lines, *([extra] if extra else []), "", ""]).encode() + body


class Reader:
    """The responses that come over a socket, one after another."""

    def __init__(self, connection: socket.socket) -> None:
        self.file = connection.makefile("rb")

    def response(self) -> tuple[int, dict[bytes, bytes], bytes]:
        status = int(self.file.readline().split()[1])
        headers = dict(line.lower().strip().split(b": ", 1) for line in iter(self.file.readline, b"\r\n"))
        return status, headers, self.file.read(int(headers[b"content-length"]))


@pytest.fixture
def connection(server: Any) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=300) as made:
        yield made


@pytest.fixture
def reader(connection: socket.socket) -> Iterator[Reader]:
    made = Reader(connection)
    yield made
    made.file.close()


def vectors(body: bytes, count: int) -> np.ndarray:
    return np.frombuffer(body[-256 * count :], np.float32).reshape(count, 64)


def test_a_thousand_requests_in_one_write_are_answered_in_order(
    connection: socket.socket, reader: Reader, server: Any
) -> None:
    """Each with its own vectors, with GETs between them, however deep they are stacked."""
    with Client(server.url) as client:
        expected = {n: client.lookup("demo", {"user": [[n]]})["user"] for n in range(10)}
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection.sendall(b"".join(plain([[n % 10]]) + (get if n % 100 == 0 else b"") for n in range(1000)))
    for n in range(1000):
        status, _, body = reader.response()
        assert status == 200
        np.testing.assert_array_equal(vectors(body, 1), expected[n % 10])
        if n % 100 == 0:
            assert reader.response()[2] == b'{"live":true}'


@pytest.mark.drawn(0.5)
def test_a_refusal_waits_for_a_large_answer_before_it(connection: socket.socket, reader: Reader) -> None:
    """A large lookup runs beside the event loop, and the request behind it is no HTTP: first its answer,
    then the refusal."""
    connection.sendall(plain([[1] * 250_000]) + b"NONSENSE\r\n\r\n")
    assert [reader.response()[0] for _ in range(2)] == [200, 400]
    assert reader.file.read() == b""


@pytest.mark.drawn(0.5)
def test_a_refused_body_waits_for_a_large_answer_before_it(connection: socket.socket, reader: Reader) -> None:
    """The same, where the request behind it is whole but for its body, which is broken."""
    broken = b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"
    connection.sendall(plain([[1] * 250_000]) + broken)
    assert [reader.response()[0] for _ in range(2)] == [200, 400]
    assert reader.file.read() == b""


def test_what_goes_through_asgi_gets_the_same_answer(connection: socket.socket, reader: Reader) -> None:
    """Compressed, chunked, with a query, with 100-continue: the bytes of the response are those of the
    plain request."""
    connection.sendall(plain())
    wanted = reader.response()[2]
    head, _, body = plain().partition(b"\r\n\r\n")
    packed = gzip.compress(body)
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    zipped = (
        b"\r\n".join([*lines, b"Content-Encoding: gzip", b"Content-Length: %d" % len(packed)])
        + b"\r\n\r\n"
        + packed
    )
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    chunked = b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n" + chunks
    for request in (
        zipped,
        chunked,
        plain(path="/v2/models/demo/infer?x=1"),
        plain(path="/v2/models/d%65mo/infer"),
    ):
        connection.sendall(request)
        status, _, found = reader.response()
        assert (status, found) == (200, wanted)
    connection.sendall(plain(extra="Expect: 100-continue"))
    assert reader.file.readline().startswith(b"HTTP/1.1 100")
    assert reader.file.readline() == b"\r\n"
    assert reader.response()[2] == wanted


@pytest.mark.parametrize(("extra", "version"), [("", "1.0"), ("Connection: close", "1.1")])
def test_the_connection_closes_where_the_client_says_so(
    connection: socket.socket, reader: Reader, extra: str, version: str
) -> None:
    """After the whole answer, which says it too."""
    connection.sendall(plain(extra=extra, version=version))
    status, headers, body = reader.response()
    assert status == 200 and headers[b"connection"] == b"close" and vectors(body, 2).shape == (2, 64)
    assert reader.file.read() == b""


def test_refusals_are_those_of_asgi(connection: socket.socket, reader: Reader) -> None:
    """Unknown models and versions, wrong ids, a wrong header length: status, message and an open
    connection."""
    cases = [
        (plain(path="/v2/models/nobody/infer"), 404, b"model 'nobody' is not served here"),
        (
            plain(path="/v2/models/demo/versions/77/infer"),
            404,
            b"version 77 of model 'demo' is not published",
        ),
        (plain(path="/v2/models//infer"), 404, b"is not served here"),
        (plain(path="/v2/models/demo/x/y/z/infer"), 404, b"is not a path of this server"),
        (plain([[5000]]), 400, b"feature 'user': id 5000 at position 0 is outside the table's rows"),
        (
            plain().replace(b"Inference-Header-Content-Length: ", b"Inference-Header-Content-Length: 9999"),
            400,
            b"expected a number",
        ),
    ]
    for request, status, message in cases:
        connection.sendall(request)
        found, _, body = reader.response()
        assert found == status and message in body, body
    connection.sendall(plain())
    assert reader.response()[0] == 200


def test_a_client_that_does_not_read_is_waited_for(connection: socket.socket, reader: Reader) -> None:
    """Answers beyond what the sockets take are kept until the client reads; none is lost or out of order."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    many = [[n % 1000] for n in range(4000)]  # a megabyte of vectors
    requests = 40
    connection.sendall(b"".join(plain(many) for _ in range(requests)))
    first = reader.response()[2]
    assert vectors(first, 4000).shape == (4000, 64)
    for _ in range(requests - 1):
        assert reader.response()[2] == first
