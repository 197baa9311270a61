"""What a call costs the client: CPU time of its own process, over the shapes that requests have.

The server runs in processes of its own, and only the client's time counts (time.process_time: its own code
and the kernel's work for it). Each request has lengths and ids of its own. Forms and clients take turns.
Correctness is asserted first: every vector equals the backend's own, in both forms.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import report, shared_folder
from make_model import publish_random

from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.cli.local import local_server
from tableside.serving.client import AsyncClient, Client, Jagged

SHAPES = {"8x8x10": (8, 8, 10), "26x32x20": (26, 32, 20), "100x64x5": (100, 64, 5), "300x1x3": (300, 1, 3)}
ROWS, DIM = 20_000, 64
REQUESTS, CALLS, ROUNDS = 16, 48, 9

Features = dict[str, Jagged]


def draw(rng: np.random.Generator, features: int, bags: int, ids: int) -> Features:
    """Features with `bags` bags of 0 to 2 x `ids` ids each."""
    drawn = {}
    for i in range(features):
        lengths = rng.integers(0, 2 * ids + 1, bags, dtype=np.int32)
        drawn[f"t{i}"] = Jagged(rng.integers(0, ROWS, int(lengths.sum())), lengths)
    return drawn


def check(root: Path, model: str, url: str, requests: list[Features], forms: dict[str, bool]) -> None:
    """Every vector equals the backend's own, in both forms and from both clients."""
    tables = Model(root, model).attach(verify="header").tables

    async def ask(features: Features, compact: bool) -> Any:
        async with AsyncClient(url) as client:
            return await client.lookup(model, features, compact=compact)

    with Client(url) as client:
        for features in requests[:3]:
            for compact in forms.values():
                answers = (
                    client.lookup(model, features, compact=compact),
                    asyncio.run(ask(features, compact)),
                )
                for name, jagged in features.items():
                    expected = choose().lookup(
                        tables[name], jagged.values, jagged.lengths, pooling=Pooling.SUM
                    )
                    for answer in answers:
                        np.testing.assert_array_equal(answer[name], expected)


def cpu_ms(call: Callable[[Features], object], requests: list[Features]) -> float:
    """CPU time of one call, the mean over CALLS."""
    started = time.process_time()
    for i in range(CALLS):
        call(requests[i % len(requests)])
    return (time.process_time() - started) / CALLS * 1e3


async def cpu_ms_async(call: Callable[[Features], Any], requests: list[Features]) -> float:
    started = time.process_time()
    for i in range(CALLS):
        await call(requests[i % len(requests)])
    return (time.process_time() - started) / CALLS * 1e3


async def measure(model: str, url: str, requests: list[Features], forms: dict[str, bool]) -> dict[str, float]:
    """CPU time of one call in ms for each form and client: the median over rounds that take turns, after
    an untimed one."""
    found: dict[str, list[float]] = {}
    with Client(url) as client:
        async with AsyncClient(url) as async_client:
            for i in range(ROUNDS + 1):
                for name, compact in forms.items():
                    one = cpu_ms(partial(client.lookup, model, compact=compact), requests)
                    other = await cpu_ms_async(partial(async_client.lookup, model, compact=compact), requests)
                    if i:
                        found.setdefault(f"{name} ms", []).append(one)
                        found.setdefault(f"{name} async ms", []).append(other)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    rows = []
    with shared_folder() as root:
        for name, (features, _, _) in SHAPES.items():
            publish_random(root, name, {f"t{i}": (ROWS, DIM, "int8") for i in range(features)})
        with local_server([*SHAPES], root=root) as server:
            rng = np.random.default_rng(3)
            for name, shape in SHAPES.items():
                requests = [draw(rng, *shape) for _ in range(REQUESTS)]
                forms = {"named": False, "compact": True}
                check(root, name, server.url, requests, forms)
                rows.append(
                    {"features x bags x ids": name, **asyncio.run(measure(name, server.url, requests, forms))}
                )
    report(
        "client",
        f"CPU time of one call of the client, jagged, lengths that differ each time, int8 D {DIM}",
        rows,
    )


if __name__ == "__main__":
    main()
