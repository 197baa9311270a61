"""The client's connections: reuse, broken ones, silence, refusals, TLS. The server is a script on a
socket."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from both_clients import Both
from scripted import MODELS, OK, Script, answer, received, scripted
from support import until
from tls import make_certificate, needs_openssl, server_context

from tableside.serving.client import ClientError, TimedOut


def test_a_connection_is_used_again(connect: Callable[..., Both]) -> None:
    def handle(script: Script, connection: socket.socket) -> None:
        while script.read(connection):
            connection.sendall(MODELS)

    with scripted(handle) as script:
        client = connect(script.url)
        for _ in range(5):
            assert client.ask("models") == []
        assert len(script.connections) == 1


def test_a_connection_that_the_server_ends_is_not(connect: Callable[..., Both]) -> None:
    """It said so, or it closed while the connection was idle: no call notices, even without retries."""

    def handle(script: Script, connection: socket.socket) -> None:
        says = len(script.connections) % 2 == 0
        script.read(connection)
        connection.sendall(answer({"models": []}, b"Connection: close\r\n" if says else b""))

    with scripted(handle) as script:
        client = connect(script.url, retries=0)
        for i in range(6):
            assert client.ask("models") == []
            until(lambda i=i: script.connections[i].fileno() == -1, what="the server to close the connection")
        assert len(script.connections) == 6


def test_a_connection_that_the_server_ends_is_closed_here(connect: Callable[..., Both]) -> None:
    """Though the server leaves it open until then."""
    ended = threading.Event()

    def handle(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        connection.sendall(answer({"models": []}, b"Connection: close\r\n"))
        with contextlib.suppress(ConnectionResetError):
            connection.recv(1)
        ended.set()

    with scripted(handle) as script:
        client = connect(script.url)
        for _ in range(2):
            assert client.ask("models") == []
        assert ended.wait(30)


@pytest.mark.parametrize("broken", [b"", OK, MODELS[:-1]], ids=["nothing", "half a head", "half a body"])
def test_a_request_is_sent_again_where_its_connection_broke(
    connect: Callable[..., Both], broken: bytes
) -> None:
    """As often as `retries` says, on a new connection each time; then the error says that the server
    cannot be reached."""

    def handle(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        connection.sendall(broken if len(script.heads) % 3 else MODELS)

    with scripted(handle) as script:
        assert connect(script.url, retries=2).ask("models") == []
        assert len(script.heads) == 3
        with pytest.raises(
            ClientError, match=r"cannot be reached \(Connection.*is `tableside serve` running there\?"
        ) as caught:
            connect(script.url, retries=1).ask("models")
        assert caught.value.status == 0
        assert len(script.heads) == 5


def test_silence_is_not_asked_again(connect: Callable[..., Both]) -> None:
    """A server that does not answer in time got one request, whatever `retries` says: it has enough to do."""

    def handle(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        received(connection)

    with scripted(handle) as script:
        with pytest.raises(TimedOut, match=r"did not answer within 0\.2 s \(timeout_s\)") as caught:
            connect(script.url, retries=5, timeout_s=0.2).ask("models")
        assert caught.value.status == 0
        assert len(script.heads) == 1


def test_what_comes_behind_a_response_does_not_change_it(connect: Callable[..., Both]) -> None:
    """Vectors lie in a response's body. A proxy that closes an idle connection says so first."""
    behind = b"HTTP/1.0 408 Request Time-out\r\nConnection: close\r\n\r\n" + b"x" * 100_000

    def handle(script: Script, connection: socket.socket) -> None:
        while script.read(connection):
            connection.sendall(whole)
            sent.wait(300)
            with contextlib.suppress(OSError):
                connection.sendall(behind)

    vectors = np.ones((1000, 8), "<f4")
    head = orjson.dumps(
        {
            "model_name": "ads",
            "model_version": "1",
            "outputs": [
                {
                    "name": "user",
                    "datatype": "FP32",
                    "shape": [1000, 8],
                    "parameters": {"binary_data_size": vectors.nbytes},
                }
            ],
        }
    )
    sizes = len(head), len(head) + vectors.nbytes
    lines = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % sizes
    whole, sent = OK + lines + head + vectors.tobytes(), threading.Event()
    with scripted(handle) as script:
        client = connect(script.url)
        got = client.ask("lookup", "ads", {"user": [[1]] * 1000})["user"]
        sent.set()
        for _ in range(20):
            client.loop.run_until_complete(asyncio.sleep(0.01))
        np.testing.assert_array_equal(got, vectors)


