"""Rows of an n-gram table for a language model's layer: `RowGather` against a plain kernel over the same
registered memory (UVA), as inference engines read such tables.

One table of fp8_e4m3_block32, D 256, in registered host memory; bf16 out, ids on the device, wall time of a
call that is waited for, each in its turn, other ids every time. 12,288 ids are a decode step of 256 sequences
with 48 rows each, 400,000 a prefill. Each way's vectors are compared with the plain kernel's first. Ahead:
2 ms of matrix products alone, and with a call that begins before and is waited for after them. Then engine
processes attach the same table: seconds, and memory of each (PSS).

    python benchmarks/gpu_ngram.py --rows 60000000      # needs 16 GiB of /dev/shm, and as much HBM
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from common import console, report, shared_folder
from make_model import publish_random

from tableside.loader.segment.registration import Registration
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat
from tableside.torch import RowGather

DIM, ROW_FORMAT, CALLS, ROUNDS = 256, RowFormat.FP8_E4M3_BLOCK32, (12_288, 400_000), 20
WAYS = {
    "in place": ("zero_copy", None),
    "cached, 7 %": ("cached", 0.07),
    "in HBM": ("hbm", None),
    "by the CPU": ("host", None),
}
CHILD = """
import sys, time
import torch
torch.cuda.init(); torch.zeros(1, device="cuda")
from tableside.torch import RowGather
started = time.perf_counter()
where = dict(root=sys.argv[1], verify=sys.argv[2], device="cuda:0", placement="zero_copy")
module = RowGather("lm", "ngram", **where)
seconds = time.perf_counter() - started
module(torch.zeros(8, dtype=torch.int64, device="cuda")); torch.cuda.synchronize()
print(seconds, flush=True)
input()
"""


@triton.jit  # type: ignore[untyped-decorator]
def plain(ids, out, table: tl.int64, row_bytes: tl.constexpr, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64)
    row = table + tl.load(ids + place) * row_bytes
    column = tl.arange(0, dim)
    value = tl.load((row + column).to(tl.pointer_type(tl.float8e4nv))).to(tl.float32)
    scale = tl.load((row + dim + column // 32).to(tl.pointer_type(tl.uint8))).to(tl.int32)
    value = value * (scale << 23).to(tl.float32, bitcast=True)
    tl.store(out + place * dim + column, value.to(tl.bfloat16))


def ids_of(rows: int, count: int, zipf: bool, seed: int) -> torch.Tensor:
    rng = np.random.default_rng((count, zipf, seed))
    if not zipf:
        return torch.from_numpy(rng.integers(0, rows, count)).cuda()
    # By the inverse of the Zipf 1.05 distribution's integral; ranks are spread over the table
    power = -0.05
    found = ((rows**power - 1) * rng.random(count) + 1) ** (1 / power)
    ranks = np.minimum(found.astype(np.int64), rows - 1)
    return torch.from_numpy(ranks * 2_654_435_761 % rows).cuda()


def in_turns(calls: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """Microseconds of a call of each, waited for: medians."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(ROUNDS + 3):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            call(n)
            torch.cuda.synchronize()
            if n >= 3:
                found[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) * 1e6 for name, times in found.items()}


def measure(modules: dict[str, RowGather], table: int, rows: int) -> list[dict[str, Any]]:
    found = []
    for count in CALLS:
        for zipf in (False, True):
            batches = [ids_of(rows, count, zipf, n) for n in range(ROUNDS + 3)]
            out = torch.empty((count, DIM), dtype=torch.bfloat16, device="cuda")

            def theirs(n: int, batches: list[torch.Tensor] = batches, out: torch.Tensor = out) -> None:
                plain[(len(out),)](batches[n], out, table, ROW_FORMAT.row_bytes(DIM), DIM, num_warps=1)

            def ours(n: int, module: RowGather, batches: list[torch.Tensor] = batches) -> torch.Tensor:
                vectors: torch.Tensor = module(batches[n])
                return vectors

            theirs(0)
            for module in modules.values():
                torch.testing.assert_close(ours(0, module), out, rtol=0, atol=0)
            calls: dict[str, Callable[[int], Any]] = {"plain UVA kernel": theirs}
            for name, module in modules.items():
                calls[name] = partial(ours, module=module)
            times = in_turns(calls)
            # Its pages' addresses are known to the GPU then, as nothing else was read in between
            times |= in_turns({"in HBM, in a row": calls["in HBM"]})
            for name, microseconds in times.items():
                row: dict[str, Any] = {
                    "ids a call": count,
                    "ids": "Zipf 1.05" if zipf else "uniform",
                    "way": name,
                }
                row |= {"us": microseconds, "of the plain kernel": microseconds / times["plain UVA kernel"]}
                found.append(row)
    return found


