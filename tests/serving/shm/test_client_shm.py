"""Triton's system shared memory, by an unchanged tritonclient and two workers; and clients that mean harm."""

import contextlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from servers import Server, running
from support import until
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from tableside.loader.segment.memory import processes_below

BYTES = 1 << 16
DATATYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}
REGISTER = "/v2/systemsharedmemory/region/r/register"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(
        tmp_path_factory.mktemp("demo"), "--workers", 2, "--allow-client-shm", "--max-body-bytes", BYTES
    ) as one:
        yield one


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as found:
        yield found
        found.unregister_system_shared_memory()


class Shared:
    """An object of shared memory of BYTES bytes that tritonclient made, registered as a region of the same
    name."""

    def __init__(self, client: Any, name: str, size: int = BYTES) -> None:
        self.client, self.name, self.key = client, name, f"test-{uuid.uuid4().hex[:12]}"
        self.handle = shm.create_shared_memory_region(name, self.key, size, create_only=True)
        self.path = Path("/dev/shm") / self.key

    def register(self, size: int = BYTES, offset: int = 0) -> None:
        self.client.register_system_shared_memory(self.name, self.key, size, offset)

    def put(self, name: str, values: np.ndarray, offset: int = 0) -> Any:
        """An input whose values lie in the region."""
        shm.set_shared_memory_region(self.handle, [values], offset)
        found = triton.InferInput(name, list(values.shape), DATATYPES[str(values.dtype)])
        found.set_shared_memory(self.name, values.nbytes, offset)
        return found

    def ask(self, name: str, size: int, offset: int = 0) -> Any:
        """An output that is wanted in the region."""
        found = triton.InferRequestedOutput(name)
        found.set_shared_memory(self.name, size, offset)
        return found

    def get(self, result: Any, name: str, offset: int = 0) -> np.ndarray:
        """The output's values, as tritonclient's examples read them."""
        described = result.get_output(name)
        assert "data" not in described
        assert described["parameters"]["shared_memory_region"] == self.name
        dtype = {"FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_, "INT64": np.int64}[
            described["datatype"]
        ]
        values = shm.get_contents_as_numpy(self.handle, dtype, described["shape"], offset)
        assert described["parameters"]["shared_memory_byte_size"] == values.nbytes
        return np.array(values)


@pytest.fixture
def share(client: Any) -> Iterator[Callable[..., Shared]]:
    """share(name) -> an object of shared memory that goes with the test, registered unless is_registered
    is false."""
    made: list[Shared] = []

    def run(name: str = "r", size: int = BYTES, is_registered: bool = True) -> Shared:
        made.append(Shared(client, name, size))
        if is_registered:
            made[-1].register(size)
        return made[-1]

    yield run
    for one in made:
        with contextlib.suppress(FileNotFoundError):  # the test removed it
            shm.destroy_shared_memory_region(one.handle)


def body(name: str, values: np.ndarray, binary: bool = True) -> Any:
    """An input in the body."""
    found = triton.InferInput(name, list(values.shape), DATATYPES[str(values.dtype)])
    found.set_data_from_numpy(values, binary_data=binary)
    return found


def refused(message: str) -> Any:
    return pytest.raises(InferenceServerException, match=message)


# ---- what is answered ----


def test_register_status_unregister(client: Any, share: Callable[..., Shared]) -> None:
    assert "system_shared_memory" in client.get_server_metadata()["extensions"]
    assert client.get_system_shared_memory_status() == []
    a, b = share("a/b c"), share("ü", is_registered=False)
    b.register(1000, 24)
    described = [
        {"name": "a/b c", "key": a.key, "offset": 0, "byte_size": BYTES},
        {"name": "ü", "key": b.key, "offset": 24, "byte_size": 1000},
    ]
    assert client.get_system_shared_memory_status() == described
    assert client.get_system_shared_memory_status("a/b c") == described[:1]
    assert client.get_system_shared_memory_status("ü") == described[1:]
    client.unregister_system_shared_memory("a/b c")
    client.unregister_system_shared_memory("a/b c")  # of Triton too this is no error
    assert client.get_system_shared_memory_status() == described[1:]
    with refused("region 'a/b c' is not registered"):
        client.get_system_shared_memory_status("a/b c")
    client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []


