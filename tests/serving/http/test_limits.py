"""Slow, large and many: every limit of serving/http/connection/connection.py, met by raw sockets."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPResponse
from itertools import product

import pytest
from servers import Server, running
from support import until


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose limits are small enough to be met quickly, for all tests of this file."""
    options = (
        *("--header-timeout-s", 1, "--body-timeout-s", 2, "--idle-timeout-s", 1, "--write-timeout-s", 0.5),
        *(
            "--max-body-bytes",
            100_000,
            "--max-header-bytes",
            2000,
            "--max-connections",
            8,
            "--max-response-bytes",
            1 << 28,
        ),
    )
    with running(tmp_path_factory.mktemp("demo"), *options) as server:
        yield server


@pytest.fixture
def connect(tight: Server) -> Iterator[Callable[[], socket.socket]]:
    """Opens a connection to the tight server, which has given it up when the next test begins."""
    opened: list[socket.socket] = []

    def run() -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", tight.port), timeout=300))
        return opened[-1]

    yield run
    for one in opened:
        with one, suppress(OSError):  # it is closed, or was reset
            one.settimeout(10)
            one.shutdown(socket.SHUT_WR)
            everything(one)


def everything(connection: socket.socket) -> bytes:
    """All bytes until the server closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def status(connection: socket.socket) -> int:
    """The status of the next response, whose body is read whole: it may come in several packets."""
    response = HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def answer(connection: socket.socket) -> tuple[int, str]:
    """Status and error of a response that closes the connection."""
    head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert (b" 503 " in head) == (b"retry-after: 1" in head.lower())
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.thorough
def test_headers_that_never_end(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    assert answer(connection) == (408, "the headers did not arrive within 1 s; send the request in one go")


@pytest.mark.drawn(0.25)
def test_headers_that_drip(connect: Callable[[], socket.socket]) -> None:
    """A byte now and then does not extend the deadline."""
    connection = connect()
    connection.sendall(b"GET /health HTTP/1.1\r\n")
    connection.settimeout(0.05)
    received = b""
    for i in range(400):
        try:
            connection.sendall(b"X-%d: y\r\n" % i)
            received = connection.recv(4096)
            break
        except TimeoutError:
            continue
    assert received.startswith(b"HTTP/1.1 408")


@pytest.mark.thorough
def test_a_body_that_never_comes(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
    assert answer(connection) == (408, "the body did not arrive within 2 s; send the request in one go")


@pytest.mark.drawn(0.5)
def test_a_connection_without_a_request(connect: Callable[[], socket.socket]) -> None:
    """Closed after header_timeout_s, without a word."""
    assert everything(connect()) == b""


def test_idle_connections_make_room(connect: Callable[[], socket.socket]) -> None:
    """When all are taken, the one that is idle for longest is closed for a new one; the others stay."""
    held = [connect() for _ in range(8)]
    for one in held:
        one.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(one) == 200

    def is_taken() -> bool:
        late = connect()
        late.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return status(late) == 200

    until(is_taken, what="a new connection to be taken, once the others have been idle for a moment")
    assert everything(held[0]) == b""
    for one in held[1:]:
        one.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(one) == 200


@pytest.mark.drawn(0.5)
def test_a_kept_connection_that_goes_quiet(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert everything(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("parts", [1, 30])
@pytest.mark.drawn(1)
def test_headers_that_are_too_large(connect: Callable[[], socket.socket], parts: int) -> None:
    """In one piece, and growing piece by piece."""
    connection = connect()
    connection.sendall(b"GET /health HTTP/1.1\r\n")
    for i in range(parts):
        connection.sendall(b"X-%d: " % i + b"y" * (3000 // parts) + b"\r\n")
    if parts == 1:
        connection.sendall(b"\r\n")
    status, error = answer(connection)
    assert status == 431
    assert "exceed 2,000 bytes, the limit (max_header_bytes)" in error


@pytest.mark.drawn(0.5)
def test_an_address_that_is_too_long_without_headers(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(b"GET /health?" + b"y" * 3000 + b" HTTP/1.0\r\n\r\n")
    status, error = answer(connection)
    assert status == 431
    assert "exceed 2,000 bytes, the limit (max_header_bytes)" in error


@pytest.mark.drawn(0.5)
def test_a_declared_body_that_is_too_large(connect: Callable[[], socket.socket]) -> None:
    """Refused before the body comes; a client that sends on still gets the answer."""
    connection = connect()
    connection.sendall(
        b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100001\r\n\r\n" + bytes(60_000)
    )
    status, error = answer(connection)
    assert status == 413
    assert "the limit is 100,000 (max_body_bytes)" in error


@pytest.mark.drawn(0.5)
def test_a_chunked_body_that_grows_too_large(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(
        b"POST /v2/models/demo/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for _ in range(11):
        connection.sendall(b"2710\r\n" + bytes(10_000) + b"\r\n")
    status, _ = answer(connection)
    assert status == 413


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 3, b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"],
)
@pytest.mark.drawn(1)
def test_what_is_not_http(connect: Callable[[], socket.socket], garbage: bytes) -> None:
    connection = connect()
    connection.sendall(garbage)
    assert answer(connection)[0] == 400


@pytest.mark.drawn(0.5)
def test_too_many_connections(connect: Callable[[], socket.socket], tight: Server) -> None:
    """Where all have a request under way the ninth gets 503; when others leave, requests are answered
    again."""
    held = [connect() for _ in range(8)]
    for one in held:
        one.sendall(b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
    last = connect()
    last.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    status, error = answer(last)
    assert status == 503
    assert "8 connections, its limit (max_connections)" in error
    for one in held:
        one.close()
    until(lambda: tight.get("/health").status_code == 200, what="the server to answer again")


def test_a_client_that_does_not_read(connect: Callable[[], socket.socket], tight: Server) -> None:
    """Its connection is reset, its memory freed, and others are answered meanwhile."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", tight.port))
    shape, bags = [40_000, 0], 40_000
    body = json.dumps(
        {
            "inputs": [{"name": "user", "datatype": "INT64", "shape": shape, "data": []}],
            "outputs": [{"name": "user", "parameters": {"binary_data": True}}],
        }
    ).encode()
    connection.sendall(
        b"POST /v2/models/demo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    assert bags * 64 * 4 > 4 << 20
    assert tight.get("/health").status_code == 200

    def was_reset() -> bool:
        with open("/proc/net/tcp") as table:
            local = f"0100007F:{connection.getsockname()[1]:04X}"
            states = [line.split()[3] for line in table if line.split()[1] == local]
        return states != ["01"]  # 01: established

    until(was_reset, what="the server to give the connection up")
    connection.close()


@pytest.mark.drawn(0.5)
def test_trailers_without_end(connect: Callable[[], socket.socket]) -> None:
    """Trailers of a chunked body are limited like headers, and are not taken for headers."""
    connection = connect()
    connection.sendall(
        b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    )
    for _ in range(10):
        connection.sendall(b"X-T: " + b"y" * 500 + b"\r\n")
    assert answer(connection)[0] == 431


@pytest.mark.drawn(0.5)
def test_blank_lines_do_not_keep_a_connection(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status(connection) == 200
    connection.sendall(b"\r\n")
    assert everything(connection) == b""


@pytest.mark.drawn(0.5)
def test_garbage_after_a_request_does_not_eat_its_answer(connect: Callable[[], socket.socket]) -> None:
    body = json.dumps({"model": "demo", "features": {"user": [[1]]}}).encode()
    connection = connect()
    connection.sendall(
        b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
        + b"GARBAGE\r\n\r\n"
    )
    assert everything(connection).startswith(b"HTTP/1.1 200")


def test_an_offer_to_upgrade_is_ignored(connect: Callable[[], socket.socket]) -> None:
    """As Java's client sends it: the body is read, and the answer is plain HTTP/1.1."""
    body = json.dumps({"model": "demo", "features": {"user": [[1]]}}).encode()
    head = (
        b"POST /v1/lookup HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: "
        b"localhost\r\nHTTP2-Settings: AAEAAEAA\r\n"
    )
    connection = connect()
    for _ in range(2):
        connection.sendall(head + b"Upgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert status(connection) == 200


LOOKUP = json.dumps({"model": "demo", "features": {"user": [[1]]}}).encode()


def smuggled(name: bytes, value: bytes = b"h2c") -> bytes:
    """A request that offers to upgrade, whose body is a request."""
    body = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = (
        b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive, "
        + name.lower()
        + b"\r\n"
    )
    return head + name + b": " + value + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_a_body_is_never_a_request(connect: Callable[[], socket.socket]) -> None:
    """However an offer to upgrade is written, however the bytes are cut, whatever comes before: one
    request, one answer."""
    ask = b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(LOOKUP) + LOOKUP
    last = ask.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
    for name, piece, pipelined in product((b"Upgrade", b"UPGRADE", b"uPgRaDe"), (1, 7, 90, 1000), (0, 2)):
        connection = connect()
        data = ask * pipelined + smuggled(name) + last
        for at in range(0, len(data), piece):
            connection.sendall(data[at : at + piece])
        answers = everything(connection).split(b"HTTP/1.1 ")[1:]
        # The body is no JSON, which only the request that it belongs to says.
        assert [a[:3] for a in answers] == [b"200"] * pipelined + [b"400", b"200"], (name, piece, pipelined)
        assert [b"the request is not JSON" in a for a in answers] == [
            n == pipelined for n in range(pipelined + 2)
        ]


def test_an_offer_with_a_chunked_body(connect: Callable[[], socket.socket]) -> None:
    """Chunks are read as chunks; the connection goes on."""
    head = b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    chunked = b"%x\r\n" % len(LOOKUP) + LOOKUP + b"\r\n0\r\n\r\n"
    connection = connect()
    for _ in range(2):
        connection.sendall(head + chunked)
        assert status(connection) == 200


FRAMINGS = {
    b"Content-Length: 5\r\nContent-Length: 6": 400,
    b"Content-Length: 5\r\nTransfer-Encoding: chunked": 400,
    b"Transfer-Encoding: chunked\r\nContent-Length: 5": 400,
    b"Content-Length: +5": 400,
    b"Content-Length: 5, 5": 400,
    b"Transfer-Encoding: gzip, chunked": 501,
    b"Transfer-Encoding: identity": 501,
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked": 400,
    b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\nTransfer-Encoding: chunked": 400,
}


@pytest.mark.thorough
def test_a_body_whose_end_is_in_doubt(connect: Callable[[], socket.socket]) -> None:
    """Refused, and the connection closes: nothing after it is taken for a request."""
    for framing, expected in FRAMINGS.items():
        connection = connect()
        connection.sendall(
            b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\n"
            + framing
            + b"\r\n\r\nhello"
            + smuggled(b"Upgrade")
        )
        found = everything(connection)
        assert (found.count(b"HTTP/1.1 "), int(found.split()[1])) == (1, expected), framing


@pytest.mark.drawn(0.5)
def test_chunks_of_an_old_client(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(b"POST /v1/lookup HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert answer(connection)[0] == 400


@pytest.mark.drawn(0.5)
def test_a_proxy_is_not_here(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(
        b"CONNECT example:443 HTTP/1.1\r\nHost: example:443\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    assert answer(connection) == (405, "CONNECT: this server is no proxy")


@pytest.mark.thorough
def test_answers_come_in_order(connect: Callable[[], socket.socket]) -> None:
    """What is wrong with a later request is said after those before it are answered."""
    ask = b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(LOOKUP) + LOOKUP
    broken = b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"
    for before in range(4):
        connection = connect()
        connection.sendall(ask * before + broken)
        answers = everything(connection).split(b"HTTP/1.1 ")[1:]
        assert [a[:3] for a in answers] == [b"200"] * before + [b"400"]


@pytest.mark.drawn(0.5)
def test_pipelined_requests_are_all_answered(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5)
    assert everything(connection).count(b"HTTP/1.1 200") == 5
