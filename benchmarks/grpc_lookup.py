"""Lookups over gRPC beside the same over HTTP: requests, and what one costs the worker.

    python benchmarks/grpc_lookup.py            # half a minute

One worker on a core, the load generator on another, 8 requests under way, tables of int8 D 64, uniform ids.
Requests are made before. The generator's gRPC (grpc.aio) takes more of its core than its HTTP does, so what a
request costs the worker's process is told, too: its CPU time by the requests that it answered. `grpc alone`
is a server of the same library that answers the same bytes and reads nothing. Every vector of five requests
is compared first.
"""

import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import uvloop
from common import report, shared_folder
from hosts import cpu_s, workers_of
from make_model import publish_random

from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.generator import run
from tableside.serving.cli.local import local_server
from tableside.serving.client import Client
from tableside.serving.http.grpc.messages import NAME, message

SHAPES = ((8, 8, 10), (26, 32, 20))  # features, bags, ids of a bag
ROWS, DIM, REQUESTS = 200_000, 64, 64
UNDER_WAY, ROUNDS, SECONDS = 8, 5, 1.5


def messages_of(described: dict[str, Any], shape: bench.Shape) -> list[bytes]:
    """The requests of `bench.make_requests`, as gRPC has them."""
    rng, made = np.random.default_rng(0), []
    for _ in range(REQUESTS):
        values, _ = bench.draw(rng, described, shape)
        request = message("ModelInferRequest")(model_name=described["name"])
        for feature, ids in zip(
            described["features"], np.split(values, len(described["features"])), strict=True
        ):
            request.inputs.add(name=feature["name"], datatype="INT64", shape=[shape.batch, shape.ids])
            request.raw_input_contents.append(ids.tobytes())
        made.append(request.SerializeToString())
    return made


async def over_grpc(address: str, requests: list[bytes], seconds: float) -> tuple[int, float]:
    """Requests that were answered, and the seconds."""
    async with grpc.aio.insecure_channel(address) as channel:
        ask = channel.unary_unary(f"/{NAME}/ModelInfer")
        await ask(requests[0], wait_for_ready=True)
        began, answered = time.perf_counter(), 0

        async def one(number: int) -> None:
            nonlocal answered
            while time.perf_counter() - began < seconds:
                await ask(requests[number % len(requests)])
                number, answered = number + UNDER_WAY, answered + 1

        await asyncio.gather(*map(one, range(UNDER_WAY)))
        return answered, time.perf_counter() - began


def answer_alone(port: int, answer: bytes) -> None:
    """A process that answers all requests alike."""

    async def same(request: bytes, context: Any) -> bytes:
        return answer

    async def serve() -> None:
        server = grpc.aio.server()
        handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(same)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


@contextmanager
def alone(url: str, requests: list[bytes]) -> Iterator[tuple[str, int]]:
    """The address and process of such a server, with an answer of the server at `url`."""
    with grpc.insecure_channel(url) as channel:
        answer = channel.unary_unary(f"/{NAME}/ModelInfer", _registered_method=False)(requests[0])
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=answer_alone, args=(port, answer))
    process.start()
    assert process.pid is not None
    try:
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.join()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def over_http(url: str, requests: list[bytes], seconds: float) -> tuple[int, float]:
    load = run(url, requests, concurrency=UNDER_WAY, seconds=seconds)
    assert not load.failed, load.failure
    return load.requests, load.seconds


def compare(url: str, address: str, requests: list[bytes]) -> None:
    """AssertionError: vectors differ."""
    with Client(url) as client, grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(f"/{NAME}/ModelInfer", _registered_method=False)
        for data in requests[:5]:
            asked = message("ModelInferRequest").FromString(data)
            found = message("ModelInferResponse").FromString(ask(data))
            ids = {
                one.name: np.frombuffer(raw, np.int64).reshape(one.shape)
                for one, raw in zip(asked.inputs, asked.raw_input_contents, strict=True)
            }
            expected = client.lookup(asked.model_name, ids)
            for output, raw in zip(found.outputs, found.raw_output_contents, strict=True):
                assert raw == expected[output.name].tobytes()


def measured(
    ways: dict[str, tuple[list[int], Callable[[], tuple[int, float]]]],
) -> dict[str, tuple[float, float]]:
    """Requests a second, and CPU microseconds of a request, medians of rounds in turns. ways: the processes
    that answer, and what asks."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _, ask in ways.values():
        ask()
    for _ in range(ROUNDS):
        for way, (pids, ask) in ways.items():
            before = cpu_s(pids)
            answered, seconds = ask()
            found[way].append((answered / seconds, 1e6 * (cpu_s(pids) - before) / answered))
    medians = {way: [statistics.median(c) for c in zip(*times, strict=True)] for way, times in found.items()}
    return {way: (per_s, cost) for way, (per_s, cost) in medians.items()}


def of_shape(
    root: Path, features: int, shape: bench.Shape, cores: list[int]
) -> dict[str, tuple[float, float]]:
    publish_random(root, "ads", {f"t{n}": (ROWS, DIM, "int8") for n in range(features)})
    port = free_port()
    os.sched_setaffinity(0, cores[:1])
    with local_server(["ads"], "--grpc-port", str(port), root=root) as server:
        described = httpx.get(f"{server.url}/v1/models").json()["models"][0]
        by_http = bench.make_requests(described, server.url, shape, count=REQUESTS)
        by_grpc, address = messages_of(described, shape), f"127.0.0.1:{port}"
        compare(server.url, address, by_grpc)
        with alone(address, by_grpc) as (echo, process):
            os.sched_setaffinity(0, cores[1:] or cores)
            worker = workers_of(server)
            return measured(
                {
                    "http": (worker, lambda: over_http(server.url, by_http, SECONDS)),
                    "grpc": (worker, lambda: asyncio.run(over_grpc(address, by_grpc, SECONDS))),
                    "grpc alone": ([process], lambda: asyncio.run(over_grpc(echo, by_grpc, SECONDS))),
                }
            )


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for features, batch, ids in SHAPES:
        with shared_folder() as root:
            found = of_shape(root, features, bench.Shape(batch, ids, same=True), cores)
        os.sched_setaffinity(0, cores)
        for way, (per_s, cost) in found.items():
            asked = f"{features} x {batch} x {ids}"
            rows.append({"request": asked, "over": way, "requests_s": per_s, "worker_us": cost})
        ratios[f"requests_ratio_{features}"] = found["grpc"][0] / found["http"][0]
        ratios[f"cpu_ratio_{features}"] = found["grpc"][1] / found["http"][1]
    report("grpc_lookup", f"Lookups over gRPC and HTTP, {ROWS:,} rows, int8 dim {DIM}", rows, **ratios)


if __name__ == "__main__":
    main()