def test_all_tensors_in_regions(client: Any, share: Callable[..., Shared]) -> None:
    """Of every kind, in one region or two; with lengths that differ, so that later requests go by a
    template."""
    given, taken = share("in"), share("out")
    rng = np.random.default_rng(0)
    for k in range(8):
        lengths = rng.integers(0, 4, 5).astype(np.int32)
        arrays = {
            "user": rng.integers(0, 1000, (5, k)),
            "clicked.values": rng.integers(0, 300, int(lengths.sum())).astype(np.int32),
            "clicked.lengths": lengths,
            "clicked.weights": rng.standard_normal(int(lengths.sum())).astype(np.float32),
            "liked": rng.integers(0, 300, (5, 2)),
            "text.values": rng.integers(0, 50, 3 + k),
        }
        inputs, at = [], 8 * k
        for name, values in arrays.items():
            inputs.append(given.put(name, values, at))
            at += values.nbytes + 4 * (k % 2)
        offsets = {"user": 0, "clicked": 2048, "liked": 2048 + 5 * 32 * 4, "text": 4096 + k}
        sizes = {"user": 1280, "clicked": 640, "liked": 320 + k, "text": 4000}
        outputs = [
            taken.ask(name, sizes[name], offsets[name]) for name in ("text", "user", "liked", "clicked")
        ]
        result = client.infer("demo", inputs, outputs=outputs, request_id=f"r{k}")
        assert result.get_response()["id"] == f"r{k}"
        expected = client.infer("demo", [body(name, values) for name, values in arrays.items()])
        for name, offset in offsets.items():
            np.testing.assert_array_equal(taken.get(result, name, offset), expected.as_numpy(name))


