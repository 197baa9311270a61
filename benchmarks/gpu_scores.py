"""Scores of a DLRM over HTTP: a server on a GPU against the same server on the CPU, both on the same cores,
in turns.

    python benchmarks/gpu_scores.py                # requests of 32 and 512 rows; one worker and four on the
                                                   # GPU, four on the CPU
    python benchmarks/gpu_scores.py --workers 4    # only so many workers on the GPU
    python benchmarks/gpu_scores.py --workers 3 --dtypes fp32    # in bf16 as well by default, which is a
                                                                 # server of its own
    TRIAL=1 TRITON_INTERPRET=1 python benchmarks/gpu_scores.py --device interpreter --batches 2   # a try

26 features of 20 ids each, a table of 100,000 rows x D 64 (int8) for each, and an MLP 1664-1024-1024-256-1.
Requests name the score alone. All servers have the same four cores; the load comes from processes that have a
core each, with 64 connections together and with 256: with few, what a server needs is that answers come soon,
and not that it does much at once. Every server's scores are compared with fp64's first.

In bf16 a number x is rounded by u |x| at most, u = 2^-8, and by anything up to that: a variance of (u x)^2 /
3 at most. Roundings do not know of each other, so variances add up on their way through the layers
(`deviations`). A score may differ by 8 standard deviations, which one of 10^15 normal ones exceeds.
"""

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise, product
from multiprocessing.pool import Pool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import orjson
import torch
from common import console, report, shared_folder
from gpu_server import gpus, mean_stages, serve, stage_sums
from http_cases import Server, line
from numpy.typing import NDArray

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.cli.commands.bench import HEADER_LENGTH, request_bytes
from tableside.serving.cli.commands.generator import Load, run

FEATURES, IDS, ROWS, DIM = 26, 20, 100_000, 64
WIDTHS = (FEATURES * DIM, 1024, 1024, 256, 1)
SERVER_CORES, CPU_WORKERS = 4, 4
MOST_SENDERS, ROUNDS = 8, 3
MOST_ROWS = 512 * 64  # in requests under way
REQUEST_BYTES = 64 << 20  # of the requests that one sender prepares


class Dense(torch.nn.Module):
    """The dense part, of the features' vectors side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for before, after in pairwise(WIDTHS):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers[:-1], torch.nn.Sigmoid())

    def forward(self, *vectors: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(torch.cat(vectors, 1)).squeeze(1)
        return scores


def publish(root: Path, folder: Path, rows: int) -> None:
    """Publishes the model `dlrm`."""
    rng = np.random.default_rng(0)
    names = [f"f{n}" for n in range(FEATURES)]
    named: dict[str, Any] = {
        name: rng.standard_normal((rows, DIM), dtype=np.float32) * np.float32(0.1) for name in names
    }
    np.savez(folder / "c.npz", **named)
    batch = torch.export.Dim("batch")
    inputs = tuple(torch.zeros(2, DIM) for _ in names)
    program = torch.export.export(
        Dense().eval(), inputs, dynamic_shapes={"vectors": tuple({0: batch} for _ in inputs)}
    )
    torch.export.save(program, folder / "scorer.pt2")
    raw = {
        "name": "dlrm",
        "checkpoint": "c.npz",
        "tables": {name: {"key": name, "row_format": "int8"} for name in names},
        "features": {name: {"table": name, "pooling": "sum"} for name in names},
        "scorer": {"program": "scorer.pt2", "inputs": {f"vectors_{n}": name for n, name in enumerate(names)}},
    }
    load(parse_model(raw, folder), root)


def infer(ids: NDArray[np.int64]) -> tuple[dict[str, str], bytes]:
    """The headers and the body of a request for scores. ids: int64 [features, rows, ids]."""
    parameters = {"binary_data_size": ids[0].nbytes}
    inputs = [
        {"name": f"f{n}", "datatype": "INT64", "shape": i.shape, "parameters": parameters}
        for n, i in enumerate(ids)
    ]
    head = orjson.dumps(
        {"inputs": inputs, "outputs": [{"name": "score", "parameters": {"binary_data": True}}]}
    )
    head = head.ljust(-(-len(head) // 8) * 8)
    return {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}, head + ids.tobytes()


def path_of(url: str) -> str:
    return f"{url}/v2/models/dlrm/infer"


def deviations(dense: Dense, vectors: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scores of vectors [rows, width], and the standard deviations of what roundings to bf16 add: of
    inputs and weights once, of what a layer gives twice, as a bias may be added behind the product."""
    once = (2.0**-8) ** 2 / 3
    x, variance = vectors, once * vectors**2
    for layer in dense.layers:
        if isinstance(layer, torch.nn.ReLU):
            x = np.maximum(x, 0)
            continue
        if isinstance(layer, torch.nn.Linear):
            w, b = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
            x, variance = x @ w.T + b, (variance + once * x**2) @ (w**2).T + once * b**2
        else:
            x = 1 / (1 + np.exp(-x))
            variance = variance / 16
        variance = variance + 2 * once * x**2
    return x[:, 0], np.sqrt(variance[:, 0])


