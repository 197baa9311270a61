"""The load generator: what it sends, and what it makes of every way in which a server can answer."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tableside.serving.cli.commands import bench, generator, servers
from tableside.serving.errors import ServingError

MODEL = {
    "name": "m",
    "tables": [{"name": "t", "rows": 1000}, {"name": "u", "rows": 3}],
    "features": [{"name": "a", "table": "t"}, {"name": "b", "table": "u"}, {"name": "c", "table": "t"}],
}
URL = "http://127.0.0.1:1"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
REQUESTS = [bench.request_bytes(f"{URL}/x", {}, b"body %d" % i) for i in range(3)]


def parts(request: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON header and the tensors of an infer request."""
    head, _, body = request.partition(b"\r\n\r\n")
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    assert int(lines["Content-Length"]) == len(body)
    length = int(lines["Inference-Header-Content-Length"])
    return json.loads(body[:length]), body[length:]


def tensors(request: bytes) -> dict[str, np.ndarray]:
    header, body = parts(request)
    found, at = {}, 0
    for entry in header["inputs"]:
        dtype = {"INT64": np.int64, "INT32": np.int32}[entry["datatype"]]
        size = entry["parameters"]["binary_data_size"]
        found[entry["name"]] = np.frombuffer(body[at : at + size], dtype).reshape(entry["shape"])
        at += size
    assert at == len(body)
    return found


# ---- requests ----


def test_lengths_differ_in_every_request() -> None:
    """Every bag has 0 to 2 * ids ids, `ids` on average, and no two requests have the same lengths."""
    requests = bench.make_requests(MODEL, URL, bench.Shape(16, 5), count=200)
    lengths = np.array([[tensors(r)[f"{f}.lengths"] for f in "abc"] for r in requests])
    assert lengths.shape == (200, 3, 16)
    assert (lengths.min(), lengths.max()) == (0, 10)
    deviation = np.sqrt(10.0 / lengths.size)  # of the mean; the variance of uniform 0..10 is 10
    assert abs(lengths.mean() - 5) < 5 * deviation
    assert len({one.tobytes() for one in lengths}) == 200


def test_same_lengths_have_one_header() -> None:
    requests = bench.make_requests(MODEL, URL, bench.Shape(4, 5, same=True), count=9)
    assert len({json.dumps(parts(r)[0]) for r in requests}) == 1
    assert {n: a.shape for n, a in tensors(requests[0]).items()} == {"a": (4, 5), "b": (4, 5), "c": (4, 5)}
    assert len(set(requests)) == 9


def test_ids_are_those_that_the_table_has() -> None:
    """Not its default row's number, and from its first id on; raw ids cannot be drawn, and a sentence says
    so."""
    tables = [{"name": "t", "rows": 4, "ids": "row", "first_id": 7, "id_count": 3}, {"name": "u", "rows": 3}]
    requests = bench.make_requests({**MODEL, "tables": tables}, URL, bench.Shape(16, 5), count=20)
    assert {int(i) for r in requests for i in tensors(r)["a.values"]} == {7, 8, 9}
    tables[1]["ids"] = "raw"
    with pytest.raises(
        ServingError, match="table 'u' of model 'm' has raw ids, which a server does not tell"
    ):
        bench.make_requests({**MODEL, "tables": tables}, URL, bench.Shape(16, 5))


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("zipf", [None, 1.2])
def test_both_forms_hold_the_same_ids(same: bool, zipf: float | None) -> None:
    """The compact form's values are the named ones feature by feature, and all ids are rows of their
    feature's table."""
    shape = bench.Shape(7, 3, same, zipf)
    named, compact = (bench.make_requests(MODEL, URL, shape, form, count=5) for form in bench.FORMS)
    for one, other in zip(map(tensors, named), map(tensors, compact), strict=True):
        assert set(other) == {"kjt.values", "kjt.lengths"}
        values, lengths = other["kjt.values"], other["kjt.lengths"]
        assert lengths.shape == (3, 7)
        ends = np.cumsum(lengths.sum(1))
        for i, (feature, ids) in enumerate(zip("abc", np.split(values, ends[:-1]), strict=True)):
            np.testing.assert_array_equal(one[feature if same else f"{feature}.values"].reshape(-1), ids)
            assert ids.size == 0 or (ids.min() >= 0 and ids.max() < (3 if feature == "b" else 1000))
            if not same:
                np.testing.assert_array_equal(one[f"{feature}.lengths"], lengths[i])


