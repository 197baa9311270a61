"""Triton's CUDA shared memory, by an unchanged tritonclient. With --device cuda:0 the regions are those of
its cuda_shared_memory (cuda-python); in Triton's interpreter a device's memory is the host's, and a handle
is the name of an object in /dev/shm."""

import base64
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tables
import tritonclient.http as triton
from servers import Server, running
from support import until
from tritonclient.utils import InferenceServerException

pytest.importorskip("triton")
from tableside.serving.client import Client

SIZE = 1 << 16
IDS = np.array([3, 7, 299, 0, 11], np.int64)
LENGTHS = np.array([2, 0, 3], np.int32)
DTYPES = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "FP16": np.float16}


class OnGpu:
    """A region that tritonclient makes."""

    def __init__(self, name: str, size: int) -> None:
        from tritonclient.utils import cuda_shared_memory

        self._shm, self._size = cuda_shared_memory, size
        self._region = cuda_shared_memory.create_shared_memory_region(name, size, 0)
        self.handle = cuda_shared_memory.get_raw_handle(self._region).decode()

    def put(self, values: np.ndarray, offset: int) -> None:
        whole = self.get(np.uint8, (self._size,), 0).copy()
        whole[offset : offset + values.nbytes] = np.frombuffer(values.tobytes(), np.uint8)
        self._shm.set_shared_memory_region(self._region, [whole])

    def get(self, dtype: Any, shape: tuple[int, ...], offset: int) -> np.ndarray:
        whole = np.array(self._shm.get_contents_as_numpy(self._region, np.uint8, [self._size]))
        return np.frombuffer(whole, dtype, int(np.prod(shape)), offset).reshape(shape)

    def close(self) -> None:
        self._shm.destroy_shared_memory_region(self._region)


class OnHost:
    """What stands for one in the interpreter."""

    def __init__(self, name: str, size: int) -> None:
        self.path = Path("/dev/shm") / f"test-{uuid.uuid4().hex[:12]}"
        self.path.write_bytes(bytes(size))
        self.handle = base64.b64encode(self.path.name.encode().ljust(64, b"\0")).decode()

    def put(self, values: np.ndarray, offset: int) -> None:
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), values.tobytes(), offset)

    def get(self, dtype: Any, shape: tuple[int, ...], offset: int) -> np.ndarray:
        return np.frombuffer(self.path.read_bytes(), dtype, int(np.prod(shape)), offset).reshape(shape)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