def check(root: Path, url: str, batch: int, rows: int, dtype: str) -> None:
    """Scores of three requests are those of fp64, within what sums in fp32, or roundings to bf16, differ
    by."""
    segment = Model(root, "dlrm").attach(verify="header")
    dense, rng = Dense().eval().double(), np.random.default_rng(5)
    for _ in range(3):
        ids = rng.integers(0, rows, (FEATURES, batch, IDS))
        headers, body = infer(ids)
        reply = httpx.post(path_of(url), content=body, headers=headers, timeout=60)
        if reply.status_code != 200:
            raise SystemExit(f"{url} answered {reply.status_code} {reply.text[:500]}")
        found = np.frombuffer(reply.content[int(reply.headers[HEADER_LENGTH]) :], np.float32)
        lengths = np.full(batch, IDS, np.int32)
        vectors = [
            choose().lookup(segment.tables[f"f{n}"], i.reshape(-1), lengths, pooling=Pooling.SUM)
            for n, i in enumerate(ids)
        ]
        expected, deviation = deviations(dense, np.concatenate(vectors, 1).astype(np.float64))
        if dtype == "fp32":
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_less(np.abs(found - expected), 8 * deviation)


# ---- the load: processes that prepare requests, and then send them at the same time ----

_gate: Any = None


def _open(gate: Any, cores: Sequence[int], numbers: Any) -> None:
    global _gate
    _gate = gate
    os.sched_setaffinity(0, {cores[numbers.get() % len(cores)]})


