"""The CPU kernel over tables of 1 GiB and more, in one table and in 26: rows/s of one core, beside FBGEMM's
operator, torch's and a loop that only touches the rows.

    python benchmarks/cpu_sizes.py --as cpu_sizes_epyc            # as many sizes as /dev/shm holds
    python benchmarks/cpu_sizes.py --as cpu_sizes_xeon --gib 64   # docs/costs.md shows both

int8, D 64, sums of 20 ids a bag, uniform and Zipf 1.05, in 2 MiB pages where the machine gives them. One
segment holds the largest table; smaller ones are its first rows, and 26 tables are 26 parts. One table is
asked for 4,096 bags, each of 26 for 128, in one call. Ours is a plan, as a server runs it (ids checked, rows
prefetched as it measured at its start). FBGEMM's is its raw operator over all tables, which checks nothing.
torch's is `quantized.embedding_bag_byte_rowwise_offsets`, a call for each table, over the same memory in its
own layout (72 bytes a row). Ours equals FBGEMM's bit for bit before either is timed. The touching loop is
benchmarks/touch.c, with the better of two distances. All take turns in one run.
"""

import argparse
import ctypes
import os
import subprocess
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import HERE, alternate, console, report, shared_folder
from cpu_lookup import aligned
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from make_model import publish_random

from tableside.loader.segment.memory import available_bytes
from tableside.loader.versions.versions import Model
from tableside.quant import Lookup, LookupKind, Pooling, RowFormat, Table, choose
from tableside.quant.cpu import _native
from tableside.quant.cpu import native as native_backend
from tableside.quant.cpu.fbgemm import operator
from tableside.serving.cli.commands.bench import draw_ids

DIM, IDS, BATCHES, ROW_BYTES = 64, 20, 24, RowFormat.INT8.row_bytes(64)
SHAPES = {1: 4096, 26: 128}  # tables -> bags of each
OF_LOOP, OF_FBGEMM = 0.7, 1.0  # what is asked at every size
native = choose("native")


def compile_loop(folder: Path) -> Callable[..., int]:
    """The touching loop, compiled for this processor."""
    path = folder / "touch.so"
    subprocess.run(
        ["cc", "-O3", "-march=native", "-shared", "-fPIC", HERE / "touch.c", "-o", path], check=True
    )
    loop = ctypes.CDLL(str(path)).touch
    loop.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    loop.restype = ctypes.c_uint64
    return loop


def plan_of(tables: list[Table], bags: int, threads: int) -> Any:
    """A request of `bags` bags for each table, one after another."""
    ids, row = bags * IDS, 4 * DIM * bags
    return native.plan(
        [
            Lookup(t, Pooling.SUM, 8 * n * ids, ids, row * n, bags=bags, bag_length=IDS)
            for n, t in enumerate(tables)
        ],
        threads=threads,
    )


def prefetch_for(table: Table, way: str | None) -> None:
    """Prefetches as a server of this table does, which measures at its start, or in a way that is given."""
    _native.prefetch(way or "L2")
    if way is None:
        native_backend._measured = 0
        native.planner([LookupKind(table, Pooling.SUM)])


