"""Published tables as a PyTorch module on one GPU, beside FBGEMM's module and torch.nn.EmbeddingBag. Wall
time of calls in a row.

    python benchmarks/gpu_torch_module.py --hbm       # 26 tables x 500 k rows, int8 D 128, bags of 20 ids
    python benchmarks/gpu_torch_module.py --processes # the same tables, held by 1 and 2 processes
    python benchmarks/gpu_torch_module.py --cached    # one table of 60 M rows, 10 % of its bytes in HBM,
                                                      # 262,144 ids a call

Every side gets what its users give it, on the device: ours the ids of all tables in one tensor with the
offsets of their bags (`packed`), as FBGEMM's module takes them, and as a dict with a tensor [bags, 20] for
each table; torch's a tensor for each table. Ours and torch's ids are int64, FBGEMM's int32. Vectors are fp16
of ours and FBGEMM's, fp32 of torch's. Calls come one after another, and the clock stops when the device is
done: host and device time, whichever is longer. Captured: one replay of a CUDA graph over the same tensors.
What ours gives is compared with FBGEMM's of the same bytes before it is timed, within the rounding of the
sums.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from cache_workload import DEVICE, DIM, ROW_BYTES, Workload
from common import console, report, shared_folder
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from make_model import publish_random
from process_memory import memory_together

from tableside.loader.segment.memory import pss_bytes
from tableside.loader.versions.versions import Model
from tableside.quant.cache.settings import Policy
from tableside.torch import EmbeddingBags, swap_embeddings

TABLES, ROWS, LENGTH = 26, 500_000, 20
BATCHES = {64: 0.8, 4096: 0.6}  # and what part of FBGEMM's time is wanted
CACHED_ROWS, CACHED_IDS, CACHED_SHARE = 60_000_000, 262_144, 0.1
CALLS, ROUNDS = 60, 9

warnings.filterwarnings("ignore")


def wall_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of a call of each side where many come in a row: the median over rounds, the sides in
    turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - started) / CALLS)
    return {name: statistics.median(taken) * 1e6 for name, taken in times.items()}


def turning(call: Callable[[Any], Any], inputs: list[Any]) -> Callable[[], Any]:
    """The call, with the next of its inputs each time."""
    next_ = cycle(inputs)
    return lambda: call(next(next_))


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call's launches as a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


class HbmSides:
    """26 features on all sides."""

    def __init__(self, root: Path) -> None:
        publish_random(root, "many", {f"f{n:02}": (ROWS, DIM, "int8") for n in range(TABLES)})
        options: Any = {"root": str(root), "device": "cuda:0", "placement": "hbm", "hbm_budget": 8 << 30}
        options |= {"output": torch.float16, "verify": "header"}
        self.ours = EmbeddingBags("many", **options)
        bags = {
            name: torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", device="meta") for name in self.ours.features
        }
        self.swapped = torch.nn.ModuleDict(bags)
        swap_embeddings(self.swapped, "many", **options)
        specs = [(f"f{n:02}", ROWS, DIM, SparseType.INT8, EmbeddingLocation.DEVICE) for n in range(TABLES)]
        self.fbgemm = IntNBitTableBatchedEmbeddingBagsCodegen(
            specs,
            pooling_mode=PoolingMode.SUM,
            device=DEVICE,
            output_dtype=SparseType.FP16,
            row_alignment=16,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        self.fbgemm.initialize_weights()
        served = self.ours._published.now().served
        stored = {t.name: t for t in served.header.tables}
        for name, (weights, _) in zip(
            self.ours.features, self.fbgemm.split_embedding_weights(split_scale_shifts=False), strict=True
        ):
            table = served.segment.tables[stored[name].name]
            weights.copy_(torch.from_numpy(table.packed.copy())[:, : weights.shape[1]])
        self.plain = [torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", device=DEVICE) for _ in range(TABLES)]

    def calls(self, batch: int) -> dict[str, Callable[[], Any]]:
        count = max(4, min(32, 40_000_000 // (batch * LENGTH * TABLES)))
        made = [torch.randint(0, ROWS, (TABLES * batch * LENGTH,), device=DEVICE) for _ in range(count)]
        offsets = torch.arange(0, batch * LENGTH, LENGTH, device=DEVICE)
        ends = torch.arange(0, TABLES * batch * LENGTH + 1, LENGTH, dtype=torch.int32, device=DEVICE)
        fixed = [dict(zip(self.ours.features, ids.view(TABLES, batch, LENGTH), strict=True)) for ids in made]
        packed, dicts = cycle(made), cycle(fixed)
        narrow, apart = cycle([i.int() for i in made]), cycle([i.chunk(TABLES) for i in made])
        swapped, parts, others = self.swapped.values(), cycle([i.chunk(TABLES) for i in made]), cycle(fixed)
        return {
            "ours": lambda: self.ours.packed(next(packed), ends),
            "ours, dict": lambda: self.ours(next(dicts)),
            "swapped": lambda: [m(i, offsets) for m, i in zip(swapped, next(parts), strict=True)],
            "fbgemm": lambda: self.fbgemm(next(narrow), ends),
            "fbgemm, dict": lambda: self.of_dict(next(others), ends),
            "torch": lambda: [m(i, offsets) for m, i in zip(self.plain, next(apart), strict=True)],
        }

    def of_dict(self, given: dict[str, torch.Tensor], ends: torch.Tensor) -> Any:
        """What FBGEMM's user does with a dict: one tensor of all ids, and the vectors cut."""
        return self.fbgemm(torch.cat([*given.values()]).view(-1).int(), ends).split(DIM, 1)

    def compiled(self, batch: int) -> dict[str, Callable[[], Any]]:
        """The same calls through torch.compile; FBGEMM's module is called as it is."""
        torch.compiler.reset()
        calls = self.calls(batch)
        packed: Any = torch.compile(self.ours.packed, fullgraph=True)
        whole: Any = torch.compile(self.ours, fullgraph=True)
        plain: Any = [torch.compile(m) for m in self.plain]
        made = [torch.randint(0, ROWS, (TABLES * batch * LENGTH,), device=DEVICE) for _ in range(4)]
        ends = torch.arange(0, TABLES * batch * LENGTH + 1, LENGTH, dtype=torch.int32, device=DEVICE)
        offsets = torch.arange(0, batch * LENGTH, LENGTH, device=DEVICE)
        fixed = [dict(zip(self.ours.features, ids.view(TABLES, batch, LENGTH), strict=True)) for ids in made]
        of_made, of_fixed, of_parts = cycle(made), cycle(fixed), cycle([i.chunk(TABLES) for i in made])
        return calls | {
            "ours": lambda: packed(next(of_made), ends),
            "ours, dict": lambda: whole(next(of_fixed)),
            "torch": lambda: [m(i, offsets) for m, i in zip(plain, next(of_parts), strict=True)],
        }


