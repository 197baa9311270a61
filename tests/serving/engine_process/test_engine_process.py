"""The engine process and its doors: what either survives of the other's end, versions, memory, and
messages that are none."""

import asyncio
import os
import random
import re
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tables
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import TABLES, publish_demo
from support import until

from tableside.loader.versions.versions import Model
from tableside.quant.device.addresses import address_of
from tableside.serving.client import Client, ClientError
from tableside.serving.engine_process import messages
from tableside.serving.engine_process.doors import AnswerMemory
from tableside.serving.engine_process.memory import ALIGNMENT, Blocks, SharedMemory
from tableside.serving.errors import ApiError, ServingError

pytestmark = pytest.mark.for_gpu

Start = Callable[..., Any]
Request = dict[str, list[list[int]]]


def on_gpu(*options: object) -> tuple[object, ...]:
    return ("--devices", tables.serve_device(), "--gpu-from-ids", 0, *options)


class Load:
    """Clients that ask for rows and hold every answer against the table, without asking twice."""

    def __init__(self, url: str, root: Path, clients: int = 3) -> None:
        self.answered = 0
        self.wrong: list[Exception] = []
        self._stop = threading.Event()
        self._url, self._rows = url, Model(root, "demo").attach()
        self._threads = [
            threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(clients)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        self.go_on()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def go_on(self) -> None:
        """Waits for more answers."""
        count = self.answered
        until(lambda: self.answered > count + 6 or bool(self.wrong), what="answers")

    def _ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        with Client(self._url, retries=0, timeout_s=300) as client:
            while not self._stop.is_set():
                ids = rng.integers(0, 50, (2, 3))
                try:
                    found = client.lookup("demo", {"text": ids.tolist()})["text"]
                    np.testing.assert_array_equal(
                        found, TABLES["word"].astype(np.float16).astype(np.float32)[ids.reshape(-1)]
                    )
                    self.answered += 1
                except (ClientError, AssertionError, httpx.HTTPError) as error:
                    self.wrong.append(error)


def counted(server: Any, what: str) -> float:
    """What /metrics says of the lookups of table `user` through the cache."""
    (found,) = re.findall(
        rf'tableside_cache_{what}_total{{table="demo/user"}} (\S+)', server.get("/metrics").text
    ) or ["0"]
    return float(found)


@pytest.mark.thorough
def test_an_engine_that_is_killed_is_replaced_while_doors_keep_connections(start: Start, root: Path) -> None:
    """No request fails: what the engine had not answered is asked of its successor."""
    server = start(*on_gpu("--workers", 2))
    with Load(server.url, root) as load:
        for _ in range(2):
            (engine,), doors = server.engines(), server.workers()
            os.kill(engine, signal.SIGKILL)
            until(lambda gone=engine: server.engines() not in ([], [gone]), what="a successor")
            load.go_on()
            assert server.workers() == doors
    assert not load.wrong


@pytest.mark.thorough
def test_a_door_that_dies_leaves_the_cache_as_it_was(start: Start, root: Path) -> None:
    """The engine and what its cache holds stay; the next door's requests hit what the first one's brought."""
    server = start(*on_gpu("--placement", "cached", "--hbm-budget", "1MiB"))
    ids = {"user": [list(range(100, 160))]}
    with Client(server.url) as client:
        for _ in range(3):
            before = client.lookup("demo", ids)
    until(
        lambda: counted(server, "ids") >= 180 and counted(server, "fetched_rows") >= 60,
        what="counts of the cache",
    )
    fetched, engines, (door,) = counted(server, "fetched_rows"), server.engines(), server.workers()
    os.kill(door, signal.SIGKILL)
    until(lambda: server.workers() not in ([], [door]), what="another door")
    with Client(server.url, retries=20) as client:
        np.testing.assert_array_equal(client.lookup("demo", ids)["user"], before["user"])
    until(lambda: counted(server, "ids") >= 240, what="counts of the cache")
    assert server.engines() == engines and counted(server, "fetched_rows") == fetched
    maps = Path(f"/proc/{engines[0]}/maps")
    until(
        lambda: maps.read_text().count("memfd:tableside-requests") == 1,
        what="the memory of the door that died to go",
    )


@pytest.mark.thorough
def test_an_engine_that_hangs_is_replaced(start: Start) -> None:
    """Its successor answers what it had been asked."""
    server = start(*on_gpu())
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)
    with Client(server.url, retries=0, timeout_s=300) as client:
        assert client.lookup("demo", {"user": [[1]]})["user"].shape == (1, 64)
    assert server.engines() != [engine]


