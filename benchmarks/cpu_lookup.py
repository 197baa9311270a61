"""Our CPU kernel against FBGEMM's operator: the same bytes in the same 2 MiB pages, one core each, in turns.

Uniform and Zipf 1.05 ids, 20 a bag, over a segment of 1 GiB. FBGEMM is called the fastest way it has: its raw operator, by
position, tables bound before. Ours is called through the public `Backend.lookup`, ids validated, output given. Each pair of
results is compared before it is timed.
"""

import argparse
import os
import threading
import time
from typing import Any

import numpy as np
import torch
from common import alternate, console, report, shared_folder
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from make_model import publish_random

from tableside.loader.versions import Model
from tableside.quant import Pooling, RowFormat, Table, choose
from tableside.quant.cpu.fbgemm import operator
from tableside.serving.cli.bench import draw_ids

IDS = 20
CASES = [("int8", 64), ("int4", 64), ("int8", 128), ("int2", 64), ("fp8", 64), ("fp16", 64)]
TARGETS = {("int8", 64): 1.8, ("int4", 64): 3.0, ("int8", 128): 1.3}
UNPOOLED_TARGET, ONE_BAG_US, THREADS_TARGET = 3.0, 5.0, 1.7
native = choose("native")


class Batches:
    """Enough different batches that their rows do not stay in the caches, taken in turn."""

    def __init__(self, table: Table, batch: int, zipf: float | None) -> None:
        rng = np.random.default_rng(batch)
        count = max(4, min(2000, 4_000_000 // (batch * IDS)))
        self.ids = [draw_ids(rng, table.rows, (batch, IDS), zipf).reshape(-1) for _ in range(count)]
        self.tensors = [torch.from_numpy(i) for i in self.ids]
        self.lengths = np.full(batch, IDS, np.int32)
        self.offsets = torch.arange(0, batch * IDS + 1, IDS)
        self.each = torch.arange(batch * IDS + 1)
        self.at = 0

    def next(self) -> int:
        self.at = (self.at + 1) % len(self.ids)
        return self.at


def aligned(shape: tuple[int, int]) -> np.ndarray:
    """fp32 that begins at a multiple of 64 bytes, as torch's own outputs do."""
    raw = np.empty(shape[0] * shape[1] + 16, np.float32)
    start = -raw.ctypes.data % 64 // 4
    return raw[start : start + shape[0] * shape[1]].reshape(shape)


def case(table: Table, batch: int, zipf: float | None, pooled: bool) -> dict[str, Any]:
    """Times one case."""
    b, theirs = Batches(table, batch, zipf), operator(table)
    pooling = Pooling.SUM if pooled else Pooling.NONE
    lengths, offsets = (b.lengths, b.offsets) if pooled else (None, b.each)
    mode = PoolingMode[pooling.name]
    out = aligned((batch if pooled else batch * IDS, table.dim))
    for i in range(2):
        ours = native.lookup(table, b.ids[i], lengths, pooling=pooling, out=out)
        np.testing.assert_array_equal(ours, theirs(b.tensors[i], offsets, mode, None).numpy())
    seconds = alternate(
        {
            "native": lambda: native.lookup(table, b.ids[b.next()], lengths, pooling=pooling, out=out),
            "fbgemm": lambda: theirs(b.tensors[b.next()], offsets, mode, None),
        }
    )
    rows = batch * IDS
    ratio = seconds["fbgemm"] / seconds["native"]
    target = UNPOOLED_TARGET if not pooled and batch > 1 else TARGETS.get((table.row_format.label, table.dim), 1.0)
    return {
        "format": table.row_format.label,
        "dim": table.dim,
        "ids": "zipf 1.05" if zipf else "uniform",
        "pooling": "sum" if pooled else "none",
        "batch": batch,
        "native us": seconds["native"] * 1e6,
        "fbgemm us": seconds["fbgemm"] * 1e6,
        "native M rows/s": rows / seconds["native"] / 1e6,
        "fbgemm M rows/s": rows / seconds["fbgemm"] / 1e6,
        "ratio": ratio,
        "target": target if batch > 1 else f"<= {ONE_BAG_US} us",
        "met": bool(ratio >= target if batch > 1 else seconds["native"] * 1e6 <= ONE_BAG_US),
    }


def two_threads(table: Table, batch: int) -> dict[str, Any]:
    """Two threads over one: each on batches of its own (as two requests are), and both on one batch (threads=2)."""
    b = Batches(table, batch, None)
    outs = [aligned((batch, table.dim)) for _ in range(2)]

    def loop(out: np.ndarray, start: int, calls: int) -> None:
        for i in range(calls):
            native.lookup(table, b.ids[(start + i) % len(b.ids)], b.lengths, out=out)

    def seconds(threads: int, calls: int) -> float:
        pool = [threading.Thread(target=loop, args=(outs[t], 7 * t, calls)) for t in range(threads)]
        started = time.perf_counter()
        for t in pool:
            t.start()
        for t in pool:
            t.join()
        return time.perf_counter() - started

    calls = max(1, int(0.3 * 100e6 / (batch * IDS)))
    seconds(2, calls)
    one, two = (float(np.median([seconds(n, calls) for _ in range(5)])) for n in (1, 2))
    inside = alternate(
        {
            "1": lambda: native.lookup(table, b.ids[b.next()], b.lengths, out=outs[0]),
            "2": lambda: native.lookup(table, b.ids[b.next()], b.lengths, out=outs[0], threads=2),
        }
    )
    return {
        "format": table.row_format.label,
        "dim": table.dim,
        "batch": batch,
        "one thread M rows/s": calls * batch * IDS / one / 1e6,
        "two threads M rows/s": 2 * calls * batch * IDS / two / 1e6,
        "ratio": 2 * one / two,
        "target": THREADS_TARGET,
        "met": bool(2 * one / two >= THREADS_TARGET),
        "ratio within one call": inside["1"] / inside["2"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of the segment (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, threads = [], []
    for label, dim in CASES:
        with shared_folder() as root:
            count = int(options.gib * 2**30) // RowFormat.parse(label).row_bytes(dim)
            publish_random(root, "t", {"t": (count, dim, label)})
            segment = Model(root, "t").attach(verify="header")
            table = segment.tables["t"]
            int(segment.mapping.bytes[:: 1 << 20].sum())  # maps every page
            console.print(f"{label} D {dim}: {count:,} rows, {segment.mapping.huge_fraction():.0%} on 2 MiB pages")
            for zipf in (None, 1.05):
                for pooled in (True, False):
                    for batch in (1, 256, 4096):
                        if label == "fp8" and batch == 4096 and not pooled:
                            continue  # FBGEMM's fp8 takes half a minute for it
                        rows.append(case(table, batch, zipf, pooled))
            if (label, dim) in TARGETS and len(os.sched_getaffinity(0)) > 1:
                threads += [two_threads(table, batch) for batch in (256, 4096)]
            del table, segment
    report("cpu_lookup", "native kernel against FBGEMM's operator, one core", rows)
    report("cpu_lookup_threads", "two threads against one, native kernel", threads)


if __name__ == "__main__":
    main()
