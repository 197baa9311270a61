"""Rows padded to 4 bytes beside rows padded to 16: bytes of a table, and rows/s of one core.

    python benchmarks/row_alignment.py             # docs/costs.md shows it
    python benchmarks/row_alignment.py --segments  # bytes of the examples' segments

As many rows as take `--gib` GiB at 16; uniform ids, sums of 20 a bag, 4,096 bags a call; anonymous memory in
2 MiB pages where the machine gives them. Both hold the same rows, and give the same vectors bit for bit
before they are timed, in turns.
"""

import argparse
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import alternate, console, report, shared_folder
from cpu_lookup import aligned
from make_model import publish_random

from tableside.loader.versions.versions import Model
from tableside.quant import Lookup, LookupKind, Pooling, RowFormat, Source, Table, choose
from tableside.quant.cpu import native as native_backend
from tableside.quant.row_format import ALIGNMENTS

BAGS, IDS, BATCHES, BLOCK = 4096, 20, 16, 1 << 16
native = choose("native")


def memory_of(rows: int, row_bytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, rows * row_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(rows, row_bytes)


def tables_of(row_format: RowFormat, dim: int, rows: int) -> dict[int, Table]:
    """The same rows with both alignments. Every row differs from its neighbours."""
    values = np.random.default_rng(dim).standard_normal((BLOCK + 1, dim), np.float32)
    packed = {a: memory_of(rows, row_format.row_bytes(dim, a)) for a in ALIGNMENTS}
    for rows_of in packed.values():
        block = np.zeros(
            (BLOCK + 1, rows_of.shape[1]), np.uint8
        )  # no power of two, so that blocks do not line up
        native.quantize(values, Source.FP32, row_format, block)
        for start in range(0, rows, len(block)):
            part = rows_of[start : start + len(block)]
            part[:] = block[: len(part)]
    return {a: Table(rows_of, row_format, dim) for a, rows_of in packed.items()}


def measure(row_format: RowFormat, dim: int, gib: float) -> dict[str, Any]:
    rows = int(gib * 2**30) // row_format.row_bytes(dim)
    tables, count = tables_of(row_format, dim, rows), BAGS * IDS
    ids = list(np.random.default_rng(0).integers(0, rows, (BATCHES, count)))
    out = aligned((BAGS, dim))
    native_backend._measured = 0
    native.planner([LookupKind(tables[16], Pooling.SUM)])  # measures how to prefetch, as a server does
    plans = {
        a: native.plan([Lookup(t, Pooling.SUM, 0, count, 0, bags=BAGS, bag_length=IDS)], threads=1)
        for a, t in tables.items()
    }
    found = []
    for plan in plans.values():
        out[:] = np.nan
        plan.run(ids[0], out)
        found.append(out.copy())
    np.testing.assert_array_equal(found[0], found[1])
    turns = {a: iter(range(1 << 62)) for a in plans}
    seconds = alternate(
        {str(a): lambda a=a, p=p: p.run(ids[next(turns[a]) % BATCHES], out) for a, p in plans.items()},  # type: ignore[misc]
        seconds=1.0,
    )
    tight, padded = (count / seconds[str(a)] / 1e6 for a in ALIGNMENTS)
    sizes = [t.row_bytes for t in tables.values()]
    return {
        "format": row_format.label,
        "dim": dim,
        "rows": rows,
        "bytes at 4": sizes[0],
        "bytes at 16": sizes[1],
        "memory": sizes[0] / sizes[1],
        "M rows/s at 4": tight,
        "M rows/s at 16": padded,
        "ratio": tight / padded,
    }


EXAMPLES = {  # tables' rows, dim and row format, as the examples publish them
    "demo": [(800_000, 64, "int8"), (400_000, 64, "int4"), (200_000, 128, "fp8"), (5_000, 32, "fp16")],
    "dlrm": [(4_000, 32, "int8"), (2_000, 32, "int8"), (50, 32, "int8")],
    "live": [(2_000, 16, "int8"), (1_000, 16, "int8")],
    "minilm": [(30_522, 384, "int8")],
    "ngram": [(32_708, 32, "int8")],
    "torchrec": [(2_000_000, 64, "int8"), (60_000, 64, "int8")],
}


def segments(root: Path) -> Iterator[dict[str, Any]]:
    """Yields the bytes of each example's segment with each alignment, and of its rows without any."""
    for name, tables in EXAMPLES.items():
        exact = sum(rows * RowFormat.parse(f).used_bytes(dim) for rows, dim, f in tables)
        found: dict[str, Any] = {"example": name, "bytes of values": exact}
        for alignment in ALIGNMENTS:
            named = {f"t{n}": of for n, of in enumerate(tables)}
            publish_random(root, f"{name}-{alignment}", named, alignment=alignment)
            found[f"bytes at {alignment}"] = Model(root, f"{name}-{alignment}").attach(verify="header").size
        yield found | {"times the values": found["bytes at 4"] / exact}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0, help="of the padded table (default: %(default)s)")
    parser.add_argument("--segments", action="store_true")
    options = parser.parse_args()
    if options.segments:
        with shared_folder() as root:
            found = list(segments(root))
        report("segment_bytes", "segments of the examples, rows padded to 4 bytes and to 16", found)
        return
    rows = []
    for row_format in (RowFormat.INT8, RowFormat.INT4, RowFormat.INT2):
        for dim in (16, 32, 64, 128):
            rows.append(measure(row_format, dim, options.gib))
            console.print({k: round(v, 2) if isinstance(v, float) else v for k, v in rows[-1].items()})
    report("row_alignment", "rows padded to 4 bytes beside rows padded to 16, one core", rows)


if __name__ == "__main__":
    main()