def test_prepared_requests_are_bounded() -> None:
    """By their number and by their bytes, and one request that is too large alone is refused."""
    shape = bench.Shape(8, 8)
    assert len(bench.make_requests(MODEL, URL, shape)) == bench.REQUESTS
    few = bench.make_requests(MODEL, URL, shape, max_bytes=20_000)
    assert 1 < len(few) < 20 and sum(map(len, few)) <= 20_000
    with pytest.raises(ServingError, match=r"1,536 bytes of ids; expected at most 1,000"):
        bench.make_requests(MODEL, URL, shape, max_bytes=1000)


# ---- answers ----


@contextmanager
def scripted(answer: Callable[[socket.socket, bytes], None], connections: int = 1) -> Iterator[str]:
    """A server that calls `answer` for each request of each connection; its url."""
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(65536):
                answer(sock, data)

    def accept(listener: socket.socket) -> None:
        for _ in range(connections):
            threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        accepting = threading.Thread(target=accept, args=(listener,))
        accepting.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        accepting.join()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


def test_requests_are_sent_in_turn_and_counted() -> None:
    """Over several connections; `check` sees the first body of each."""
    seen: list[bytes] = []
    checked: list[bytes] = []

    def answer(sock: socket.socket, data: bytes) -> None:
        seen.append(data)
        sock.sendall(OK)

    with scripted(answer, 2) as url:
        load = generator.run(url, REQUESTS, concurrency=2, seconds=0.2, check=checked.append)
    assert (load.failed, load.failure) == (0, "")
    assert set(seen) == set(REQUESTS)
    assert load.requests <= load.latencies_s.size == len(seen)
    assert (np.diff(load.latencies_s) >= 0).all()
    assert checked == [b"hello", b"hello"]


def test_a_run_goes_on_behind_the_one_before() -> None:
    seen: list[bytes] = []

    def answer(sock: socket.socket, data: bytes) -> None:
        seen.append(data)
        sock.sendall(OK)

    with scripted(answer) as url:
        generator.run(url, REQUESTS, concurrency=1, seconds=0.05, first=5)
    assert seen[:3] == [REQUESTS[2], REQUESTS[0], REQUESTS[1]]


def test_an_answer_may_come_in_any_pieces() -> None:
    """Byte by byte, so its head is split everywhere; the body is whole all the same."""
    bodies: list[bytes] = []

    def answer(sock: socket.socket, data: bytes) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in OK:
            sock.sendall(bytes([byte]))

    with scripted(answer) as url:
        load = generator.run(url, REQUESTS, concurrency=1, seconds=0.1, check=bodies.append)
    assert load.failed == 0 and load.latencies_s.size
    assert bodies == [b"hello"]


def test_a_request_larger_than_the_sockets_take() -> None:
    """It is sent in parts as the server reads it, whole and once."""
    request = bench.request_bytes(f"{URL}/x", {}, bytes(16 << 20))
    received = 0

    def answer(sock: socket.socket, data: bytes) -> None:
        nonlocal received
        received += len(data)
        if received % len(request) == 0:
            sock.sendall(OK)

    with scripted(answer) as url:
        load = generator.run(url, [request], concurrency=1, seconds=0.1)
    assert load.failed == 0
    assert received == load.latencies_s.size * len(request) > 0


@pytest.mark.parametrize("is_checked", [False, True])
def test_other_statuses_are_failures_and_the_first_is_told(is_checked: bool) -> None:
    """`check` waits for the first answer that is 200."""
    answers = iter(
        [
            b"HTTP/1.1 400 Bad\r\ncontent-length: 3\r\n\r\nwhy",
            b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n",
        ]
    )
    checked: list[bytes] = []
    with scripted(lambda sock, _: sock.sendall(next(answers, OK))) as url:
        load = generator.run(
            url, REQUESTS, concurrency=1, seconds=0.1, check=checked.append if is_checked else None
        )
    assert (load.failed, load.failure) == (2, "400: why")
    assert load.latencies_s.size > 2
    assert checked == [b"hello"] * is_checked


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"", "the server closed the connection"),
        (OK[:-1], "the server closed the connection"),
        (OK + b"!", "the answer has 1 bytes more than its Content-Length"),
    ],
)
def test_a_connection_that_breaks_is_a_failure(answer: bytes, failure: str) -> None:
    """The run ends when no connection is left."""

    def end(sock: socket.socket, data: bytes) -> None:
        sock.sendall(answer)
        sock.shutdown(socket.SHUT_WR)

    with scripted(end) as url:
        load = generator.run(url, REQUESTS, concurrency=1, seconds=30)
    assert (load.requests, load.failed, load.failure) == (0, 1, failure)
    assert load.seconds < 30