def ahead(modules: dict[str, RowGather], rows: int) -> list[dict[str, Any]]:
    """Beside 2 ms of matrix products, launched one by one, and in one captured graph."""
    ids = [ids_of(rows, CALLS[0], False, 100 + n) for n in range(ROUNDS + 3)]
    told = ids[0].clone()
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    one = in_turns({"": lambda n: torch.mm(matrix, matrix, out=product)})[""]
    products = max(1, round(2000 / one))

    def dense(n: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix, out=product)

    def both(n: int, module: RowGather) -> torch.Tensor:
        pending = module.prefetch(ids[n])
        dense(n)
        return pending.wait()

    def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
        return graph, found

    def of_graph(module: RowGather) -> torch.Tensor:
        pending = module.prefetch(told)
        dense(0)
        return pending.wait()

    def replay(n: int, graph: torch.cuda.CUDAGraph) -> None:
        told.copy_(ids[n])
        graph.replay()

    alone, _ = captured(lambda: dense(0))
    calls: dict[str, Callable[[int], Any]] = {
        "products": dense,
        "products, captured": partial(replay, graph=alone),
    }
    for name, module in modules.items():
        expected = module(ids[5])
        torch.testing.assert_close(both(5, module), expected, rtol=0, atol=0)
        calls[name] = partial(both, module=module)
        if WAYS[name][0] not in ("cached", "host"):
            graph, found = captured(partial(of_graph, module))
            replay(5, graph)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            calls[f"{name}, captured"] = partial(replay, graph=graph)
    times = in_turns(calls)
    result = []
    for name, microseconds in times.items():
        products_alone = times["products, captured" if name.endswith("captured") else "products"]
        result.append({"way": name, "us": microseconds, "of the products": microseconds / products_alone})
    return result


def processes(root: str, size: int) -> list[dict[str, Any]]:
    """Two engine processes, and one that comes late and verifies nothing again."""
    found, running = [], []
    for verify in ("full", "full", "header"):
        command = [sys.executable, "-c", CHILD, root, verify]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        found.append({"verify": verify, "attach_s": float(process.stdout.readline())})
    for row, process in zip(found, running, strict=True):
        lines = Path(f"/proc/{process.pid}/smaps").read_text().split("\n")
        pss = kept = 0
        for line in lines:
            if "-" in line.split(" ")[0] and not line.endswith("kB"):
                kept = root in line
            elif kept and line.startswith("Pss:"):
                pss += int(line.split()[1]) * 1024
        row |= {"pss_bytes": pss, "of the table": pss / size}
    for process in running:
        process.communicate("\n", timeout=60)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000_000)
    rows = parser.parse_args().rows
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; torch finds none here")
    with shared_folder() as root:
        started = time.perf_counter()
        publish_random(root, "lm", {"ngram": (rows, DIM, ROW_FORMAT.label)}, pooling="none")
        segment = Model(root, "lm").attach(verify="header")
        console.print(f"made {segment.size / 1e9:.1f} GB in {time.perf_counter() - started:.0f} s")
        shared = processes(str(root), segment.size)
        registration = Registration(segment, torch.device("cuda:0"))
        stored = segment.header.tables[0]
        table = registration.view(stored.offset, stored.bytes).data_ptr()
        modules = {}
        for name, (placement, share) in WAYS.items():
            budget = None if share is None else int(share * segment.size)
            where: dict[str, Any] = {"root": str(root), "device": "cuda:0", "verify": "header"}
            modules[name] = RowGather("lm", "ngram", placement=placement, hbm_budget=budget, **where)
        result = measure(modules, table, rows)
        beside = ahead(modules, rows)
        for module in modules.values():
            module.check()
    report(
        "gpu_ngram",
        f"n-gram rows: {rows:,} x {DIM}, {ROW_FORMAT.label}",
        result,
        ahead=beside,
        processes=shared,
        gpu=torch.cuda.get_device_name(),
        cores=len(os.sched_getaffinity(0)),
    )


if __name__ == "__main__":
    main()
