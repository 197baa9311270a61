"""What a caller gets where no answer comes, by its kind; and how long a call may take."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scripted import MODELS, Script, answer, received, scripted

import tableside
from tableside.serving.client import (
    BadRequest,
    Client,
    ClientError,
    Denied,
    NotFound,
    Overloaded,
    TimedOut,
    Unreachable,
)


def refusal(status: int, more: bytes = b"") -> bytes:
    return answer({"error": "no"}, more).replace(b"200 OK", b"%d No" % status, 1)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, Denied),
        (403, Denied),
        (404, NotFound),
        (413, BadRequest),
        (429, Overloaded),
        (503, Overloaded),
        (500, ClientError),
        (502, ClientError),
    ],
)
def test_a_refusal_has_its_kind(connect: Callable[..., Any], status: int, kind: type[ClientError]) -> None:
    def handle(script: Script, connection: socket.socket) -> None:
        while script.read(connection):
            connection.sendall(refusal(status, b"Retry-After: 7\r\n"))

    with scripted(handle) as script, pytest.raises(ClientError) as caught:
        connect(script.url).ask("models")
    assert type(caught.value) is kind and str(caught.value) == f"{status}: no"
    assert getattr(caught.value, "retry_after", 7) == 7 and len(script.heads) == 1
    assert getattr(tableside, kind.__name__) is kind


def test_nobody_there(connect: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(Unreachable, match=f"{url} cannot be reached .*is `tableside serve` running"):
        connect(url).ask("models")
    assert connect(url).ask("is_ready") is False


@pytest.mark.drawn(2)
@pytest.mark.parametrize("when", [b"0", b"1", b""])
def test_a_busy_server_is_asked_again_in_time(connect: Callable[..., Any], when: bytes) -> None:
    """When it says, as often as `retries` says, and only where the call has an end: else the caller hears of
    it at once."""

    def handle(script: Script, connection: socket.socket) -> None:
        while script.read(connection):
            busy = refusal(503, b"Retry-After: %b\r\n" % when if when else b"")
            connection.sendall(busy if len(script.heads) % 3 else MODELS)

    with scripted(handle) as script:
        if when:
            began = time.monotonic()
            assert connect(script.url, retries=2, deadline_s=300.0).ask("models") == []
            assert len(script.heads) == 3 and time.monotonic() - began >= 2 * int(when)
        refused = [{"retries": 2}, {"retries": 0, "deadline_s": 300.0}]
        refused += [{"retries": 9, "deadline_s": 0.9}] if when == b"1" else []
        refused += [] if when else [{"retries": 2, "deadline_s": 300.0}]
        for options in refused:
            asked = len(script.heads)
            while (asked + 1) % 3 == 0:  # the next one would be answered
                connect(script.url).ask("is_ready")
                asked += 1
            with pytest.raises(Overloaded) as caught:
                connect(script.url, **options).ask("models")
            assert caught.value.retry_after == (int(when) if when else None)
            assert len(script.heads) == asked + 1


@pytest.mark.parametrize("status", [200, 301, 400, 404, 408, 500])
def test_what_is_no_busy_server_is_not_asked_again(connect: Callable[..., Any], status: int) -> None:
    """Whatever it says of a later time."""

    def handle(script: Script, connection: socket.socket) -> None:
        while script.read(connection):
            connection.sendall(refusal(status, b"Retry-After: 0\r\n"))

    with scripted(handle) as script:
        client = connect(script.url, retries=5, deadline_s=300.0)
        with contextlib.suppress(ClientError, KeyError):
            client.ask("models")
        assert len(script.heads) == 1


def test_whether_a_server_is_ready_is_said_at_once(connect: Callable[..., Any]) -> None:
    def handle(script: Script, connection: socket.socket) -> None:
        while script.read(connection):
            connection.sendall(refusal(503, b"Retry-After: 0\r\n"))

    with scripted(handle) as script:
        assert connect(script.url, retries=5, deadline_s=300.0).ask("is_ready") is False
        assert len(script.heads) == 1


def test_sending_is_bounded_too(connect: Callable[..., Any]) -> None:
    """A server that takes a request slowly, and then says nothing."""

    def handle(script: Script, connection: socket.socket) -> None:
        for _ in range(8):
            time.sleep(0.1)
            received(connection)
        is_over.wait(300)

    is_over, ids = threading.Event(), np.zeros((1 << 18, 8), np.int64)
    with scripted(handle) as script:
        client = connect(script.url, timeout_s=200.0, deadline_s=0.5, retries=5)
        with pytest.raises(TimedOut, match="deadline_s"):
            client.ask("lookup", "ads", {"user": ids, "item": ids})
        is_over.set()


def test_a_call_ends_with_its_deadline(connect: Callable[..., Any]) -> None:
    """Though each wait is a short one, and a connection that broke would be made anew."""

    def handle(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        for _ in range(10**6):
            connection.sendall(b"x")
            time.sleep(0.01)

    with scripted(handle) as script:
        client = connect(script.url, timeout_s=200.0, deadline_s=0.5, retries=5)
        with pytest.raises(TimedOut, match=r"did not answer within the 0\.5 s of the call \(deadline_s\)"):
            client.ask("models")
        assert len(script.heads) == 1


def test_other_options_over_the_same_connections(connect: Callable[..., Any]) -> None:
    def handle(script: Script, connection: socket.socket) -> None:
        while True:
            if script.read(connection) == b"/v1/models":
                connection.sendall(MODELS)
            else:
                received(connection)

    with scripted(handle) as script:
        first = connect(script.url, headers={"X-Team": "ads", "X-Key": "a"})
        other = first.with_options(headers={"x-key": "b", "X-More": "c"})
        assert first.ask("models") == other.ask("models") == first.ask("models") == []
        assert len(script.connections) == 1
        assert b"X-Key: a" in script.heads[0] and b"X-Key: a" in script.heads[2]
        assert b"x-key: b" in script.heads[1] and b"X-Key: a" not in script.heads[1]
        assert all(b"X-Team: ads" in head for head in script.heads) and b"X-More: c" in script.heads[1]
        with pytest.raises(TimedOut, match=r"within 0\.2 s \(timeout_s\)"):
            first.with_options(timeout_s=0.2).ask("metrics")
        with pytest.raises(ValueError, match="header"):
            first.with_options(headers={"Host": "x"})
        assert first.ask("models") == []


def test_options_keep_what_is_not_given() -> None:
    with Client("http://127.0.0.1:9", timeout_s=3.0, retries=4, deadline_s=5.0) as client:
        assert client.with_options(retries=7)._options == client._options._replace(retries=7)
        with pytest.raises(ValueError, match="retries is '3'"):
            client.with_options(retries="3")  # type: ignore[arg-type]
        assert client.with_options(timeout_s=1.0, deadline_s=2.0)._options[1:] == (1.0, 4, 2.0)
        assert isinstance(client.with_options(), Client)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e9, "1"])
@pytest.mark.parametrize("name", ["timeout_s", "deadline_s"])
def test_times_that_are_none(name: str, seconds: Any) -> None:
    options: dict[str, Any] = {name: seconds}
    with pytest.raises(ValueError, match=f"{name} is .*; expected seconds, above 0"):
        Client("http://127.0.0.1:9", **options)
    with Client("http://127.0.0.1:9") as client, pytest.raises(ValueError, match=name):
        client.with_options(**options)