def test_answers_that_do_not_come_are_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "PATIENCE_S", 0.1)
    with scripted(lambda sock, _: None) as url:
        load = generator.run(url, REQUESTS, concurrency=1, seconds=0.05)
    assert (load.requests, load.failed) == (0, 1)
    assert load.failure == "no answer within 0.1 s after the end of the run"


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"SSH-2.0-x\r\n\r\n"]
)
def test_an_answer_that_cannot_be_followed(answer: bytes) -> None:
    with (
        scripted(lambda sock, _: sock.sendall(answer)) as url,
        pytest.raises(ServingError, match=r"expected HTTP/1.1 with a Cont"),
    ):
        generator.run(url, REQUESTS, concurrency=1, seconds=30)


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(
        ServingError, match=r"cannot connect to .* refused; is `tableside serve` running there"
    ):
        generator.run(url, REQUESTS, concurrency=1, seconds=1)


# ---- the open loop ----


def test_due_times() -> None:
    """As many as the rate says, within the time; even ones are equally far apart."""
    np.testing.assert_allclose(generator.due_times(10, 2, "even"), np.arange(20) / 10)
    random = generator.due_times(1000, 2, "poisson", seed=1)
    assert len(random) == 2000 and random == sorted(random)
    assert random[0] >= 0 and random[-1] < 2
    gaps = np.diff(random)
    assert 0.9 < gaps.std() / gaps.mean() < 1.1  # of an exponential distribution it is 1
    assert random != generator.due_times(1000, 2, "poisson", seed=2)


@pytest.mark.parametrize("arrivals", generator.ARRIVALS)
def test_every_request_that_is_due_is_sent(arrivals: generator.Arrivals) -> None:
    """Over one connection too, where some wait for it; those count from when they were due."""
    seen: list[bytes] = []

    def answer(sock: socket.socket, data: bytes) -> None:
        seen.append(data)
        sock.sendall(OK)

    with scripted(answer) as url:
        load = generator.run_at_rate(url, REQUESTS, rate=500, concurrency=1, seconds=0.2, arrivals=arrivals)
    assert load.failed == 0
    assert len(seen) == load.latencies_s.size == 100
    assert load.seconds == 0.2


def test_the_wait_for_a_connection_counts() -> None:
    """All requests are due before a slow server answers the first one, so each one's latency holds that
    answer's time."""
    slow = iter([0.2])

    def answer(sock: socket.socket, data: bytes) -> None:
        time.sleep(next(slow, 0))
        sock.sendall(OK)

    with scripted(answer) as url:
        load = generator.run_at_rate(url, REQUESTS, rate=1000, concurrency=1, seconds=0.02, arrivals="even")
    assert load.latencies_s.size == 20
    assert load.latencies_s[0] >= 0.2 - 0.02
    assert load.requests == 0


def test_a_connection_that_breaks_between_requests() -> None:
    """It is counted, and the other one takes what is due."""
    broken: list[socket.socket] = []

    def answer(sock: socket.socket, data: bytes) -> None:
        sock.sendall(OK)
        if not broken:
            sock.shutdown(socket.SHUT_WR)
            broken.append(sock)

    with scripted(answer, 2) as url:
        load = generator.run_at_rate(url, REQUESTS, rate=20, concurrency=2, seconds=0.5, arrivals="even")
    assert load.latencies_s.size == 10
    assert (load.failed, load.failure) == (1, "the server closed the connection")


def test_no_connection_is_left() -> None:
    """What is due has nowhere to go, and is counted."""

    def end(sock: socket.socket, data: bytes) -> None:
        sock.sendall(OK)
        sock.shutdown(socket.SHUT_WR)

    with scripted(end) as url:
        load = generator.run_at_rate(url, REQUESTS, rate=20, concurrency=1, seconds=1.0, arrivals="even")
    assert load.latencies_s.size == 1
    assert (load.failed, load.failure) == (20, "the server closed the connection")


def test_latencies_are_those_that_so_many_requests_stayed_within() -> None:
    load = generator.Load(1.0, 1001, 0, np.arange(1001) / 1000)
    told = servers._measured("named", load, 1, bench.Shape(1, 1))
    assert [told[name] for name in ("p50_ms", "p99_ms", "p99_9_ms")] == pytest.approx([500, 990, 999])


def test_measurements_are_merged() -> None:
    loads = [
        generator.Load(1.0, 10, 0, np.array([1.0, 3.0])),
        generator.Load(3.0, 20, 2, np.array([2.0]), "why"),
    ]
    load = generator.merged(loads)
    assert (load.seconds, load.requests, load.failed, load.failure) == (4.0, 30, 2, "why")
    assert load.latencies_s.tolist() == [1.0, 2.0, 3.0]
    assert load.requests_per_s == 7.5