@pytest.mark.thorough
def test_while_there_is_no_engine_the_server_is_not_ready(start: Start) -> None:
    """And small requests, which the door reads itself, are answered."""
    server = start("--devices", tables.serve_device(), "--gpu-from-ids", 100)
    (engine,) = server.engines()
    os.kill(engine, signal.SIGKILL)
    until(lambda: server.get("/v2/health/ready").status_code == 503, what="not ready")
    with Client(server.url, retries=0) as client:
        assert client.lookup("demo", {"user": [[1]]})["user"].shape == (1, 64)
    until(lambda: server.get("/v2/health/ready").status_code == 200, what="ready again")


@pytest.mark.thorough
def test_versions_that_requests_name(start: Start, root: Path, tmp_path: Path) -> None:
    """The engine attaches them; one that is not published is refused; after the engine was replaced they
    are there again."""
    server = start(*on_gpu())
    publish_demo(root, tmp_path, {name: -values for name, values in TABLES.items()})
    until(lambda: server.get("/v1/models").json()["models"][0]["version"] == 2, what="version 2")

    def ask(version: int) -> httpx.Response:
        inputs = [{"name": "text.values", "datatype": "INT64", "shape": [1], "data": [7]}]
        return httpx.post(
            f"{server.url}/v2/models/demo/versions/{version}/infer", json={"inputs": inputs}, timeout=300
        )

    wanted = TABLES["word"].astype(np.float16)[7]
    for _ in range(2):
        for version, sign in ((1, 1), (2, -1)):
            found = np.array(ask(version).json()["outputs"][0]["data"], np.float16)
            np.testing.assert_array_equal(found, sign * wanted)
        refused = ask(9)
        assert refused.status_code == 404 and "version 9 of model 'demo' is not published" in refused.text
        (engine,) = server.engines()
        os.kill(engine, signal.SIGKILL)
        until(lambda gone=engine: server.engines() not in ([], [gone]), what="a successor")


def test_answers_that_nobody_reads_make_the_next_ones_wait_and_then_be_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room comes back when the last array over an answer goes."""
    monkeypatch.setattr("tableside.serving.engine_process.doors._WAIT_S", 0.05)
    answers = AnswerMemory(1 << 20)
    held = [answers.take(300_000) for _ in range(3)]
    part = held[1][5:10]
    with pytest.raises(ApiError, match=r"the engine has 1,048,576;"):
        answers.take(300_000)
    held.pop(1)
    with pytest.raises(ApiError):
        answers.take(300_000)
    at = address_of(part.data) - 5
    del part
    assert address_of(answers.take(300_000).data) == at


@pytest.mark.thorough
@given(st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_blocks_do_not_overlap_and_come_back_whole(rng: random.Random) -> None:
    size = 64 * ALIGNMENT
    blocks = Blocks(size)
    held: dict[int, int] = {}
    for _ in range(200):
        if held and rng.random() < 0.45:
            at = rng.choice(list(held))
            blocks.give_back(at)
            del held[at]
            continue
        asked = rng.randrange(0, 10 * ALIGNMENT)
        if (at := blocks.take(asked)) is not None:
            taken = max(ALIGNMENT, -(-asked // ALIGNMENT) * ALIGNMENT)
            assert at % ALIGNMENT == 0 and at + taken <= size
            assert all(at + taken <= other or other + length <= at for other, length in held.items())
            held[at] = taken
        assert blocks.held == sum(held.values())
    for at in held:
        blocks.give_back(at)
    assert blocks.take(size) == 0


def test_memory_that_could_be_truncated_is_not_taken() -> None:
    """Reading it would end the process with SIGBUS."""
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ServingError, match="is not sealed"):
        SharedMemory(fd)
    memory = SharedMemory.create("tight", 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)


@given(st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 3, st.binary(max_size=50))))
@settings(deadline=None)
def test_answers_are_read_as_they_were_written(fields: list[tuple[int, int, int, bytes]]) -> None:
    sent = [messages.AnswerMessage(*f) for f in fields]
    records = [messages.ANSWER.pack(*answer[:3], len(answer.told)) + answer.told for answer in sent]
    assert messages.read_answers(bytes([messages.MessageKind.ANSWERS]) + b"".join(records)) == sent


def test_what_another_thread_sends_at_once_arrives() -> None:
    """Also what the other end had no room for, in whatever order; and nothing once the connection is
    closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.settimeout(20)
    records = [number.to_bytes(8, "big") * 2000 for number in range(200)]

    async def run() -> list[bytes]:
        connection = messages.Connection(ours, lambda *_: None, lambda: None)
        await asyncio.to_thread(
            connection.send_now, messages.MessageKind.ANSWERS, records
        )  # far more than a socket holds
        received: list[bytes] = []
        while sum(map(len, received)) < sum(map(len, records)):
            received.append((await asyncio.to_thread(theirs.recv, 1 << 17))[1:])
        connection.close()
        connection.send_now(messages.MessageKind.ANSWERS, records)
        return received

    found = b"".join(asyncio.run(run()))
    assert sorted(found[at : at + 16_000] for at in range(0, len(found), 16_000)) == records
    assert theirs.recv(1) == b""
    theirs.close()


