"""A client whose ids and vectors stay in the GPU's memory: Triton's CUDA shared memory against binary bodies,
over HTTP.

    python benchmarks/gpu_client_shm.py      # 26 features x 4096 bags x 20 ids a request, int8 D 128, all
                                             # tables in HBM

One client with one connection asks one door of one engine process, one request after another. It shares one
allocation by its IPC handle, as tritonclient.utils.cuda_shared_memory does. Requests take turns between

    named       one tensor [bags, ids] a feature, ids and vectors in the region
    compact     kjt.values and kjt in the region, kjt.lengths in the body
    body        the named form, ids in the request's body and vectors in the answer's

`ids/s` is end to end: from sending a request to the end of its answer, when the vectors lie in the region, or
with the client. Vectors are compared with the CPU's kernel before. The goal is 3 G ids/s with regions.
`kernels us` and the other parts of a batch come from /metrics.
"""

import argparse
import base64
import ctypes
import http.client
import statistics
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson
from common import console, report, shared_folder
from gpu_server import DIM, FEATURES, ROWS, gpus, mean_stages, serve, stage_sums
from make_model import publish_random

from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.cli.commands.bench import HEADER_LENGTH

BAGS, IDS = 4096, 20
COUNT = FEATURES * BAGS * IDS
IDS_BYTES, OUT_BYTES = 8 * COUNT, 4 * FEATURES * BAGS * DIM
ROUNDS, CALLS, GOAL = 9, 20, 3e9
STAGED = 48  # calls that the parts of a batch are the means of, some of which are timed
CHECKED = 3  # features, of which all vectors are compared


