"""Requests to an owner's hosts, which are scripts: what is learned of the one whose answer does not count."""

import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from scripted import Script, answer, received, scripted

from tableside.loader.segment.remote import HostsState
from tableside.serving.cluster.agreed import At, OwnedModel, states_of
from tableside.serving.cluster.calls import OwnerCall, OwnerHost, OwnerHosts, Replicas, wait_for
from tableside.serving.cluster.protocol import RowsLayout, TableIds, seal

STATE, ASKED = HostsState(1, 2), TableIds(np.array([0]), np.array([1]), np.array([5]))
SIZE = RowsLayout.of(ASKED.counts, np.array([8])).size
Handle = Callable[[Script, socket.socket], None]


def rows() -> bytes:
    body = np.ones(SIZE, np.uint8)
    seal(body, STATE)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % body.size + body.tobytes()


def silent(script: Script, connection: socket.socket) -> None:
    script.read(connection)
    received(connection)  # until it is closed


def ready(script: Script, connection: socket.socket) -> None:
    while script.read(connection):
        connection.sendall(rows())


def lacking(script: Script, connection: socket.socket) -> None:
    while script.read(connection):
        connection.sendall(answer({"error": "not here"}).replace(b"200 OK", b"404 No", 1))


class Told:
    """What is noted of a host."""

    def __init__(self, host: OwnerHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = list[tuple[int, int]]()
        monkeypatch.setattr(host, "_answered", lambda began, came, late: self.rows.append((came, late)))


def ask(first: Handle, second: Handle, monkeypatch: pytest.MonkeyPatch, usual_s: float = 0.0) -> list[Told]:
    """Asks two hosts, one after the other. usual_s: of the first one, after which the second is asked."""
    with scripted(first) as one, scripted(second) as other:
        hosts = OwnerHosts(None, 300.0)
        names = tuple(script.url.removeprefix("http://") for script in (one, other))
        told = [Told(hosts.host(name), monkeypatch) for name in names]
        hosts.host(names[0]).usual_s = usual_s
        call = OwnerCall(hosts, Replicas("ads", STATE, names), ASKED, SIZE, deadline(300.0))
        wait_for([call])
        assert call.body is not None
        hosts.close()
    return told


def deadline(seconds: float) -> float:
    return time.monotonic() + seconds


def test_a_host_that_was_asked_second_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be as fast as the one that answered: one that never gets another request would seem to hang."""
    is_asked = threading.Event()

    def late(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        is_asked.wait(300)
        connection.sendall(rows())

    def second(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        is_asked.set()
        received(connection)

    first, other = ask(late, second, monkeypatch)
    assert first.rows == [(1, 0)] and other.rows == []


def test_a_host_that_was_asked_first_and_lost_is(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = ask(silent, ready, monkeypatch)
    assert first.rows == [(0, 1)] and other.rows == [(1, 0)]


def test_a_host_that_lacks_a_state_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = ask(lacking, ready, monkeypatch, usual_s=300.0)
    assert first.rows == [(1, 0)] and other.rows == [(1, 0)]


def test_a_host_behind_a_silent_one_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are asked at once, and each has all of the time."""

    def says(script: Script, connection: socket.socket) -> None:
        while script.read(connection):
            connection.sendall(answer([str(STATE)]))

    with scripted(silent) as one, scripted(says) as other, scripted(silent) as last:
        hosts = OwnerHosts(None, 300.0)
        names = tuple(script.url.removeprefix("http://") for script in (one, other, last))
        told = [Told(hosts.host(name), monkeypatch) for name in names]
        found = states_of(hosts, [OwnedModel("ads", 1, names)])
        assert found == {At("ads", names[1]): {str(STATE)}}
        assert [one.rows for one in told] == [[(0, 1)], [(1, 0)], [(0, 1)]]
        hosts.close()


def test_an_answer_is_read_to_its_place() -> None:
    with scripted(ready) as one:
        hosts, place = OwnerHosts(None, 300.0), np.zeros(SIZE, np.uint8)
        owner = Replicas("ads", STATE, (one.url.removeprefix("http://"),))
        call = OwnerCall(hosts, owner, ASKED, SIZE, deadline(300.0), place.data)
        wait_for([call])
        assert call.is_in_place and place.tobytes() == rows().partition(b"\r\n\r\n")[2]
        hosts.close()


def test_answers_of_two_hosts_do_not_mix() -> None:
    """The second one's comes while the first one's is read to its place."""

    def half(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        head, line, body = rows().partition(b"\r\n\r\n")
        connection.sendall(head + line + bytes(len(body) // 2))
        received(connection)  # until it is closed

    with scripted(half) as one, scripted(ready) as other:
        hosts, place = OwnerHosts(None, 300.0), np.full(SIZE, 7, np.uint8)
        names = tuple(script.url.removeprefix("http://") for script in (one, other))
        call = OwnerCall(hosts, Replicas("ads", STATE, names), ASKED, SIZE, deadline(300.0), place.data)
        while place[0] == 7:  # until the first one's half is there
            call.read(call.tries[0])
        call.until = 0.0
        wait_for([call])
        assert call.body is not None and not call.is_in_place
        assert call.body.tobytes() == rows().partition(b"\r\n\r\n")[2] and not place[: SIZE // 2].any()
        hosts.close()


def test_hosts_that_lack_a_state_are_asked_last() -> None:
    with scripted(lacking) as one, scripted(ready) as other:
        hosts = OwnerHosts(None, 300.0)
        names = tuple(script.url.removeprefix("http://") for script in (one, other))
        hosts.host(names[0]).usual_s = 300.0
        for state in (STATE, STATE, STATE):
            call = OwnerCall(hosts, Replicas("ads", state, names), ASKED, SIZE, deadline(300.0))
            wait_for([call])
        assert len(one.heads) == 1 and len(other.heads) == 3
        assert hosts.host(names[0]).lacks == STATE
        hosts.close()
