"""How the client reads responses: any framing, any cutting into packets, and what is no response; and
server addresses."""

import numpy as np
import pytest

from tableside.serving.client import Client
from tableside.serving.client.address import Address
from tableside.serving.client.http import ResponseReader
from tableside.serving.client.messages import HttpRequest, HttpResponse

pytestmark = pytest.mark.quick

OK = b"HTTP/1.1 200 OK\r\n"


def read(data: bytes, step: int, ends: bool = False) -> HttpResponse | None:
    """The response in `data`, which comes `step` bytes at a time; ends: then the server closes."""
    reader = ResponseReader()
    for at in range(0, len(data), step):
        part = data[at : at + step]
        while part:
            room = reader.buffer()
            taken = min(len(room), len(part))
            room[:taken] = part[:taken]
            if (response := reader.take(taken)) is not None:
                return response
            part = part[taken:]
    return reader.end() if ends else None


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    ("data", "status", "body", "is_last"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", 200, b"hello", False),
        (OK + b"content-length: 0\r\n\r\n", 200, b"", False),
        (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", 200, b"hello", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", False),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
            404,
            b"no",
            False,
        ),
    ],
)
def test_a_body_is_read_whatever_its_framing(
    data: bytes, status: int, body: bytes, is_last: bool, step: int
) -> None:
    """However a response is cut into packets, its status and body are the same, and so is what becomes of
    the connection."""
    response = read(data, step)
    assert response is not None
    assert (response.status, bytes(response.content), response.is_last) == (status, body, is_last)


@pytest.mark.parametrize("step", [1, 1 << 20])
def test_a_body_may_end_with_the_connection(step: int) -> None:
    response = read(OK + b"\r\nhello", step, ends=True)
    assert response is not None and bytes(response.content) == b"hello" and response.is_last


def test_a_large_body_is_read_whole() -> None:
    """More than the buffer of heads, and more than one buffer in chunks."""
    body = np.random.default_rng(1).bytes(300_000)
    chunked = (
        b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:150_000], body[150_000:]))
        + b"0\r\n\r\n"
    )
    for data in (
        OK + b"Content-Length: 300000\r\n\r\n" + body,
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked,
    ):
        for step in (1000, 65_536, 1 << 20):
            response = read(data, step)
            assert response is not None and bytes(response.content) == body


def test_bytes_after_a_response_end_the_connection() -> None:
    """What was never asked for is not taken for the next answer."""
    response = read(OK + b"Content-Length: 5\r\n\r\nhelloHTTP", 1 << 20)
    assert response is not None and bytes(response.content) == b"hello" and response.is_last


@pytest.mark.parametrize("json_bytes", [1, 15, 16, 17, 100])
def test_tensors_begin_at_a_multiple_of_sixteen(json_bytes: int) -> None:
    """Vectors are aligned in memory whatever the length of the JSON before them."""
    head = OK + b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % (
        json_bytes,
        json_bytes + 64,
    )
    response = read(head + bytes(json_bytes + 64), 1 << 20)
    assert response is not None and response.json_bytes == json_bytes
    assert np.frombuffer(response.content, np.uint8, 64, json_bytes).ctypes.data % 16 == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP/1.1 response"),
        (OK + b"Content-Length: x\r\n\r\n", "no HTTP/1.1 response"),
        (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "no HTTP/1.1 response"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "no HTTP/1.1 response"),
        (OK + b"X: " + b"x" * 70_000, "more than 32768 bytes"),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", "content-encoding is b'gzip'"),
        (OK + b"Content-Length: 6\r\n\r\nhello", "before the response was complete"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n", "before the response was complete"),
        (b"HTTP/1.1 200 O", "before the response was complete"),
        (b"", "before the response was complete"),
    ],
)
def test_what_is_no_response_is_a_broken_connection(data: bytes, message: str) -> None:
    with pytest.raises(ConnectionError, match=message):
        read(data, 1 << 20, ends=True)


def test_addresses() -> None:
    """A prefix, a user and an IPv6 address of the base URL are used; what is no HTTP URL is refused at
    once."""
    address = Address.parse("http://me:p%40ss@[::1]:81/models/")
    assert (address.host, address.port, address.is_tls) == ("::1", 81, False)
    head = address.head(HttpRequest("GET", "/metrics"))
    assert head.startswith(b"GET /models/metrics HTTP/1.1\r\nHost: [::1]:81\r\n")
    assert b"\r\nAuthorization: Basic bWU6cEBzcw==\r\n" in head
    assert (Address.parse("https://a").port, Address.parse("http://a").port) == (443, 80)
    for bad in ("127.0.0.1:8000", "ftp://a", "http://", ""):
        with pytest.raises(ValueError, match="expected http://HOST:PORT"):
            Client(bad)
