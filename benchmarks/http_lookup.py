"""How much of a server's time is lookups: binary lookups of 26 features against an echo of the same number of bytes.

Both routes run in the same workers of the same server, in turns: the echo reads the same request and answers as many bytes as
the lookup does, the request's own. The load comes from one process of its own over loopback. Correctness is asserted first.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import console, report, shared_folder
from make_model import publish_random

from tableside.loader.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.cli import bench
from tableside.serving.http.asgi import Receive, Scope, Send, holding, read_body, respond
from tableside.serving.server import serve
from tableside.serving.settings import ServerSettings

FEATURES, IDS, BATCH, DIM, ROWS = 26, 20, 32, 64, 200_000
SECONDS, ROUNDS = 3.0, 5
OUT_BYTES = FEATURES * BATCH * DIM * 4


def make_echo(settings: ServerSettings) -> Any:
    """The server's application with one more route, in the worker."""
    from tableside.serving.http.app import Application

    class Echo(Application):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("path") != "/echo":
                await super().__call__(scope, receive, send)
                return
            with holding(scope, self.in_flight) as hold:
                body = await read_body(scope, receive, settings.max_body_bytes, hold)
            await respond(send, 200, (), body, memoryview(body)[: OUT_BYTES - len(body)])

    return Echo(settings)


def run_server(root: str, workers: int) -> None:
    """The server's process."""
    sys.exit(serve(ServerSettings(models=("ads",), root=Path(root), port=0, workers=workers, drain_s=0), make=make_echo))


def check_answer(root: Path, url: str) -> None:
    """Every vector of one request equals the engine's own."""
    from tableside.serving.client import Client

    segment = Model(root, "ads").attach(verify="header")
    rng = np.random.default_rng(5)
    ids = {t: rng.integers(0, ROWS, (BATCH, IDS)) for t in segment.tables}
    with Client(url) as client:
        found = client.lookup("ads", ids)
    for name, table in segment.tables.items():
        lengths = np.full(BATCH, IDS, np.int32)
        expected = choose().lookup(table, ids[name].reshape(-1), lengths, pooling=Pooling.SUM)
        np.testing.assert_array_equal(found[name], expected)


def measure(root: Path, workers: int, concurrency: int, zipf: float | None) -> dict[str, Any]:
    """One server, both routes in turns."""
    command = [sys.executable, __file__, "--server", str(root), str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]  # type: ignore[index]
        check_answer(root, url)
        described = {
            "name": "ads",
            "tables": [{"name": f"t{i}", "rows": ROWS} for i in range(FEATURES)],
            "features": [{"name": f"t{i}", "table": f"t{i}"} for i in range(FEATURES)],
        }
        lookups = bench.make_requests(described, url, BATCH, IDS, zipf)
        body_bytes = len(lookups[0]) - lookups[0].index(b"\r\n\r\n") - 4
        echoes = [bench.request_bytes(f"{url}/echo", {"Content-Type": "application/octet-stream"}, bytes(body_bytes))]
        loads: dict[str, list[bench.Load]] = {"lookup": [], "echo": []}
        for requests in (lookups, echoes):
            bench.run(url, requests, concurrency=concurrency, seconds=0.5)
        for _ in range(ROUNDS):
            for name, requests in (("lookup", lookups), ("echo", echoes)):
                loads[name].append(bench.run(url, requests, concurrency=concurrency, seconds=SECONDS / ROUNDS))
        assert all(load.failed == 0 for found in loads.values() for load in found)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    rate = {name: float(np.median([load.requests_per_s for load in found])) for name, found in loads.items()}
    tail = {name: np.concatenate([load.latencies_s for load in found]) for name, found in loads.items()}
    return {
        "workers": workers,
        "connections": concurrency,
        "ids": "uniform" if zipf is None else f"zipf {zipf}",
        "lookup req/s": rate["lookup"],
        "echo req/s": rate["echo"],
        "ratio": rate["lookup"] / rate["echo"],
        "lookup p50 ms": float(np.percentile(tail["lookup"], 50) * 1e3),
        "lookup p99 ms": float(np.percentile(tail["lookup"], 99) * 1e3),
        "echo p99 ms": float(np.percentile(tail["echo"], 99) * 1e3),
        "M ids/s": rate["lookup"] * FEATURES * IDS * BATCH / 1e6,
    }


def main() -> None:
    if sys.argv[1:2] == ["--server"]:
        run_server(sys.argv[2], int(sys.argv[3]))
    with shared_folder() as root:
        publish_random(root, "ads", {f"t{i}": (ROWS, DIM, "int8") for i in range(FEATURES)})
        size = Model(root, "ads").path(1).stat().st_size
        console.print(f"segment {size / 1e6:,.0f} MB, {os.cpu_count()} cores, load generator on the same machine")
        rows = [measure(root, *shape, zipf) for zipf in (None, 1.05) for shape in ((1, 1), (1, 8), (2, 8), (2, 32))]
    title = f"binary lookup of {FEATURES} features x {IDS} ids x batch {BATCH}, int8 D {DIM}, against an echo of as many bytes"
    report("http_lookup", title, rows, request_bytes=FEATURES * IDS * BATCH * 8, response_bytes=OUT_BYTES)


if __name__ == "__main__":
    main()