@pytest.fixture
def address(start: Start) -> Iterator[tuple[Any, str]]:
    """A server, and the address of its engine."""
    server = start(*on_gpu())
    lines = Path("/proc/net/unix").read_text().splitlines()
    (engine,) = server.engines()
    inodes = {
        os.readlink(f"/proc/{engine}/fd/{fd}")[8:-1]
        for fd in os.listdir(f"/proc/{engine}/fd")
        if _is_socket(engine, fd)
    }
    listening = {
        line.split()[-1]
        for line in lines
        if line.split()[6] in inodes and line.split()[3:5] == ["00010000", "0005"]
    }
    (found,) = (
        name for name in listening if not name.startswith("@cuda")
    )  # which the driver has, for itself
    yield server, ("\0" + found[1:]).encode().hex()


def _is_socket(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    except OSError:
        return False


@pytest.mark.thorough
def test_nonsense_ends_a_connection_and_nothing_else(address: tuple[Any, str]) -> None:
    """Messages that are none, requests outside of the memory, and a door that leaves in the midst of its
    requests."""
    server, at = address
    engines = server.engines()
    memory = SharedMemory.create("nonsense", 1 << 20)
    hello = bytes([messages.MessageKind.CONTROL]) + b'{"hello": ["demo"]}'
    far = bytes([messages.MessageKind.ASKS]) + messages.ASK.pack(1, 1 << 40, 8, 64, 0, 0, 0)
    memory.bytes[8:48] = np.frombuffer(
        struct.pack("<5q", 99, 1, 0, 0, 0), np.uint8
    )  # of a model that there is not
    nothing = bytes([messages.MessageKind.ASKS]) + messages.ASK.pack(1, 0, 8, 40, 0, 0, 0)
    for said in (
        [b"\x09"],
        [b"\x04{"],
        [b"\x04[]"],
        [hello, far],
        [hello, nothing, b"\x01abc"],
        [hello, b"\x01abc"],
        [hello, hello],
        [b""],
    ):
        connection = messages.connect(at)
        connection.setblocking(True)
        connection.settimeout(20)
        for message in said:
            if message == hello:
                socket.send_fds(connection, [message], [memory.fd])
            elif message:
                connection.send(message)
        if said == [b""]:
            connection.close()
            continue
        while received := connection.recv(1 << 17):
            if received[0] == messages.MessageKind.ANSWERS:
                (answer,) = messages.read_answers(received)
                assert (
                    said[1] == nothing and b"the model of this request is not served any more" in answer.told
                )
        connection.close()
    with Client(server.url, retries=0) as client:
        assert client.lookup("demo", {"user": [[1]]})["user"].shape == (1, 64)
    assert server.engines() == engines
