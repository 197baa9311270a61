"""Triton's system shared memory, by clients that mean harm: what is wrong is refused, and no worker ends."""

import json
import os
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from servers import Server
from shared_objects import BYTES, Shared, body, refused, user
from support import until
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

REGISTER = "/v2/systemsharedmemory/region/r/register"


# ---- what is refused ----


def infer_error(server: Server, inputs: Any, outputs: Any = (), content: bytes | None = None) -> str:
    """The error of an infer request that is refused with 400, once by the slow path and once more."""
    request = {"inputs": inputs, **({"outputs": outputs} if outputs else {})}
    for _ in range(2):
        reply = httpx.post(
            f"{server.url}/v2/models/demo/infer", content=content or json.dumps(request), timeout=300
        )
        assert reply.status_code == 400, reply.text
    return str(reply.json()["error"])


R, N, O = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"  # noqa: E741


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({R: "nope", N: 16}, "shared memory region 'nope' is not registered"),
        ({R: 7, N: 16}, "input 'user': shared_memory_region is 7; expected the name of a registered region"),
        ({N: 16}, "shared_memory_region is None"),
        ({O: 16}, "shared_memory_region is None"),
        ({R: "r"}, "input 'user': shared_memory_byte_size is None; expected a number of bytes"),
        ({R: "r", N: "16"}, "shared_memory_byte_size is '16'"),
        ({R: "r", N: True}, "shared_memory_byte_size is True"),
        ({R: "r", N: 16.0}, "shared_memory_byte_size is 16.0"),
        ({R: "r", N: -16}, "shared_memory_byte_size is -16"),
        ({R: "r", N: 8}, "shared_memory_byte_size is 8, but INT64 [1, 2] has 16 bytes"),
        ({R: "r", N: 24}, "shared_memory_byte_size is 24, but INT64 [1, 2] has 16 bytes"),
        ({R: "r", N: 16, O: -8}, "shared_memory_offset is -8"),
        ({R: "r", N: 16, O: None}, "shared_memory_offset is None"),
        (
            {R: "r", N: 16, O: BYTES - 15},
            f"offset {BYTES - 15} and 16 bytes are outside shared memory region 'r', which has 65,536",
        ),
        ({R: "r", N: 16, O: 2**63 - 1}, "are outside shared memory region 'r'"),
        ({R: "r", N: 16, O: 2**64 - 16}, "are outside shared memory region 'r'"),
        (
            {R: "r", N: 16, "binary_data_size": 16},
            "has a shared_memory_region and data or a binary_data_size",
        ),
    ],
    ids=str,
)
@pytest.mark.drawn(4)
def test_inputs_are_checked(
    server: Server, share: Callable[..., Shared], parameters: dict[str, Any], message: str
) -> None:
    share()
    assert message in infer_error(server, user(**parameters))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{R: "r", N: 255}], "output 'user': shared_memory_byte_size is 255, but FP32 [1, 64] has 256 bytes"),
        ([{R: "r", N: 256, O: BYTES - 255}], "are outside shared memory region 'r'"),
        ([{R: "r", N: BYTES + 1}], "are outside shared memory region 'r'"),
        ([{R: "r", N: 256, "binary_data": True}], "output 'user' has a shared_memory_region and binary_data"),
        ([{R: "nope", N: 256}], "shared memory region 'nope' is not registered"),
        ([{R: "r"}], "output 'user': shared_memory_byte_size is None"),
        ([{R: "r", N: 256}, {R: "r", N: 256, O: 255}], "two of them have bytes of shared memory in common"),
        ([{R: "r", N: 256}, {R: "s", N: 256, O: 8}], "two of them have bytes of shared memory in common"),
    ],
    ids=str,
)
@pytest.mark.drawn(4)
def test_outputs_are_checked(
    server: Server, share: Callable[..., Shared], outputs: list[dict[str, Any]], message: str
) -> None:
    """Two outputs share no byte, also where they name it by two regions of one object."""
    one = share()
    one.client.register_system_shared_memory("s", one.key, BYTES)
    one.put("user", np.zeros((1, 2), np.int64))
    inputs = [*user(**{R: "r", N: 16}), {**user(**{R: "r", N: 16})[0], "name": "text.values", "shape": [2]}]
    asked = [
        {"name": name, "parameters": given} for name, given in zip(("user", "text"), outputs, strict=False)
    ]
    if len(outputs) == 2:
        asked[1]["parameters"]["shared_memory_byte_size"] = 256
    assert message in infer_error(server, inputs, asked)