class Memory:
    """An allocation of a GPU that other processes may open. tensor: uint8 over it."""

    def __init__(self, size: int) -> None:
        import torch

        from tableside.quant.device.cuda import driver, tensor_over

        device = torch.device("cuda:0")
        torch.zeros(1, device=device)  # makes the context
        library, address = driver(), ctypes.c_uint64()
        self._check(library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
        handle = ctypes.create_string_buffer(64)
        self._check(library.cuIpcGetMemHandle(handle, address))
        self.handle = base64.b64encode(handle.raw).decode()
        self.tensor = tensor_over(address.value, size, device, None)

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise SystemExit(f"CUDA does not give memory that can be shared (error {code})")

    def put(self, values: np.ndarray[Any, Any], at: int) -> None:
        import torch

        self.tensor[at : at + values.nbytes].copy_(torch.from_numpy(values.reshape(-1).view(np.uint8)))
        torch.cuda.synchronize()

    def get(self, at: int, size: int) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self.tensor[at : at + size].cpu().numpy()
        return found


class Client:
    """One connection."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port or 0, timeout=60)

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
        self._connection.request("POST", path, body, headers or {})
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise SystemExit(
                f"{path} was answered with {response.status}: {answer[:500].decode(errors='replace')}"
            )
        return answer


def place(at: int, size: int) -> dict[str, Any]:
    return {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": at}


def requests_of(ids: np.ndarray[Any, Any]) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Each way's body and headers. ids: int64 [features, bags, ids]."""
    each, out = IDS_BYTES // FEATURES, OUT_BYTES // FEATURES
    names = [f"t{i}" for i in range(FEATURES)]
    inputs = [{"name": n, "datatype": "INT64", "shape": [BAGS, IDS]} for n in names]
    placed = [{**entry, "parameters": place(k * each, each)} for k, entry in enumerate(inputs)]
    outputs = [{"name": n, "parameters": place(IDS_BYTES + k * out, out)} for k, n in enumerate(names)]
    lengths = np.full((FEATURES, BAGS), IDS, np.int32).tobytes()
    compact: dict[str, Any] = {
        "inputs": [
            {"name": "kjt.values", "datatype": "INT64", "shape": [COUNT], "parameters": place(0, IDS_BYTES)},
            {
                "name": "kjt.lengths",
                "datatype": "INT32",
                "shape": [FEATURES, BAGS],
                "parameters": {"binary_data_size": len(lengths)},
            },
        ],
        "outputs": [{"name": "kjt", "parameters": place(IDS_BYTES, OUT_BYTES)}],
    }
    head = orjson.dumps(compact)
    sent = [{**entry, "parameters": {"binary_data_size": each}} for entry in inputs]
    whole = orjson.dumps({"inputs": sent, "parameters": {"binary_data_output": True}})
    return {
        "named": (orjson.dumps({"inputs": placed, "outputs": outputs}), {}),
        "compact": (head + lengths, {HEADER_LENGTH: str(len(head))}),
        "body": (whole + ids.tobytes(), {HEADER_LENGTH: str(len(whole))}),
    }


def vectors_of(way: str, feature: int, memory: Memory, answer: bytes) -> np.ndarray[Any, Any]:
    """A feature's vectors, fp32 [bags, D]."""
    if way == "compact":
        return memory.get(IDS_BYTES, OUT_BYTES).view(np.float32).reshape(BAGS, FEATURES, DIM)[:, feature]
    out = OUT_BYTES // FEATURES
    if way == "named":
        return memory.get(IDS_BYTES + feature * out, out).view(np.float32).reshape(BAGS, DIM)
    start = len(answer) - OUT_BYTES + feature * out
    return np.frombuffer(answer, np.float32, BAGS * DIM, start).reshape(BAGS, DIM)


def measure(url: str, calls: dict[str, Callable[[], bytes]]) -> list[dict[str, Any]]:
    for call in calls.values():
        for _ in range(5):
            call()
    seconds: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(ROUNDS):
        for way, call in calls.items():
            for _ in range(CALLS if way != "body" else 2):
                started = time.perf_counter()
                call()
                seconds[way].append(time.perf_counter() - started)
    stages = {}
    for way, call in calls.items():
        before = stage_sums(url)
        for _ in range(STAGED):
            call()
        stages[way] = mean_stages(before, stage_sums(url))
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    return [
        {
            "way": way,
            "call us": 1e6 * medians[way],
            "p99 us": 1e6 * float(np.percentile(seconds[way], 99)),
            "G ids/s": COUNT / medians[way] / 1e9,
            "of goal": COUNT / medians[way] / GOAL,
            "times body": medians["body"] / medians[way],
            **stages[way],
        }
        for way in calls
    ]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    gpu = gpus()
    if not gpu:
        raise SystemExit("nvidia-smi is not here; expected a host with a GPU")
    ids = np.random.default_rng(0).integers(0, ROWS, (FEATURES, BAGS, IDS))
    with shared_folder() as root:
        publish_random(root, "ads", {f"t{i}": (ROWS, DIM, "int8") for i in range(FEATURES)})
        tables = Model(root, "ads").attach(verify="header").tables
        with serve(root, ["ads"], "--devices", 0, "--placement", "hbm", "--allow-client-shm") as server:
            client, memory = Client(server.url), Memory(IDS_BYTES + OUT_BYTES)
            memory.put(ids, 0)
            asked = {"raw_handle": {"b64": memory.handle}, "device_id": 0, "byte_size": IDS_BYTES + OUT_BYTES}
            client.post("/v2/cudasharedmemory/region/r/register", orjson.dumps(asked))
            requests = requests_of(ids)
            calls: dict[str, Callable[[], bytes]] = {
                way: lambda way=way: client.post("/v2/models/ads/infer", *requests[way])  # type: ignore[misc]
                for way in requests
            }
            for way, call in calls.items():
                memory.put(np.zeros(OUT_BYTES, np.uint8), IDS_BYTES)
                answer = call()
                for feature in range(0, FEATURES, FEATURES // CHECKED):
                    lengths = np.full(BAGS, IDS, np.int32)
                    expected = choose().lookup(
                        tables[f"t{feature}"], ids[feature].reshape(-1), lengths, pooling=Pooling.SUM
                    )
                    found = vectors_of(way, feature, memory, answer)
                    np.testing.assert_allclose(
                        found, expected, rtol=1e-3, atol=1e-3, err_msg=f"{way}, feature {feature}"
                    )
            rows = measure(server.url, calls)
            for row in rows:
                console.print(row)
            client.post("/v2/cudasharedmemory/unregister", b"")
    title = (
        f"one client's requests of {FEATURES} features x {BAGS} x {IDS} ids, int8 D {DIM} in HBM, "
        f"tensors in CUDA shared memory"
    )
    report("gpu_client_shm", title, rows, gpu=gpu[0])


if __name__ == "__main__":
    main()