class Region:
    """A region of the GPU's memory, registered."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name
        self.memory: Any = (OnHost if tables.DEVICE == "interpreter" else OnGpu)(name, SIZE)

    def register(self, size: int = SIZE, device: int = 0) -> None:
        self.client.register_cuda_shared_memory(self.name, self.memory.handle, device, size)

    def input(self, name: str, values: np.ndarray, offset: int) -> Any:
        """An input that lies in the region."""
        self.memory.put(values, offset)
        datatype = next(n for n, dtype in DTYPES.items() if values.dtype == dtype)
        found = triton.InferInput(name, list(values.shape), datatype)
        found.set_shared_memory(self.name, values.nbytes, offset)
        return found

    def output(self, name: str, size: int, offset: int) -> Any:
        """An output that is wanted there."""
        found = triton.InferRequestedOutput(name)
        found.set_shared_memory(self.name, size, offset)
        return found

    def get(self, result: Any, name: str, offset: int) -> np.ndarray:
        """An output's values."""
        described = result.get_output(name)
        assert described["parameters"]["shared_memory_region"] == self.name and "data" not in described
        return self.memory.get(DTYPES[described["datatype"]], tuple(described["shape"]), offset)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two doors and their engine. The smallest requests are for the CPU, but for those with tensors on the
    device."""
    options = ("--workers", 2, "--devices", tables.serve_device(), "--allow-client-shm", "--placement", "hbm")
    with running(tmp_path_factory.mktemp("demo"), *options) as one:
        yield one


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60) as found:
        yield found
        found.unregister_cuda_shared_memory()
        found.unregister_system_shared_memory()


@pytest.fixture
def region(client: Any) -> Iterator[Region]:
    """One that is registered."""
    made = Region(client, "r")
    made.register()
    yield made
    made.memory.close()


def body(name: str, values: np.ndarray) -> Any:
    datatype = next(n for n, dtype in DTYPES.items() if values.dtype == dtype)
    found = triton.InferInput(name, list(values.shape), datatype)
    found.set_data_from_numpy(values)
    return found


def refused(message: str) -> Any:
    return pytest.raises(InferenceServerException, match=message)


@pytest.fixture
def expected(server: Server) -> Callable[..., Any]:
    """The vectors of features, by bags, that the CPU beside the engine gives."""

    def run(**features: Any) -> dict[str, np.ndarray]:
        with Client(server.url) as found:
            return dict(
                found.lookup(
                    "demo", {name: [list(map(int, bag)) for bag in bags] for name, bags in features.items()}
                )
            )

    return run


def bags() -> list[np.ndarray]:
    return np.split(IDS, np.cumsum(LENGTHS)[:-1])


@pytest.mark.drawn(0.25)
def test_register_status_unregister(client: Any, region: Region) -> None:
    assert "cuda_shared_memory" in client.get_server_metadata()["extensions"]
    told = {"name": "r", "device_id": 0, "byte_size": SIZE}
    assert client.get_cuda_shared_memory_status() == [told] == client.get_cuda_shared_memory_status("r")
    assert client.get_system_shared_memory_status() == []
    client.unregister_system_shared_memory()
    assert client.get_cuda_shared_memory_status() == [told]
    with refused("is registered already; unregister it first"):
        region.register()
    client.unregister_cuda_shared_memory("r")
    with refused("region 'r' is not registered"):
        client.get_cuda_shared_memory_status("r")
    with refused("region 'r' is not registered"):
        client.infer("demo", [region.input("user", IDS.reshape(1, 5), 0)])


@pytest.mark.drawn(0.5)
def test_ids_and_vectors_in_a_region(server: Server, region: Region, expected: Callable[..., Any]) -> None:
    """Some of the tensors, or all of them; by either door; and what lies beside the vectors stays."""
    wanted = expected(user=bags(), clicked=bags())
    region.memory.put(np.full(SIZE, 99, np.uint8), 0)
    for turn in range(4):
        with triton.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60) as client:
            inputs = [
                region.input("user.values", IDS, 8),
                region.input("user.lengths", LENGTHS, 48) if turn % 2 else body("user.lengths", LENGTHS),
                body("clicked.values", IDS),
                body("clicked.lengths", LENGTHS),
            ]
            clicked_too = (
                region.output("clicked", 3 * 32 * 4, 4100)
                if turn > 1
                else triton.InferRequestedOutput("clicked")
            )
            result = client.infer(
                "demo", inputs, outputs=[region.output("user", 3 * 64 * 4, 1000), clicked_too]
            )
        np.testing.assert_allclose(region.get(result, "user", 1000), wanted["user"], rtol=1e-5, atol=1e-5)
        clicked = region.get(result, "clicked", 4100) if turn > 1 else result.as_numpy("clicked")
        np.testing.assert_allclose(clicked, wanted["clicked"], rtol=1e-5, atol=1e-5)
    after = region.memory.get(np.uint8, (SIZE,), 0)
    assert (
        (after[60:1000] == 99).all()
        and (after[1000 + 768 : 4100] == 99).all()
        and (after[4100 + 384 :] == 99).all()
    )


@pytest.mark.drawn(0.5)
def test_a_request_in_the_same_words_reads_what_is_there_now(
    client: Any, region: Region, expected: Callable[..., Any]
) -> None:
    """Ids that changed, and memory that was registered anew by the same name. One in other words is not
    taken for it."""
    rows = expected(user=[[n] for n in range(6)])["user"]

    def ask(first: int, of: Region, size: int = 512) -> np.ndarray:
        inputs = [of.input("user", np.array([[first], [first + 1]]), 0)]
        return of.get(client.infer("demo", inputs, outputs=[of.output("user", size, 512)]), "user", 512)

    for first in (0, 3, 1):
        np.testing.assert_allclose(ask(first, region), rows[first : first + 2], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ask(2, region, 600), rows[2:4], rtol=1e-5, atol=1e-5)
    client.unregister_cuda_shared_memory("r")
    with refused("region 'r' is not registered"):
        ask(0, region)
    other = Region(client, "r")
    other.register()
    np.testing.assert_allclose(ask(4, other), rows[4:6], rtol=1e-5, atol=1e-5)
    client.unregister_cuda_shared_memory("r")
    other.register(600)
    with refused("outside CUDA shared memory region 'r', which has 600 bytes"):
        ask(4, other)
    other.memory.close()


def test_the_other_ways_to_send_features(client: Any, region: Region, expected: Callable[..., Any]) -> None:
    """Bags of one length, an unpooled feature, and the compact form, whose lengths are in the body."""
    ids = np.array([[1, 2], [40, 3]], np.int64)
    wanted = expected(user=ids, text=ids, liked=ids)
    inputs = [region.input("user", ids, 0), region.input("text.values", ids.reshape(-1), 64)]
    outputs = [region.output("user", 512, 128), region.output("text", 4 * 16 * 4, 1024)]
    result = client.infer("demo", inputs, outputs=outputs)
    np.testing.assert_allclose(region.get(result, "user", 128), wanted["user"], rtol=1e-5, atol=1e-5)
    text = region.memory.get(DTYPES[result.get_output("text")["datatype"]], (4, 16), 1024)
    np.testing.assert_allclose(text, wanted["text"], rtol=1e-5, atol=1e-5)
    values = np.concatenate([ids.reshape(-1), ids.reshape(-1)])
    lengths = np.full((2, 2), 2, np.int32)
    compact = [region.input("kjt.values", values, 8), body("kjt.lengths", lengths)]
    result = client.infer(
        "demo",
        compact,
        outputs=[region.output("kjt", 2 * 96 * 4, 2048)],
        parameters={"kjt.features": "user,clicked"},
    )
    together = region.get(result, "kjt", 2048)
    np.testing.assert_allclose(together[:, :64], wanted["user"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(together[:, 64:], expected(clicked=ids)["clicked"], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_there_is_refused(client: Any, region: Region) -> None:
    """By the name of the tensor, with the way that it can be sent."""
    user = region.input("user", IDS.reshape(1, 5), 0)
    with refused(r"input 'user' lies in CUDA shared memory region 'r', and the server reads it itself"):
        client.infer("demo", [region.input("user", IDS.reshape(1, 5).astype(np.int32), 0)])
    with refused("input 'text.lengths' lies in CUDA shared memory"):
        client.infer("demo", [region.input("text.values", IDS, 0), region.input("text.lengths", LENGTHS, 64)])
    with refused("input 'kjt.lengths' lies in CUDA shared memory"):
        lengths = region.input("kjt.lengths", np.ones((4, 1), np.int32), 64)
        client.infer("demo", [region.input("kjt.values", IDS[:4], 0), lengths])
    with refused("output 'user.found' is made on the host"):
        client.infer("demo", [user], outputs=[region.output("user.found", 5, 512)])
    with refused("two of them have bytes of shared memory in common"):
        clicked = region.input("clicked", IDS.reshape(1, 5), 64)
        client.infer(
            "demo",
            [user, clicked],
            outputs=[region.output("user", 256, 512), region.output("clicked", 128, 600)],
        )
    with refused("outside CUDA shared memory region 'r', which has 65,536 bytes"):
        client.infer("demo", [user], outputs=[region.output("user", 256, SIZE - 200)])
    with refused("feature 'user': id 1000 at position 1 is outside the table's rows"):
        client.infer("demo", [region.input("user", np.array([[5, 1000]]), 0)])


def test_handles_that_are_none(client: Any, region: Region) -> None:
    """They are refused with the reason, are not registered, and cost nothing else."""
    memory = Region(client, "s")
    with refused("raw_handle is "):
        client.register_cuda_shared_memory("s", "no base64!", 0, 64)
    with refused("raw_handle has 3 bytes; expected a byte_size from 1 and 64 bytes"):
        client.register_cuda_shared_memory("s", base64.b64encode(b"abc").decode(), 0, 64)
    with refused("CUDA shared memory region 's': "):
        client.register_cuda_shared_memory("s", base64.b64encode(bytes(range(64))).decode(), 0, 64)
    with refused("region 's': the memory that its handle names has .* bytes; expected 1,073,741,824 or more"):
        memory.register(1 << 30)
    with refused("all shared memory regions would have"):
        memory.register(1 << 40)
    memory.memory.close()
    assert [one["name"] for one in client.get_cuda_shared_memory_status()] == ["r"]
    client.infer("demo", [region.input("user", IDS.reshape(1, 5), 0)])


@pytest.mark.drawn(0.5)
def test_a_successor_of_the_engine_opens_what_is_registered(
    server: Server, client: Any, region: Region
) -> None:
    """And closes what is unregistered, as did the one before."""
    request = [region.input("user", IDS.reshape(1, 5), 0)], [region.output("user", 256, 512)]
    before = region.get(client.infer("demo", request[0], outputs=request[1]), "user", 512)
    (engine,) = server.engines()
    os.kill(engine, signal.SIGKILL)
    until(lambda: server.engines() not in ([], [engine]), what="a successor")
    region.memory.put(np.zeros(256, np.uint8), 512)
    np.testing.assert_array_equal(
        region.get(client.infer("demo", request[0], outputs=request[1]), "user", 512), before
    )
    if tables.DEVICE == "interpreter":
        (engine,) = server.engines()
        maps = Path(f"/proc/{engine}/maps")
        assert region.memory.path.name in maps.read_text()
        client.unregister_cuda_shared_memory()
        until(lambda: region.memory.path.name not in maps.read_text(), what="the region to be closed")


@pytest.mark.thorough
def test_a_server_without_a_gpu_says_so(start: Callable[..., Server]) -> None:
    """And one that does not allow regions says that."""
    handle = {"raw_handle": {"b64": base64.b64encode(bytes(64)).decode()}, "device_id": 0, "byte_size": 64}

    def told(server: Server) -> str:
        answer = httpx.post(f"{server.url}/v2/cudasharedmemory/region/r/register", json=handle, timeout=300)
        assert answer.status_code == 400
        return str(answer.json()["error"])

    allowed = start("--allow-client-shm")
    assert "this server looks up on the CPU; start it with --devices" in told(allowed)
    assert "cuda_shared_memory" not in allowed.get("/v2").json()["extensions"]
    assert "allow_client_shm is off" in told(start())