def _send(url: str, batch: int, rows: int, connections: int, seconds: float, seed: int) -> Load:
    """What one sender measures. All of them have prepared their requests before any of them sends."""
    rng = np.random.default_rng(seed)
    count = max(4, min(256, REQUEST_BYTES // (8 * FEATURES * batch * IDS)))
    drawn = [infer(rng.integers(0, rows, (FEATURES, batch, IDS))) for _ in range(count)]
    requests = [request_bytes(path_of(url), headers, body) for headers, body in drawn]
    _gate.wait()
    return run(url, requests, concurrency=connections, seconds=seconds)


def rows_per_s(
    pool: Pool, senders: int, connections: int, url: str, batch: int, rows: int, seconds: float
) -> tuple[float, float]:
    """Rows a second that a server scores, and the 99th percentile of its latencies in ms."""
    each = max(1, connections // senders)
    loads = pool.starmap(
        _send, [(url, batch, rows, each, seconds, seed) for seed in range(senders)], chunksize=1
    )
    if failed := [load for load in loads if load.failed]:
        raise SystemExit(f"{url}: {failed[0].failed} requests failed: {failed[0].failure}")
    latencies = np.concatenate([load.latencies_s for load in loads])
    return batch * sum(load.requests_per_s for load in loads), 1e3 * float(np.percentile(latencies, 99))


def measure(
    servers: dict[str, Server], batch: int, rows: int, seconds: float, connections: int, senders: list[int]
) -> list[dict[str, Any]]:
    """A row for each server: medians of rounds in which they take turns, after an untimed one."""
    context = multiprocessing.get_context("spawn")
    gate, numbers = context.Barrier(len(senders)), context.Queue()
    for n in range(len(senders)):
        numbers.put(n)
    rates: dict[str, list[float]] = {name: [] for name in servers}
    late: dict[str, list[float]] = {name: [] for name in servers}
    before = {}
    with context.Pool(len(senders), _open, (gate, senders, numbers)) as pool:
        for turn in range(ROUNDS + 1):
            for name, server in servers.items():
                if turn == 1:
                    before[name] = stage_sums(server.url)
                rate, p99 = rows_per_s(
                    pool, len(senders), connections, server.url, batch, rows, seconds / ROUNDS
                )
                if turn:
                    rates[name].append(rate)
                    late[name].append(p99)
    found = []
    for name, server in servers.items():
        rate = statistics.median(rates[name])
        of_cpu = rate / statistics.median(rates["cpu"])
        row = {
            "batch": batch,
            "connections": connections,
            "server": name,
            "rows_per_s": rate,
            "of_cpu": of_cpu,
            "p99_ms": statistics.median(late[name]),
        }
        found.append(row | mean_stages(before[name], stage_sums(server.url)))
        console.print(line(found[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 4], help="on the GPU (default: 1 and 4)"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["fp32", "bf16"],
        choices=("fp32", "bf16"),
        help="of scorers on the GPU",
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[32, 512], help="rows of a request (default: 32 and 512)"
    )
    parser.add_argument(
        "--seconds", type=float, default=9.0, help="of load for each server and batch (default: %(default)s)"
    )
    parser.add_argument(
        "--connections",
        type=int,
        nargs="+",
        default=[64, 256],
        help="of all load together (default: 64 and 256)",
    )
    parser.add_argument("--device", default="0", help="of the server on the GPU (default: %(default)s)")
    options = parser.parse_args()
    gpu = gpus()
    if not gpu and options.device != "interpreter":
        raise SystemExit("nvidia-smi is not here; expected a host with a GPU")
    cores = sorted(os.sched_getaffinity(0))
    of_servers, senders = cores[:SERVER_CORES], cores[SERVER_CORES:][:MOST_SENDERS] or cores[-1:]
    table_rows = ROWS if gpu else 2000
    rows: list[dict[str, Any]] = []
    with shared_folder() as root, TemporaryDirectory() as name, ExitStack() as stack:
        publish(root, Path(name), table_rows)
        os.sched_setaffinity(0, of_servers)  # which the servers inherit
        servers = {"cpu": stack.enter_context(serve(root, ["dlrm"], "--workers", CPU_WORKERS))}
        dtypes = {"cpu": "fp32"}
        for workers, dtype in product(options.workers, options.dtypes):
            on_gpu = (
                "--workers",
                workers,
                "--devices",
                options.device,
                "--placement",
                "hbm",
                "--scorer-dtype",
                dtype,
            )
            key = f"gpu, {workers} worker{'s' * (workers > 1)}{'' if dtype == 'fp32' else ', ' + dtype}"
            servers[key], dtypes[key] = stack.enter_context(serve(root, ["dlrm"], *on_gpu)), dtype
        os.sched_setaffinity(0, cores)
        for key, server in servers.items():
            console.print(f"{key}: ready in {server.ready_s:.1f} s")
            for batch in options.batches:
                check(root, server.url, batch, table_rows, dtypes[key])
        for batch, connections in product(options.batches, options.connections):
            if batch * connections > MOST_ROWS:
                console.print(
                    f"{batch} rows, {connections} connections: left out, a round ends before its answers"
                )
                continue
            rows += measure(servers, batch, table_rows, options.seconds, connections, senders)
    title = (
        f"scores over HTTP, {FEATURES} x {IDS} ids, int8 D {DIM}, MLP {'-'.join(map(str, WIDTHS))}; "
        f"{len(of_servers)} cores for "
        f"each server, load from {len(senders)} cores"
    )
    report(
        "gpu_scores",
        title,
        rows,
        gpu=gpu[0] if gpu else None,
        server_cores=len(of_servers),
        load_cores=len(senders),
    )


if __name__ == "__main__":
    main()
