"""The servers that http_lookup.py measures, each on one core. They are started by it, as processes of their
own.

    python benchmarks/http_servers.py ours ROOT CORE      Tableside with one worker, and with POST /echo/N in
                                                          that worker
    python benchmarks/http_servers.py fbgemm ROOT CORE    FBGEMM's operator in a plain ASGI application under
                                                          uvicorn
    python benchmarks/http_servers.py echo ROOT CORE      echo.c: POST /echo/N alone

The echo reads a request's body and answers N bytes. The peer takes the compact form and answers it as
Tableside does, by one call of the operator for all features. It checks nothing: neither the header's fields
nor ids, which the operator would read out of bounds. Both have uvloop, httptools, no access log, and the same
allocator settings.
"""

import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import orjson
from http_cases import CASES, DIM, Case

from tableside.serving.http.asgi import HOLD, AsgiResponse, Receive, Response, Scope, Send, read_body
from tableside.serving.settings import ServerSettings
from tableside.serving.workers.server import serve


def make_echo(settings: ServerSettings) -> Any:
    """Tableside's application with one more route, in the worker: POST /echo/N answers the first N bytes
    of body and zeros."""
    from tableside.serving.http.app import Application

    zeros = memoryview(bytes(16 << 20))

    class Echo(Application):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if not scope.get("path", "").startswith("/echo/"):
                await super().__call__(scope, receive, send)
                return
            body = await read_body(scope, receive, settings.max_body_bytes, scope[HOLD])
            size = int(scope["path"].removeprefix("/echo/"))
            parts = [memoryview(body)[:size], zeros[: max(0, size - len(body))]]
            await AsgiResponse(Response(200, (), parts))(scope, receive, send)

    return Echo(settings)


def run_ours(root: Path) -> int:
    models = tuple(case.model for case in CASES)
    return serve(ServerSettings(models=models, root=root, port=0, drain_s=0, scrub_hours=0), make=make_echo)


class Operator:
    """FBGEMM's operator bound to all tables of a model."""

    def __init__(self, root: Path, case: Case) -> None:
        import ctypes

        import torch
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

        from tableside.loader.versions.versions import Model

        self._segment = Model(root, case.model).attach(verify="header")
        tables = list(self._segment.tables.values())
        first, last = tables[0], tables[-1]
        size = last.address + last.packed.size - first.address
        rows = torch.frombuffer((ctypes.c_uint8 * size).from_address(first.address), dtype=torch.uint8)
        self._before = (
            rows,
            torch.empty(0, dtype=torch.uint8),
            torch.full((len(tables),), EmbeddingLocation.HOST.value, dtype=torch.int32),
            torch.tensor([t.address - first.address for t in tables], dtype=torch.int64),
            torch.full((len(tables),), SparseType.INT8.as_int(), dtype=torch.uint8),
            torch.arange(len(tables) + 1, dtype=torch.int32) * DIM,
            len(tables) * DIM,
            *(0, 0, DIM, 0, 0),  # the largest dim of int2, int4, int8, fp16, fp32
        )
        self._behind = (PoolingMode.SUM.value, None, SparseType.FP32.as_int(), None, None, 16, 0, -1, -1)
        self._lookup = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default
        self._offsets = torch.ops.fbgemm.asynchronous_complete_cumsum.default
        self._torch = torch

    def __call__(self, body: bytes, at: int, values: int, bags: int) -> Any:
        """fp32 [bags / features, sum of dims] of int64 ids [values] at byte `at` of a body, and int32
        lengths [bags] behind."""
        ids = self._torch.frombuffer(body, dtype=self._torch.int64, count=values, offset=at)
        lengths = self._torch.frombuffer(body, dtype=self._torch.int32, count=bags, offset=at + 8 * values)
        offsets = self._offsets(lengths.to(self._torch.int64))
        return self._lookup(*self._before, ids, offsets, *self._behind).numpy()


class Peer:
    """A plain ASGI application: POST /v2/models/M/infer in the compact form."""

    def __init__(self, root: Path) -> None:
        self._operators = {f"/v2/models/{case.model}/infer": Operator(root, case) for case in CASES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts, more = [], True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            parts.append(message.get("body", b""))
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        at = int(dict(scope["headers"])[b"inference-header-content-length"])
        values, lengths = (i["shape"] for i in orjson.loads(body[:at])["inputs"])
        found = self._operators[scope["path"]](body, at, values[0], lengths[0] * lengths[1])
        parameters = {"binary_data_size": found.nbytes}
        described = {"name": "kjt", "datatype": "FP32", "shape": found.shape, "parameters": parameters}
        head = orjson.dumps({"model_name": "m", "model_version": "1", "outputs": [described]})
        lengths_header = (b"inference-header-content-length", b"%d" % len(head))
        answer = Response(200, (lengths_header,), [head, memoryview(found.reshape(-1)).cast("B")])
        await AsgiResponse(answer)(scope, receive, send)


def run_peer(root: Path) -> int:
    import torch
    import uvicorn

    import tableside.serving.workers.preload  # noqa: F401  (the same allocator settings as Tableside's workers)

    import fbgemm_gpu  # noqa: F401, isort: skip  (registers the operator)

    warnings.filterwarnings("ignore", "The given buffer is not writable")
    torch.set_num_threads(1)
    sock = socket.create_server(("127.0.0.1", 0), backlog=256)
    application = Peer(root)
    print(f"the peer serves on http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    options: dict[str, Any] = {"loop": "uvloop", "http": "httptools", "lifespan": "off", "access_log": False}
    config = uvicorn.Config(
        application, log_level="warning", date_header=False, server_header=False, **options
    )
    uvicorn.Server(config).run(sockets=[sock])
    return 0


def run_echo(root: Path) -> NoReturn:
    source = Path(__file__).with_name("echo.c")
    program = source.parents[1] / "build/echo"
    program.parent.mkdir(exist_ok=True)
    subprocess.run(["cc", "-O2", "-D_GNU_SOURCE", source, "-o", program], check=True)
    os.execv(program, ["echo"])


def main() -> int:
    what, root, core = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.sched_setaffinity(0, {core})
    return {"ours": run_ours, "fbgemm": run_peer, "echo": run_echo}[what](root)


if __name__ == "__main__":
    sys.exit(main())
