"""Embedding weights stashed while a model's dense part runs: memory and step time, in training and for tables
that are served.

    python benchmarks/gpu_stash.py     # 12 GiB of tables, a dense part of 36 layers over a batch of 65,536

Training: twelve nn.EmbeddingBag of 1 GiB, sparse gradients, SGD; the ways are compared bit by bit after the
same steps. `blocking` does as the prototype of "Embedding Memory Stashing": it waits on the CPU until the
copy is done, and comes back in one hook before the embeddings' backward. Served tables: 12 GiB of int8 in HBM
over a registered segment, given and brought back.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import console, report, shared_folder
from device_lookup import DeviceLookup
from make_model import publish_random

from tableside.loader.segment.registration import Registration
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.stash.stash import points, stash_embedding_weights

DEVICE = torch.device("cuda:0")
TABLES, ROWS, DIM = 12, 2 << 20, 128
BATCH, IDS, WIDTH, LAYERS = 65_536, 4, 8192, 36
WARM, STEPS = 2, 4
GIB = 1 << 30


class Ranker(torch.nn.Module):
    """Bags, then layers; `between` is called once the bags are looked up, `layer_done` after each layer
    with its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.bags = torch.nn.ModuleList(
                torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(TABLES)
            )
            self.first = torch.nn.Linear(TABLES * DIM, WIDTH, dtype=torch.bfloat16)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), torch.nn.ReLU())
                for _ in range(LAYERS)
            )

    def forward(
        self, ids: list[torch.Tensor], between: Callable[..., Any], layer_done: Callable[..., Any]
    ) -> torch.Tensor:
        pooled = [bag(i) for bag, i in zip(self.bags, ids, strict=True)]
        between(self, pooled)
        x = self.first(torch.cat(pooled, 1).bfloat16())
        for n, layer in enumerate(self.layers):
            x = layer(x)
            layer_done(n, x)
        return x.float().square().mean()


def train(model: Ranker, way: str, where: tuple[int, int], stream: torch.cuda.Stream) -> dict[str, Any]:
    """Steps one way; times, peaks, the memory along the last step, and what came out."""
    dense = torch.optim.SGD([*model.first.parameters(), *model.layers.parameters()], lr=1e-4)
    sparse = torch.optim.SGD(model.bags.parameters(), lr=0.1)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    free_at, start_at = where
    restore: Any = None
    timeline: list[tuple[str, float]] = []

    def note(label: str) -> None:
        timeline.append((label, torch.cuda.memory_allocated() / GIB))

    def between(model: Ranker, pooled: list[torch.Tensor]) -> None:
        nonlocal restore
        note("lookup")
        if way == "none":
            return
        restore = stash_embedding_weights(model.bags, stream, frees=way == "at once")
        if way == "blocking":
            torch.cuda.synchronize()
            restore.free()
            pooled[-1].register_hook(restore)
        elif way == "at points":
            restore.free_at(model.layers[free_at])
        if way != "blocking":
            restore.wait_at(*pooled)

    def layer_done(n: int, x: torch.Tensor) -> None:
        if n % 4 == 3:
            note(f"layer {n + 1}")
            x.register_hook(lambda _: note(f"backward {n + 1}"))
        if restore is not None and way != "blocking" and n == start_at:
            restore.start_at(x)

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for step in range(WARM + STEPS):
        ids = [
            torch.randperm(ROWS, device=DEVICE, generator=generator)[: BATCH * IDS].view(BATCH, IDS)
            for _ in range(TABLES)
        ]
        timeline.clear()
        if step == WARM:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model(ids, between, layer_done)
        loss.backward()
        dense.step()
        sparse.step()
        dense.zero_grad()
        sparse.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        losses.append(loss.item())
        note("step")
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    sums = [fingerprint(p) for p in model.parameters()]
    return {
        "way": way,
        "step_ms": 1e3 * statistics.median(times[WARM:]),
        "peak_GiB": peak / GIB,
        "reserved_GiB": reserved / GIB,
        "result": [losses, sums],
        "timeline": list(timeline),
    }


def fingerprint(weights: torch.Tensor) -> int:
    """Of all bits and their places: sums of 16-bit words times odd numbers that grow with their place,
    modulo 2 ** 64."""
    words = weights.detach().reshape(-1).view(torch.int16)
    total = 0
    for first in range(0, words.numel(), 1 << 26):
        part = words[first : first + (1 << 26)].long()
        total += int((part * (2 * torch.arange(first, first + part.numel(), device=DEVICE) + 1)).sum())
    return total


