"""Our GPU kernel against FBGEMM's: the same rows in HBM, many tables a launch, in turns; and what a call
costs the host.

Kernel times are those of replays of a captured graph, so that neither side pays for its Python. Call times
are wall times of single calls as PyTorch modules make them, waited for, everything on the device already.
Each pair of results is compared before it is timed. The floor of a case is what it must move, in sectors of
32 bytes, at the speed of the device's own copies.

    python benchmarks/gpu_lookup.py                 # one GPU, 24 GB of its memory, 4 GB of /dev/shm
    python benchmarks/gpu_lookup.py --sweep         # every shape of the kernel instead, int8 and int4
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import console, report, shared_folder
from device_lookup import DeviceLookup
from make_model import publish_random

from tableside.loader.segment.segment import Segment
from tableside.loader.tbe.tbe import TbeTable, bind, init_tbe
from tableside.loader.versions.versions import Model
from tableside.quant import Lookup, Pooling, Precision, RowFormat, choose
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.kernels.launch_config import LaunchConfig, LaunchConfigs
from tableside.quant.gpu.residence.tables import DeviceTable
from tableside.serving.cli.commands.bench import draw_ids

TABLES, ROWS, IDS = 26, 500_000, 20
SECTOR = 32
TARGETS = {"int8": 0.5, "int4": 0.6, "fp8": 0.6, "fp16": 0.9}  # of FBGEMM's time, pooled, batch 4096, D 128
OVERHEAD_US, COPY_SHARE = 60.0, 0.7


@dataclass(frozen=True)
class Case:
    """One shape of work."""

    row_format: str
    dim: int
    batch: int
    zipf: float | None = None
    pooled: bool = True


def cases() -> Iterator[Case]:
    for row_format, zipf in product(TARGETS, (None, 1.05)):
        yield Case(row_format, 128, 4096, zipf)
    for batch in (64, 512):
        yield Case("int8", 128, batch)
    for dim in (32, 64, 256):
        yield Case("int8", dim, 4096)
    for batch in (64, 512, 4096):
        yield Case("int8", 128, batch, pooled=False)


class Published(NamedTuple):
    """A model, a copy of its segment in HBM for FBGEMM, and its tables in HBM. Captured calls keep both in
    memory."""

    segment: Segment
    weights: torch.Tensor
    tables: list[DeviceTable]


class Work:
    """A case's ids on the device, and both sides ready to be called."""

    def __init__(
        self, case: Case, published: Published, device: torch.device, configs: LaunchConfigs
    ) -> None:
        segment, weights, tables = published
        names = [t.name for t in segment.header.tables]
        rng = np.random.default_rng(case.batch)
        self.ids = np.concatenate(
            [draw_ids(rng, ROWS, (case.batch, IDS), case.zipf).reshape(-1) for _ in names]
        )
        pooling = Pooling.SUM if case.pooled else Pooling.NONE
        self.backend = GpuBackend(str(device), choose(), configs=configs)
        lookups, at, each = [], 0, case.batch * IDS
        for n, table in enumerate(tables):
            lookups.append(
                Lookup(
                    table, pooling, 8 * each * n, each, at, Precision.FP16, bags=case.batch, bag_length=IDS
                )
            )
            at += lookups[-1].out_bytes
        self.plan = self.backend.plan(lookups)
        self.lookup = DeviceLookup(self.backend, tables, IDS if case.pooled else 1)
        self.host_inputs = self.ids.tobytes()
        specs = [
            TbeTable(t.name, t.rows, t.dim, RowFormat.parse(t.row_format)) for t in segment.header.tables
        ]
        self.module = init_tbe(specs, pooling=pooling, device=str(device), half=True)
        bind(self.module, segment, names, weights)
        self.indices = torch.from_numpy(self.ids).to(device)
        self.offsets = torch.arange(0, self.ids.size + 1, IDS if case.pooled else 1, device=device)
        self.staged = self.lookup.stage(self.indices)
        self.case, self.names, self.out_bytes = case, names, at

    def ours(self) -> torch.Tensor:
        return self.lookup(self.indices)

    def our_kernels(self) -> torch.Tensor:
        """As `ours`, of a call whose jobs are on the device."""
        return self.lookup.run(self.staged)

    def theirs(self) -> torch.Tensor:
        return torch.as_tensor(self.module(self.indices, self.offsets))

    def check(self) -> None:
        """Both sides give the same vectors, within the rounding of their sums."""
        found, theirs = self.ours(), self.theirs()
        torch.cuda.synchronize()
        self.lookup.check()
        torch.testing.assert_close(found.float(), theirs.reshape(found.shape).float(), rtol=2e-3, atol=2e-2)

    def floor_bytes(self) -> int:
        """What has to move: the sectors of each row, the ids, the vectors."""
        row_format = RowFormat.parse(self.case.row_format)
        row_bytes, used = row_format.row_bytes(self.case.dim), row_format.used_bytes(self.case.dim)
        sectors = [-(-(at % SECTOR + used) // SECTOR) for at in range(0, SECTOR * row_bytes, row_bytes)]
        return int(self.ids.size * (statistics.mean(sectors) * SECTOR + 8) + self.out_bytes)


def graph_seconds(call: Callable[[], Any], rounds: int = 9, repeats: int = 10) -> float:
    """Seconds of a call's kernels: the median replay of a graph of `repeats` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(found)


def wall_seconds(call: Callable[[], Any], calls: int = 200) -> float:
    """Seconds of a call with everything, waited for: the median."""
    found = []
    for n in range(calls + 20):
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if n >= 20:
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def copy_bytes_a_second(device: torch.device) -> float:
    """The device's own copies, read and written bytes. Not in a graph: there they are slower."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / wall_seconds(lambda: target.copy_(source), calls=20)


@functools.cache
def publish(root: Path, row_format: str, dim: int) -> Published:
    name = f"{row_format}-{dim}"
    if not (root / name).exists():
        console.print(f"making {TABLES} tables of {ROWS:,} rows, {row_format}, D {dim}")
        publish_random(root, name, {f"t{i:02}": (ROWS, dim, row_format) for i in range(TABLES)})
    segment = Model(root, name).attach(verify="header")
    backend = GpuBackend("cuda:0", choose())
    tables = [backend.place("hbm", segment.tables[t.name]) for t in segment.header.tables]
    return Published(segment, torch.from_numpy(segment.mapping.bytes.copy()).cuda(), tables)


def row(case: Case, **figures: Any) -> dict[str, Any]:
    ids = "uniform" if case.zipf is None else f"Zipf {case.zipf}"
    kind = "sum" if case.pooled else "none"
    return {
        "format": case.row_format,
        "D": case.dim,
        "batch": case.batch,
        "ids": ids,
        "pooling": kind,
        **figures,
    }


def compare(root: Path, device: torch.device) -> None:
    copies = copy_bytes_a_second(device)
    rows, missed = [], []
    for case in cases():
        work = Work(case, publish(root, case.row_format, case.dim), device, LaunchConfigs())
        work.check()
        ours, theirs = graph_seconds(work.our_kernels), graph_seconds(work.theirs)
        again = graph_seconds(work.our_kernels)
        floor = work.floor_bytes() / copies
        # Wall times of a call: everything on the device already; and from host memory to host memory.
        host_to_host = functools.partial(work.backend.batches.run, [(work.plan, work.host_inputs)])
        device_wall, host_wall, their_wall = (
            wall_seconds(work.ours),
            wall_seconds(host_to_host),
            wall_seconds(work.theirs),
        )
        rows.append(
            row(
                case,
                ours_us=ours * 1e6,
                again_us=again * 1e6,
                fbgemm_us=theirs * 1e6,
                ratio=ours / theirs,
                floor_us=floor * 1e6,
                share_of_copy=floor / ours,
                call_us=device_wall * 1e6,
                fbgemm_call_us=their_wall * 1e6,
                call_ratio=device_wall / their_wall,
                overhead_us=(device_wall - ours) * 1e6,
                host_to_host_us=host_wall * 1e6,
            )
        )
        target = TARGETS[case.row_format]
        if case.pooled and case.batch == 4096 and case.dim == 128 and ours / theirs > target:
            missed.append(f"{case.row_format} {ours / theirs:.2f} > {target}")
        if device_wall - ours > OVERHEAD_US / 1e6:
            missed.append(
                f"overhead at batch {case.batch}: {(device_wall - ours) * 1e6:.0f} us > {OVERHEAD_US:.0f}"
            )
        console.print(rows[-1])
        del work
        torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name(device)
    report(
        "gpu_lookup",
        "Fused lookup against FBGEMM, all in HBM",
        rows,
        gpu=gpu,
        copy_gb_s=copies / 1e9,
        missed=missed,
    )


def sweep(root: Path, device: torch.device) -> None:
    rows = []
    for row_format, pooled in product(("int8", "int4"), (True, False)):
        case = Case(row_format, 128, 4096, pooled=pooled)
        published = publish(root, row_format, 128)
        for ids, columns, warps in product(
            (2, 4, 5, 10) if pooled else (1,), (32, 64, 128, 256), (1, 2, 4, 8)
        ):
            if not 32 * warps <= columns <= 64 * warps:
                continue
            config = LaunchConfig(ids, columns, warps)
            work = Work(case, published, device, LaunchConfigs(config, config, config))
            work.check()
            seconds = graph_seconds(work.our_kernels, rounds=5, repeats=5)
            rows.append(row(case, rows_in_flight=ids, columns=columns, warps=warps, us=seconds * 1e6))
            del work
            torch.cuda.empty_cache()
    rows.sort(key=lambda r: (r["format"], r["pooling"], r["us"]))
    report("gpu_lookup_shapes", "Shapes of the fused kernel", rows, gpu=torch.cuda.get_device_name(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sweep", action="store_true", help="time every shape of the kernel instead of comparing"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; torch finds none here")
    device = torch.device("cuda:0")
    with shared_folder() as root:
        (sweep if arguments.sweep else compare)(root, device)


if __name__ == "__main__":
    main()