def in_hbm(root: Path) -> list[dict[str, Any]]:
    sides, rows = HbmSides(root), []
    for batch, target in BATCHES.items():
        calls = sides.calls(batch)
        found, wanted = calls["ours"](), calls["fbgemm"]()
        torch.testing.assert_close(
            found.float(), wanted.float(), rtol=2e-3, atol=2e-2
        )  # sums in another order, then fp16
        torch.testing.assert_close(torch.cat(list(calls["ours, dict"]().values()), 1), found, rtol=0, atol=0)
        torch.testing.assert_close(torch.cat(calls["swapped"](), 1), found, rtol=0, atol=0)
        sides.ours.check()
        for way in ("eager", "compiled", "captured"):
            of = sides.compiled(batch) if way == "compiled" else calls
            if way == "captured":
                of = {name: captured(call) for name, call in calls.items()}
            for call in of.values():
                call()
            times = wall_us(of)
            row = {"batch": batch, "called": way} | {f"{name} us": took for name, took in times.items()}
            row |= {
                "of fbgemm": times["ours"] / times["fbgemm"],
                "dict of fbgemm": times["ours, dict"] / times["fbgemm"],
                "dict of fbgemm, dict": times["ours, dict"] / times["fbgemm, dict"],
            }
            row |= {"of torch": times["ours"] / times["torch"], "target": target}
            row |= {"swapped of torch": times["swapped"] / times["torch"]}
            console.print(row)
            rows.append(row)
        sides.ours.check()
    return rows


