"""Rows that stay in host memory: our lookup against FBGEMM's zero-copy kernel, over the same registered segment, in turns.

One int8 table of D 128, random ids, unpooled, fp16 out: 20,000 and 500,000 rows a call over 16 and 64 GiB. Ours in three ways:
read in place by the GPU, gathered by the CPU with one thread and with several. Each result is compared with FBGEMM's first.

    python benchmarks/gpu_zero_copy.py --gib 16 64      # needs as much free /dev/shm
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import console, report, shared_folder
from make_model import publish_random

from tableside.loader.registration import Registration
from tableside.loader.tbe import TbeTable, bind, init_tbe
from tableside.loader.versions import Model
from tableside.quant import Lookup, Plan, Pooling, Precision, RowFormat, choose
from tableside.quant.gpu.backend import GpuBackend

DIM, CALLS = 128, (500, 2_000, 5_000, 20_000, 500_000)
TARGETS = {20_000: 2.0, 500_000: 3.0}
NEVER = 1 << 60


def seconds(call: Callable[[int], Any], rounds: int) -> float:
    """Seconds of a call, waited for: the median over different ids each time."""
    found = []
    for n in range(rounds + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call(n)
        torch.cuda.synchronize()
        if n >= 2:
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def measure(gib: int, threads: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = gib * 2**30 // RowFormat.INT8.row_bytes(DIM)
    device = torch.device("cuda:0")
    found = []
    with shared_folder() as root:
        console.print(f"making {gib} GiB: {rows:,} rows")
        publish_random(root, "big", {"t": (rows, DIM, "int8")}, pooling="none")
        segment = Model(root, "big").attach(verify="header")
        registration = Registration(segment, device)
        console.print(f"registered in {registration.seconds:.1f} s, {segment.size / registration.seconds / 1e9:.0f} GB/s")
        stored = segment.header.tables[0]
        view = registration.view(stored.offset, stored.bytes)
        module = init_tbe([TbeTable("t", rows, DIM, RowFormat.INT8)], pooling=Pooling.NONE, device="cuda:0", half=True)
        bind(module, segment, ["t"], registration.view(0, segment.size))
        ways = {"in place": GpuBackend("cuda:0", choose(), gather_from=NEVER)}
        ways |= {f"gathered, {n} threads": GpuBackend("cuda:0", choose(), gather_from=1, threads=n) for n in threads}
        for count in CALLS:
            rng = np.random.default_rng(count)
            batches = [rng.integers(0, rows, count) for _ in range(12)]
            on_device = [torch.from_numpy(b).to(device) for b in batches]
            offsets = torch.arange(count + 1, device=device)

            def theirs(n: int, ids: list[torch.Tensor] = on_device, offsets: torch.Tensor = offsets) -> torch.Tensor:
                return torch.as_tensor(module(ids[n % len(ids)], offsets))

            expected = theirs(0).float().cpu()
            base = seconds(theirs, 10)
            for name, fused in ways.items():
                lookup = Lookup(fused.map_host(segment.tables["t"], view), Pooling.NONE, 0, count, 0, Precision.FP16)
                plan = fused.plan([lookup], fused.threads)
                result = fused.run([(plan, batches[0].tobytes())])[0]
                assert isinstance(result, np.ndarray)
                np.testing.assert_allclose(result.view(np.float16).reshape(-1, DIM), expected, rtol=2e-3, atol=2e-2)
                inputs = [b.tobytes() for b in batches]
                # From ids in host memory to vectors in host memory; FBGEMM's stay on the device, as in `on_device`.

                def run(n: int, fused: GpuBackend = fused, plan: Plan = plan, inputs: list[bytes] = inputs) -> object:
                    return fused.run([(plan, inputs[n % len(inputs)])])

                ours = seconds(run, 10)
                times = [fused.run_timed([(plan, i)])[1] for i in inputs]
                to_device = statistics.median(t.staging + t.copy_in + t.kernels for t in times if t)
                found.append(
                    {
                        "GiB": gib,
                        "rows a call": count,
                        "ours": name,
                        "ours_ms": ours * 1e3,
                        "fbgemm_ms": base * 1e3,
                        "on_device_ms": to_device * 1e3,
                        "times_faster": base / to_device,
                        "rows_per_s": count / to_device,
                    }
                )
                console.print(found[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, nargs="+", default=[16, 64], help="sizes of the segment (default: 16 64)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; torch finds none here")
    threads = tuple(sorted({1, 4, 8, 16} & set(range(1, 1 + len(os.sched_getaffinity(0))))))
    rows = [row for gib in arguments.gib for row in measure(gib, threads)]
    missed = []
    for gib in arguments.gib:
        for count, target in TARGETS.items():
            best = max(r["times_faster"] for r in rows if (r["GiB"], r["rows a call"]) == (gib, count))
            if best < target:
                missed.append(f"{gib} GiB, {count:,} rows: {best:.1f} x < {target}")
    report("gpu_zero_copy", "Rows in host memory", rows, gpu=torch.cuda.get_device_name(0), missed=missed)


if __name__ == "__main__":
    main()