def test_what_a_template_refuses(client: Any, share: Callable[..., Shared]) -> None:
    """The same faults where the header was learnt: the slow path says what is wrong, and right requests go
    on being answered."""
    one, ids = share(), np.arange(10).reshape(1, 10)

    def infer(offset: int = 0, size: int = 256, at: int = 1024, count: int = 10) -> Any:
        found = one.put("user", ids)
        found.set_shared_memory("r", 8 * count, offset + 8)
        return client.infer("demo", [found], outputs=[one.ask("user", size, at)])

    shm.set_shared_memory_region(one.handle, [ids], 8)
    for _ in range(3):
        for wrong in ({"offset": BYTES}, {"size": 255}, {"at": BYTES - 255}, {"size": BYTES}, {"count": 9}):
            with refused("outside shared memory region 'r'|has 256 bytes|has 80 bytes"):
                infer(**wrong)
        infer()
    shm.set_shared_memory_region(one.handle, [np.full(16, 1000)])
    with refused("feature 'user': id 1000 at position 0 is outside the table's rows"):
        client.infer("demo", [one.put("user", ids + 1000)], outputs=[one.ask("user", 256, 1024)])


def test_inputs_in_regions_count_as_a_body(server: Server, share: Callable[..., Shared]) -> None:
    """They take as much of the worker's memory."""
    one = share(size=2 * BYTES)
    inputs = [{**user(**{R: "r", N: BYTES + 8})[0], "shape": [1, BYTES // 8 + 1]}]
    reply = httpx.post(f"{server.url}/v2/models/demo/infer", json={"inputs": inputs})
    assert reply.status_code == 413
    assert "the body has more than 65,536 bytes" in reply.text
    assert one.client.is_server_ready()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is a JSON list; expected an object"),
        ({"byte_size": 8}, "key is no string"),
        ({"key": 7, "byte_size": 8}, "key is no string"),
        ({"key": "KEY"}, "expected an offset from 0 and a byte_size from 1"),
        ({"key": "KEY", "byte_size": True}, "byte_size is True; expected a number of bytes"),
        ({"key": "KEY", "byte_size": 8.0}, "byte_size is 8.0; expected a number of bytes"),
        ({"key": "KEY", "byte_size": 8, "offset": "0"}, "offset is '0'; expected a number of bytes"),
        ({"key": "KEY", "byte_size": 8, "offset": -1}, "offset is -1; expected a number of bytes"),
        ({"key": "KEY", "byte_size": BYTES + 1}, "its object ends before offset 0 + byte_size 65,537"),
        (
            {"key": "KEY", "byte_size": 2**63 - 1, "offset": 2**63 - 1},
            "expected an offset from 0 and a byte_size from 1",
        ),
        ({"key": "../etc/passwd", "byte_size": 8}, "its key names no object that may be used"),
        ({"key": "no-such-object", "byte_size": 8}, "its key names no object that may be used"),
    ],
    ids=str,
)
@pytest.mark.drawn(6)
def test_registering_is_checked(
    server: Server, share: Callable[..., Shared], asked: Any, message: str
) -> None:
    """And errors say nothing of keys."""
    one = share(is_registered=False)
    content = asked if isinstance(asked, bytes) else json.dumps(asked).replace("KEY", one.key).encode()
    reply = httpx.post(server.url + REGISTER, content=content)
    assert reply.status_code == 400, reply.text
    assert message in reply.json()["error"]
    assert not any(word in reply.text for word in (one.key, "passwd", "no-such-object", "/dev/shm"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "register"),
        ("POST", "region/register"),
        ("GET", ""),
        ("GET", "region/r"),
        ("POST", "nonsense/r/unregister"),
    ],
)
def test_paths(server: Server, method: str, path: str) -> None:
    reply = httpx.request(method, f"{server.url}/v2/systemsharedmemory/{path}", content=b"")
    assert reply.status_code == 404, reply.text
    assert "is not a path of this server" in reply.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "region/r/register", "POST"),
        ("GET", "unregister", "POST"),
        ("PUT", "region/r/unregister", "POST"),
        ("POST", "status", "GET, HEAD"),
        ("DELETE", "region/r/status", "GET, HEAD"),
    ],
)
@pytest.mark.drawn(2)
def test_methods(server: Server, method: str, path: str, allowed: str) -> None:
    reply = httpx.request(method, f"{server.url}/v2/systemsharedmemory/{path}")
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