def test_the_compact_form(client: Any, share: Callable[..., Shared]) -> None:
    """Whose offsets of sequences go into a region as well."""
    one, rng = share(), np.random.default_rng(0)
    parameters = {"kjt.features": "user,clicked,text"}
    for _ in range(5):
        lengths = rng.integers(0, 4, (3, 4)).astype(np.int32)
        values = rng.integers(0, 50, int(lengths.sum()))
        inputs = [one.put("kjt.values", values), one.put("kjt.lengths", lengths, values.nbytes)]
        places = {"kjt": 1024, "kjt.sequences": 8192, "kjt.offsets": 16384}
        outputs = [one.ask(name, 8000 if name != "kjt.offsets" else 16, at) for name, at in places.items()]
        result = client.infer("demo", inputs, outputs=outputs, parameters=parameters)
        expected = client.infer(
            "demo", [body("kjt.values", values), body("kjt.lengths", lengths)], parameters=parameters
        )
        for name, at in places.items():
            np.testing.assert_array_equal(one.get(result, name, at), expected.as_numpy(name))


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_some_tensors_in_the_body(client: Any, share: Callable[..., Shared], binary: bool) -> None:
    """Inputs and outputs of either way in one request, the body's as JSON or as bytes."""
    one, rng = share(), np.random.default_rng(0)
    for k in range(4):
        user, clicked, text = (
            rng.integers(0, 1000, (3, k)),
            rng.integers(0, 300, (3, 2)),
            rng.integers(0, 50, 5),
        )
        inputs = [body("text.values", text, binary), one.put("user", user), body("clicked", clicked, binary)]
        outputs = [
            triton.InferRequestedOutput("user", binary_data=binary),
            one.ask("clicked", 384, 4096),
            triton.InferRequestedOutput("text", binary_data=binary),
            one.ask("user.found", user.size, 3000) if k == 3 else one.ask("text.found", 5, 3000),
        ]
        result = client.infer("demo", inputs, outputs=outputs[: 3 + k // 2])
        expected = client.infer(
            "demo", [body("user", user), body("clicked", clicked), body("text.values", text)]
        )
        for name in ("user", "text"):
            np.testing.assert_array_equal(result.as_numpy(name), expected.as_numpy(name))
        np.testing.assert_array_equal(one.get(result, "clicked", 4096), expected.as_numpy("clicked"))
        if k >= 2:
            assert one.get(result, "user.found" if k == 3 else "text.found", 3000).all()


def test_outputs_may_lie_where_inputs_were(client: Any, share: Callable[..., Shared]) -> None:
    """Inputs are copied before anything is written."""
    one, ids = share(), np.arange(40).reshape(4, 10)
    expected = client.infer("demo", [body("user", ids)]).as_numpy("user")
    for _ in range(4):
        result = client.infer("demo", [one.put("user", ids)], outputs=[one.ask("user", 1024)])
        np.testing.assert_array_equal(one.get(result, "user"), expected)


def test_no_ids_and_no_bags(client: Any, share: Callable[..., Shared]) -> None:
    """Tensors of no bytes at the very end of a region."""
    one = share()
    for shape in ((0, 5), (3, 0)):
        found = triton.InferInput("user", list(shape), "INT64")
        found.set_shared_memory("r", 0, BYTES)
        size = shape[0] * 256
        result = client.infer("demo", [found], outputs=[one.ask("user", size, BYTES - size)])
        assert result.get_output("user")["shape"] == [shape[0], 64]


@pytest.mark.thorough
def test_large_tensors(start: Callable[..., Server]) -> None:
    """Which are copied beside the event loop, in and out, by requests that go by no template."""
    server = start("--allow-client-shm")
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        one = Shared(client, "r", 64 << 20)
        one.register(64 << 20)
        try:
            ids = np.random.default_rng(0).integers(0, 1000, (80_000, 8))
            small = client.infer("demo", [body("user", ids[-3:])]).as_numpy("user")
            for _ in range(3):
                result = client.infer(
                    "demo", [one.put("user", ids)], outputs=[one.ask("user", 80_000 * 256, 8 << 20)]
                )
                np.testing.assert_array_equal(one.get(result, "user", 8 << 20)[-3:], small)
                few = client.infer(
                    "demo", [one.put("user", ids[:20_000])], outputs=[one.ask("user", 80_000 * 256, 8 << 20)]
                )
                np.testing.assert_array_equal(
                    one.get(few, "user", 8 << 20), one.get(result, "user", 8 << 20)[:20_000]
                )
        finally:
            shm.destroy_shared_memory_region(one.handle)


# ---- several workers ----


def holders(server: Server, one: Shared) -> set[int]:
    """The workers that have an object open."""

    def has(pid: int) -> bool:
        found = []
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(fd).removesuffix(" (deleted)"))
        return str(one.path) in found

    return {pid for pid in processes_below(server.process.pid) if has(pid)}


def ask_all_workers(server: Server, one: Shared) -> None:
    """The same request over new connections, until both workers have answered it."""

    def ask() -> bool:
        with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            result = client.infer(
                "demo", [one.put("user", np.array([[1, 2]]))], outputs=[one.ask("user", 256, 256)]
            )
            assert np.any(one.get(result, "user", 256))
        return len(holders(server, one)) == 2

    until(ask, what="an answer of each worker")


def test_workers_share_what_is_registered(server: Server, client: Any, share: Callable[..., Shared]) -> None:
    """A region that one worker registered is known by both, is unregistered for both, and its name may be
    given to another."""
    one = share()
    ask_all_workers(server, one)
    client.unregister_system_shared_memory("r")
    until(lambda: not holders(server, one), what="the workers to close it")
    other = share()
    ask_all_workers(server, other)


def test_a_worker_that_died_takes_no_region_along(start: Callable[..., Server]) -> None:
    """Nor is what its successor knows less."""
    server = start("--workers", 2, "--allow-client-shm")
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        one = Shared(client, "r")
        try:
            one.register()
            ask_all_workers(server, one)
            before = set(server.workers())
            for pid in before:
                os.kill(pid, 9)
            until(lambda: len(set(server.workers()) - before) == 2, what="two new workers")
            ask_all_workers(server, one)
            assert not before & holders(server, one)
        finally:
            shm.destroy_shared_memory_region(one.handle)


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


def user(**parameters: Any) -> list[dict[str, Any]]:
    return [{"name": "user", "datatype": "INT64", "shape": [1, 2], "parameters": parameters}]


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
def test_methods(server: Server, method: str, path: str, allowed: str) -> None:
    reply = httpx.request(method, f"{server.url}/v2/systemsharedmemory/{path}")
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


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


def test_a_removed_object_is_let_go(server: Server, client: Any, share: Callable[..., Shared]) -> None:
    """Its region ends, in every worker, and its memory is free."""
    one = share()
    ask_all_workers(server, one)
    found = one.put("user", np.array([[1, 2]]))
    one.path.unlink()
    with refused("region 'r' is not registered, or its object was removed"):
        client.infer("demo", [found])
    until(lambda: not holders(server, one), what="the workers to close it")
    assert client.get_system_shared_memory_status() == []


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
