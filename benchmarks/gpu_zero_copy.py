"""Rows that stay in host memory: our lookup against FBGEMM's zero-copy kernel, over the same registered
segment, in turns.

One int8 table of D 128, random ids, unpooled, fp16 out, over 16 and 32 GiB. Both go from ids in host memory
to vectors in host memory, by wall time: ours as a server's batch runs (`GpuBackend.run`), FBGEMM's with
page-locked buffers for ids and vectors. Ours in three ways: read in place by the GPU, gathered by the CPU
with one thread and with several. Each result is compared with FBGEMM's first.

    python benchmarks/gpu_zero_copy.py --gib 16 32      # needs as much free /dev/shm
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from common import console, report, shared_folder
from make_model import publish_random

from tableside.loader.segment.registration import Registration
from tableside.loader.tbe.tbe import TbeTable, bind, init_tbe
from tableside.loader.versions.versions import Model
from tableside.quant import Lookup, Plan, Pooling, Precision, RowFormat, choose
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.batch import LookupResult

DIM, CALLS = 128, (500, 2_000, 5_000, 20_000, 500_000)
TARGETS = {20_000: 2.0, 500_000: 3.0}
NEVER = 1 << 60


def in_turns(calls: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    """Seconds of a call of each, waited for: medians over rounds in which each has its turn, with other
    ids every time."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(rounds + 2):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            call(n)
            if n >= 2:
                found[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in found.items()}


def of_turn(call: Callable[[Any], Any], inputs: Sequence[Any], turn: int) -> Any:
    """A call with the inputs of its turn."""
    return call(inputs[turn % len(inputs)])


def run_plan(backend: GpuBackend, plan: Plan, inputs: bytes) -> Any:
    """One request, as a server runs it."""
    return backend.batches.run([(plan, inputs)])


class Theirs:
    """FBGEMM's module, from ids in host memory to vectors in host memory. fp16 [rows, DIM], page-locked."""

    def __init__(self, module: Any, rows: int, device: torch.device) -> None:
        self._module, self._device = module, device
        self._ids = torch.empty(rows, dtype=torch.int64, pin_memory=True)
        self._offsets = torch.arange(rows + 1, device=device)
        self.vectors = torch.empty((rows, DIM), dtype=torch.float16, pin_memory=True)

    def __call__(self, ids: np.ndarray) -> torch.Tensor:
        self._ids.numpy()[:] = ids
        found = torch.as_tensor(self._module(self._ids.to(self._device, non_blocking=True), self._offsets))
        self.vectors.copy_(found, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self.vectors


def measure(gib: int, threads: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = gib * 2**30 // RowFormat.INT8.row_bytes(DIM)
    device = torch.device("cuda:0")
    found = []
    with shared_folder() as root:
        console.print(f"making {gib} GiB: {rows:,} rows")
        publish_random(root, "big", {"t": (rows, DIM, "int8")}, pooling="none")
        segment = Model(root, "big").attach(verify="header")
        registration = Registration(segment, device)
        console.print(
            f"registered in {registration.seconds:.1f} s, {segment.size / registration.seconds / 1e9:.0f} "
            "GB/s"
        )
        stored = segment.header.tables[0]
        view = registration.view(stored.offset, stored.bytes)
        module = init_tbe(
            [TbeTable("t", rows, DIM, RowFormat.INT8)], pooling=Pooling.NONE, device="cuda:0", half=True
        )
        bind(module, segment, ["t"], registration.view(0, segment.size))
        ways = {"in place": GpuBackend("cuda:0", choose(), gather_from=NEVER)}
        ways |= {
            f"gathered, {n} threads": GpuBackend("cuda:0", choose(), gather_from=1, threads=n)
            for n in threads
        }
        for count in CALLS:
            rng = np.random.default_rng(count)
            batches = [rng.integers(0, rows, count) for _ in range(12)]
            theirs = Theirs(module, count, device)
            expected = theirs(batches[0]).float()
            inputs = [b.tobytes() for b in batches]
            calls: dict[str, Callable[[int], Any]] = {"fbgemm": partial(of_turn, theirs, batches)}
            for name, fused in ways.items():
                lookup = Lookup(
                    fused.place("zero_copy", segment.tables["t"], view),
                    Pooling.NONE,
                    0,
                    count,
                    0,
                    Precision.FP16,
                )
                plan = fused.plan([lookup], fused.threads)
                ((result,), _) = fused.batches.run([(plan, inputs[0])])
                assert isinstance(result, LookupResult)
                np.testing.assert_allclose(
                    result.outputs.view(np.float16).reshape(-1, DIM), expected, rtol=2e-3, atol=2e-2
                )
                calls[name] = partial(of_turn, partial(run_plan, fused, plan), inputs)
            times = in_turns(calls, 15)
            for name in ways:
                row = {"GiB": gib, "rows a call": count, "ours": name, "ours_ms": times[name] * 1e3}
                row |= {"fbgemm_ms": times["fbgemm"] * 1e3, "times_faster": times["fbgemm"] / times[name]}
                found.append({**row, "rows_per_s": count / times[name]})
                console.print(found[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gib", type=int, nargs="+", default=[16, 32], help="sizes of the segment (default: 16 32)"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; torch finds none here")
    threads = tuple(sorted({1, 4, 8, 16} & set(range(1, 1 + len(os.sched_getaffinity(0))))))
    rows = [row for gib in arguments.gib for row in measure(gib, threads)]
    missed = []
    for gib in arguments.gib:
        for count, target in TARGETS.items():
            ways = {
                r["ours"]: r["times_faster"] for r in rows if (r["GiB"], r["rows a call"]) == (gib, count)
            }
            way = max(ways, key=lambda name: ways[name])
            if ways[way] < target:
                missed.append(f"{gib} GiB, {count:,} rows, {way}: {ways[way]:.1f} x < {target}")
    report("gpu_zero_copy", "Rows in host memory", rows, gpu=torch.cuda.get_device_name(0), missed=missed)


if __name__ == "__main__":
    main()