@pytest.mark.drawn(0.5)
def test_off_unless_it_is_allowed(start: Callable[..., Server]) -> None:
    """Nothing is registered, no tensor lies elsewhere, and the metadata does not announce it."""
    server = start()
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        assert "system_shared_memory" not in client.get_server_metadata()["extensions"]
        found = triton.InferInput("user", [1, 2], "INT64")
        found.set_shared_memory("r", 16)
        asked = triton.InferRequestedOutput("user")
        asked.set_shared_memory("r", 256)
        for call in (
            lambda: client.register_system_shared_memory("r", "/r", 8),
            client.get_system_shared_memory_status,
            client.unregister_system_shared_memory,
            lambda: client.infer("demo", [found]),
            lambda: client.infer("demo", [body("user", np.zeros((1, 2), np.int64))], outputs=[asked]),
        ):
            with refused(
                "shared memory regions are not supported by this server as it was started .* "
                "--allow-client-shm"
            ):
                call()


# ---- objects that change ----


def test_a_truncated_object_ends_no_worker(server: Server, client: Any, share: Callable[..., Shared]) -> None:
    """For an input and for an output, by the slow path and by a template; it is not made longer again."""
    one, ids, workers = share(), np.array([[1, 2]]), set(server.workers())
    for truncated_at in (0, 4096):
        for _ in range(3):
            client.infer("demo", [one.put("user", ids)], outputs=[one.ask("user", 256, 8192)])
        found = one.put("user", ids)
        os.truncate(one.path, truncated_at)
        for inputs, outputs in (([found], None), ([body("user", ids)], [one.ask("user", 256, 8192)])):
            for _ in range(3):
                with refused("region 'r': its object is shorter than the 65,536 bytes from byte 0 on"):
                    client.infer("demo", inputs, outputs=outputs)
        assert one.path.stat().st_size == truncated_at
        os.truncate(one.path, BYTES)
    assert set(server.workers()) == workers


@pytest.mark.drawn(0.5)
def test_an_object_that_is_truncated_while_it_is_used(
    server: Server, client: Any, share: Callable[..., Shared]
) -> None:
    """Again and again, while requests run: each is answered or refused, and no worker ends."""
    one, workers, stop = share(), set(server.workers()), threading.Event()

    def truncate() -> None:
        while not stop.is_set():
            os.truncate(one.path, 0)
            os.truncate(one.path, BYTES)

    thread = threading.Thread(target=truncate)
    found = triton.InferInput("user", [16, 256], "INT64")
    found.set_shared_memory("r", 16 * 256 * 8)
    answers = {"right": 0, "refused": 0}
    thread.start()
    try:

        def is_both() -> bool:
            try:
                client.infer("demo", [found], outputs=[one.ask("user", 16 * 256, BYTES - 16 * 256)])
                answers["right"] += 1
            except InferenceServerException as error:
                assert "its object is shorter than" in str(error)
                answers["refused"] += 1
            return min(answers.values()) >= 50

        until(is_both, what="answers and refusals")
    finally:
        stop.set()
        thread.join()
    assert set(server.workers()) == workers


@pytest.mark.drawn(0.25)
def test_ids_that_change_while_they_are_read(
    server: Server, client: Any, share: Callable[..., Shared]
) -> None:
    """What is looked up is what was checked: a client that writes wrong ids meanwhile gets an answer or an
    error."""
    one, stop = share(), threading.Event()

    def write(ids: np.ndarray) -> None:
        while not stop.is_set():
            ids[:] = 1 << 60
            ids[:] = 1

    workers, seen = set(server.workers()), {"right": 0, "refused": 0}
    found = triton.InferInput("user", [16, 256], "INT64")
    found.set_shared_memory("r", 16 * 256 * 8)
    thread = threading.Thread(
        target=write, args=(np.ndarray((4096,), np.int64, one.handle._mpsm_handle.buf),)
    )
    thread.start()
    try:

        def is_both() -> bool:
            try:
                rows = client.infer("demo", [found]).as_numpy("user")
                assert (rows == rows[0]).all()
                seen["right"] += 1
            except InferenceServerException as error:
                assert "is outside the table's rows" in str(error)
                seen["refused"] += 1
            return min(seen.values()) >= 10

        until(is_both, what="answers and refusals")
    finally:
        stop.set()
        thread.join()
    assert set(server.workers()) == workers