@pytest.mark.drawn(1)
def test_a_slow_response_is_waited_for(connect: Callable[..., Both]) -> None:
    """timeout_s is for each wait, not for the whole of a response."""

    def handle(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        for at in range(0, len(MODELS), 4):
            connection.sendall(MODELS[at : at + 4])
            time.sleep(0.05)

    assert len(MODELS) / 4 * 0.05 > 0.6
    with scripted(handle) as script:
        assert connect(script.url, retries=0, timeout_s=0.3).ask("models") == []


def test_a_refusal_before_the_request_was_read(connect: Callable[..., Both]) -> None:
    """The server answers and closes while the body is still being sent, which resets the connection: its
    reason arrives."""
    error = orjson.dumps({"error": "the body is too large"})

    def handle(script: Script, connection: socket.socket) -> None:
        received(connection)
        connection.sendall(
            b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(error) + error
        )

    with scripted(handle) as script, pytest.raises(ClientError, match="413: the body is too large"):
        connect(script.url, retries=0).ask("lookup", "m", {"a": np.zeros((1000, 1000), np.int64)})


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"", "503: Service Unavailable"), (b"busy", "503: busy"), (b'{"detail": 1}', '503: {"detail": 1}')],
)
def test_refusals_in_other_shapes(connect: Callable[..., Both], body: bytes, message: str) -> None:
    """A proxy's error has no {"error": ...}: its text is told, or else what its status means."""

    def handle(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        connection.sendall(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )

    with scripted(handle) as script, pytest.raises(ClientError) as caught:
        connect(script.url).ask("models")
    assert str(caught.value) == message


def test_an_answer_that_is_no_infer_response(connect: Callable[..., Both]) -> None:
    def handle(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        connection.sendall(MODELS)

    with scripted(handle) as script, pytest.raises(ClientError, match="describes no binary tensors"):
        connect(script.url).ask("lookup", "m", {"a": [[1]]})


def test_no_proxy_of_the_environment_is_used(
    connect: Callable[..., Both], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    def handle(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        connection.sendall(MODELS)

    with scripted(handle) as script:
        assert connect(script.url).ask("models") == []


@needs_openssl
@pytest.mark.drawn(1)
def test_https(connect: Callable[..., Both], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bodies larger than a TLS record arrive, connections are used again, and a certificate that nobody
    signed is refused."""
    certificate = make_certificate(tmp_path)
    context = server_context(certificate)
    large = answer({"models": ["x" * 300_000]})

    def handle(script: Script, connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secret:
            while path := script.read(secret):
                secret.sendall(
                    large if path == b"/v1/models" else answer({"error": "no"}).replace(b"200 OK", b"400 No")
                )

    with scripted(handle) as script:
        url = script.url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(ClientError, match="CERTIFICATE_VERIFY_FAILED"):
            connect(url, retries=0).ask("models")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        client = connect(url, retries=0)
        before = len(script.connections)
        for _ in range(3):
            assert client.ask("models") == ["x" * 300_000]
            with pytest.raises(ClientError, match="400: no"):
                client.ask("lookup", "m", {"a": np.zeros((100, 1000), np.int64)})
        assert len(script.connections) - before == 1
        client.ask("close")  # before the script waits for its threads


def test_a_closed_client_says_so(connect: Callable[..., Both]) -> None:
    client = connect("http://127.0.0.1:9")
    client.ask("close")
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.ask("models")