def layer_times(model: Ranker) -> tuple[list[float], list[float]]:
    """Milliseconds of each layer's forward and backward."""
    x = torch.randn(BATCH, WIDTH, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def run(layer: torch.nn.Module) -> tuple[float, float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = layer(x)
        marks[1].record()
        out.backward(x)
        marks[2].record()
        torch.cuda.synchronize()
        return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])

    run(model.layers[0])
    forward, backward = run(model.layers[0])
    model.zero_grad()
    return [forward] * LAYERS, [backward] * LAYERS


def copy_time(size: int) -> float:
    """Milliseconds that a copy of so many bytes to the host takes."""
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    pinned.copy_(source, non_blocking=True)
    marks[0].record()
    pinned.copy_(source, non_blocking=True)
    marks[1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]) * size / pinned.numel()


def training() -> list[dict[str, Any]]:
    bytes_away = TABLES * ROWS * DIM * 4
    found: list[dict[str, Any]] = []
    stream = torch.cuda.Stream()
    where, copy_ms = (0, 0), 0.0
    for way in ("none", "blocking", "at once", "at points", "none again"):
        model = Ranker()
        if not found:
            copy_ms = copy_time(bytes_away)
            where = points(*layer_times(model), 1.1 * copy_ms)
        row = train(model, way.split()[0] if way == "none again" else way, where, stream)
        row |= {"way": way, "copy_ms": copy_ms, "free at layer": where[0], "start at layer": where[1]}
        found.append(row)
        console.print({k: v for k, v in row.items() if k not in ("timeline", "result")})
        del model
        gc.collect()
        torch.cuda.empty_cache()
    wanted = found[0]["result"]
    for row in found:
        assert row["result"] == wanted, f"{row['way']} gave other bits"
        row["same bits"] = True
        row["times the step"] = row["step_ms"] / found[0]["step_ms"]
        row["peak falls by, of the stashed"] = (found[0]["peak_GiB"] - row["peak_GiB"]) * GIB / bytes_away
        row["reserved falls by, of the stashed"] = (
            (found[0]["reserved_GiB"] - row["reserved_GiB"]) * GIB / bytes_away
        )
        del row["result"]
    return found


def served() -> list[dict[str, Any]]:
    """Tables that a worker serves: given back, brought back, looked up."""
    rows = 11_000_000  # of 144 bytes, eight times
    with shared_folder() as root:
        publish_random(root, "stash", {f"t{i}": (rows, DIM, "int8") for i in range(8)})
        segment = Model(root, "stash").attach(verify="header")
        registration = Registration(segment, DEVICE)
        fused = GpuBackend(str(DEVICE), choose())
        held = []
        for stored in segment.header.tables:
            source = registration.view(stored.offset, stored.bytes)
            held.append(fused.place("hbm", segment.tables[stored.name], source, stashable=True))
        lookup = DeviceLookup(fused, held, IDS)
        ids = torch.randint(0, rows, (8 * BATCH * IDS,), device=DEVICE)
        wanted = lookup(ids)
        found = []
        for _ in range(3):
            before = torch.cuda.mem_get_info()[0]
            started = time.perf_counter()
            given = fused.stash()
            stashed = time.perf_counter()
            freed = torch.cuda.mem_get_info()[0] - before
            began = time.perf_counter()
            fused.restore()
            returned = time.perf_counter()
            out = lookup(ids)
            torch.cuda.synchronize()
            done = time.perf_counter()
            assert torch.equal(out, wanted)
            found.append(
                {
                    "GB": given / 1e9,
                    "freed, of them": freed / given,
                    "stash_ms": 1e3 * (stashed - started),
                    "restore_returns_ms": 1e3 * (returned - began),
                    "until_looked_up_ms": 1e3 * (done - began),
                    "GB/s": given / 1e9 / (done - began),
                }
            )
            console.print(found[-1])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--served", action="store_true", help="measure the tables that are served alone")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name(DEVICE)
    report("gpu_stash_served", "12 GiB of served tables given back and brought back", served(), gpu=gpu)
    if options.served:
        return
    report("gpu_stash", "12 GiB of embedding weights stashed in training", training(), gpu=gpu)


if __name__ == "__main__":
    main()