def torch_lookup(tables: list[Table], bags: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """torch's operator for rows of a byte a value, fp32 scale and bias behind them, over the same memory."""
    offsets, lookup = torch.arange(0, bags * IDS, IDS), torch.ops.quantized.embedding_bag_byte_rowwise_offsets
    row = DIM + 8
    views = [
        torch.frombuffer((ctypes.c_uint8 * (t.rows * row)).from_address(t.address), dtype=torch.uint8).view(
            t.rows, row
        )
        for t in tables
    ]
    return lambda ids: [
        lookup(v, i, offsets, mode=0) for v, i in zip(views, ids.view(len(views), -1), strict=True)
    ]


def measure(
    table: Table, gib: int, shape: int, zipf: float | None, loop: Any, threads: int
) -> dict[str, Any]:
    bags, rows = SHAPES[shape], table.rows // shape
    tables = [Table(table.packed[n * rows : (n + 1) * rows], table.row_format, DIM) for n in range(shape)]
    rng, count = np.random.default_rng(gib), shape * bags * IDS
    ids = [draw_ids(rng, rows, (count,), zipf) for _ in range(BATCHES)]
    first = np.repeat(np.arange(shape) * rows, bags * IDS)
    whole = [i + first for i in ids]  # rows of the one table, for the loop
    tensors, offsets = [torch.from_numpy(i) for i in ids], torch.arange(0, count + 1, IDS)
    out, turn = aligned((shape * bags, DIM)), cycle(range(BATCHES))
    alone, shared = plan_of(tables, bags, 1), plan_of(tables, bags, threads)
    theirs, of_torch = operator(tables), torch_lookup(tables, bags)

    for plan in (alone, shared):
        out[:] = np.nan
        plan.run(ids[0], out)
        theirs_out = theirs(tensors[0], offsets, PoolingMode.SUM, None).view(bags, shape, DIM)
        np.testing.assert_array_equal(out.reshape(shape, bags, DIM), theirs_out.transpose(0, 1).numpy())

    def touch(ahead: int) -> None:
        loop(table.address, ROW_BYTES, whole[next(turn)].ctypes.data, count, ahead)

    seconds = alternate(
        {
            "loop 32": lambda: touch(32),
            "loop 64": lambda: touch(64),
            "native": lambda: alone.run(ids[next(turn)], out),
            "threads": lambda: shared.run(ids[next(turn)], out),
            "fbgemm": lambda: theirs(tensors[next(turn)], offsets, PoolingMode.SUM, None),
            "torch": lambda: of_torch(tensors[next(turn)]),
        },
        seconds=0.5,
    )
    rate = {name: count / s / 1e6 for name, s in seconds.items()}
    fastest = max(rate["loop 32"], rate["loop 64"])
    of_loop, ratio = rate["native"] / fastest, rate["native"] / rate["fbgemm"]
    return {
        "GiB": gib,
        "tables": shape,
        "ids": "zipf 1.05" if zipf else "uniform",
        "prefetch": _native.prefetches()[0],
        "loop M rows/s": fastest,
        "native M rows/s": rate["native"],
        "fbgemm M rows/s": rate["fbgemm"],
        "torch M rows/s": rate["torch"],
        "of the loop": of_loop,
        "ratio": ratio,
        f"{threads} threads M rows/s": rate["threads"],
        "met": bool((zipf or of_loop >= OF_LOOP) and ratio >= OF_FBGEMM),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=int, help="bytes of the largest table (default: as large as /dev/shm holds, to 64)"
    )
    parser.add_argument(
        "--as", dest="name", default="cpu_sizes_epyc", help="the result's name (default: %(default)s)"
    )
    parser.add_argument("--prefetch", choices=sorted(_native.prefetches()), help="default: as measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what torch takes for a scale may be a number that slows it down
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64) if 1.1 * n * 2**30 < available_bytes(Path("/dev/shm"))]
    sizes = [n for n in sizes if n <= (options.gib or 64)]
    threads, rows = min(4, len(os.sched_getaffinity(0))), []
    with shared_folder() as root, TemporaryDirectory() as folder:
        loop = compile_loop(Path(folder))
        publish_random(root, "t", {"t": (sizes[-1] * 2**30 // ROW_BYTES, DIM, "int8")})
        segment = Model(root, "t").attach(verify="header")
        int(segment.mapping.bytes[:: 1 << 20].sum())  # maps every page
        pages = segment.mapping.huge_fraction()
        table = segment.tables["t"]
        console.print(f"{sizes[-1]} GiB, {pages:.0%} on 2 MiB pages")
        for gib in sizes:
            part = Table(table.packed[: table.rows * gib // sizes[-1]], table.row_format, DIM)
            prefetch_for(part, options.prefetch)
            for shape in SHAPES:
                for zipf in (None, 1.05):
                    rows.append(measure(part, gib, shape, zipf, loop, threads))
                    console.print(
                        {k: v if not isinstance(v, float) else round(v, 2) for k, v in rows[-1].items()}
                    )
        del table, part, segment
    report(
        options.name,
        "int8 D 64, sums of 20 ids, tables of several sizes, one core",
        rows,
        pages_of_2_mib=pages,
    )


if __name__ == "__main__":
    main()