def hold(root: Path) -> object:
    """What a process holds: a module that was called."""
    ours = EmbeddingBags(
        "many", root=str(root), device="cuda:0", placement="hbm", hbm_budget=8 << 30, verify="header"
    )
    ours.packed(
        torch.zeros(TABLES, dtype=torch.int64, device=DEVICE),
        torch.arange(TABLES + 1, dtype=torch.int32, device=DEVICE),
    )
    ours.check()
    return ours


def hold_nothing() -> object:
    """A context on the GPU."""
    return torch.zeros(1, device=DEVICE)


def memory() -> dict[str, int]:
    """Bytes of this process on the host, and of all processes on the GPU."""
    free, total = torch.cuda.mem_get_info()
    return pss_bytes() | {"hbm": total - free}


def by_processes(root: Path) -> list[dict[str, Any]]:
    """One and two processes: what they take together of the host and of the GPU, and what contexts alone
    take."""
    publish_random(root, "many", {f"f{n:02}": (ROWS, DIM, "int8") for n in range(TABLES)})
    size = sum(t.bytes for t in Model(root, "many").attach(verify="header").header.tables)
    rows = []
    for count in (1, 2):
        held = memory_together(hold, (root,), count, memory)
        bare = memory_together(hold_nothing, (), count, memory)
        row = {"processes": count, "tables GB": size / 1e9}
        row |= {
            "PSS GB": sum(m["pss"] for m in held) / 1e9,
            "PSS of contexts alone GB": sum(m["pss"] for m in bare) / 1e9,
        }
        row |= {
            "HBM GB": max(m["hbm"] for m in held) / 1e9,
            "HBM of contexts alone GB": max(m["hbm"] for m in bare) / 1e9,
        }
        console.print(row)
        rows.append(row)
    return rows


def cached(root: Path) -> list[dict[str, Any]]:
    """A tenth of the bytes in HBM for both, as torch's allocator counts FBGEMM's."""
    rows = []
    for zipf in (1.05, 1.2):
        work = Workload(root, 1, CACHED_ROWS, CACHED_IDS, zipf, 100)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        fbgemm = work.fbgemm(CACHED_SHARE * ROW_BYTES / (ROW_BYTES + 8), Policy.LRU)
        for batch in work.batches[:60]:
            wanted = fbgemm(batch)
        taken = torch.cuda.memory_allocated() - before
        name = work.segment.header.model
        ours = EmbeddingBags(
            name,
            root=str(root),
            device="cuda:0",
            placement="cached",
            hbm_budget=taken,
            output=torch.float16,
            verify="header",
        )
        ends = torch.arange(CACHED_IDS + 1, dtype=torch.int32, device=DEVICE)

        def call(batch: torch.Tensor, ours: Any = ours, ends: torch.Tensor = ends) -> torch.Tensor:
            found: torch.Tensor = ours.packed(batch, ends)
            return found

        for batch in work.batches[:60]:
            found = call(batch)
        assert torch.equal(found, wanted), "FBGEMM's vectors differ"
        timed = wall_us(
            {"ours": turning(call, work.batches[60:]), "fbgemm": turning(fbgemm, work.batches[60:])}
        )
        row = {"zipf": zipf, "HBM GB": taken / 1e9, **{f"{n} us": t for n, t in timed.items()}}
        row |= {"times as fast": timed["fbgemm"] / timed["ours"], "target": 2.5}
        console.print(row)
        rows.append(row)
        del fbgemm, ours, work, call
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hbm", action="store_true")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--cached", action="store_true")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name(DEVICE)
    with shared_folder() as root:
        if options.hbm:
            report(
                "gpu_torch_module",
                "a PyTorch module on one GPU, int8 D 128, all in HBM",
                in_hbm(root),
                gpu=gpu,
            )
        if options.processes:
            report(
                "gpu_torch_module_processes",
                "a PyTorch module on one GPU in several processes",
                by_processes(root),
                gpu=gpu,
            )
        if options.cached:
            report(
                "gpu_torch_module_cached",
                "a PyTorch module on one GPU, a tenth of 60 M rows in HBM",
                cached(root),
                gpu=gpu,
            )


if __name__ == "__main__":
    main()
