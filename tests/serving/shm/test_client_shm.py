"""Triton's system shared memory, by an unchanged tritonclient and two workers."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from servers import Server
from shared_objects import BYTES, Shared, body, refused
from support import until
from tritonclient.utils import shared_memory as shm

from tableside.loader.segment.memory import processes_below

# ---- what is answered ----


@pytest.mark.drawn(0.5)
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


@pytest.mark.drawn(0.25)
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
