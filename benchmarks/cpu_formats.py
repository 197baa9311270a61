"""Rows/s of one core of each row format, pooled and not, and a decode step's rows for one sequence.

    python benchmarks/cpu_formats.py        # docs/costs.md shows it

Tables of `--gib` GiB in 2 MiB pages where the machine gives them, D 256, and 160 as some n-gram tables have;
uniform ids. Pooled: sums of 20 a bag, 4,096 bags a call, fp32. Single: 65,536 vectors a call, bf16. A token:
48 rows into bf16, one call. Formats take turns.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import alternate, console, report
from cpu_lookup import aligned
from row_alignment import memory_of

from tableside.quant import Lookup, LookupKind, Pooling, Precision, RowFormat, Source, Table, choose

BAGS, IDS, BLOCK = 4096, 20, 1 << 15
KINDS = {"pooled": BAGS * IDS, "single": 65_536, "token": 48}
CASES = [("int8", 256), ("int4", 256), ("fp8_e4m3_block32", 256), ("fp8_e4m3", 256), ("nvfp4", 256)]
CASES += [("int8", 160), ("fp8_e4m3", 160), ("nvfp4", 160)]
native = choose("native")


def table_of(row_format: RowFormat, dim: int, gib: float) -> Table:
    rows = int(gib * 2**30) // row_format.row_bytes(dim, 4)
    packed = memory_of(rows, row_format.row_bytes(dim, 4))
    block = np.zeros((BLOCK + 1, packed.shape[1]), np.uint8)
    values = np.random.default_rng(dim).standard_normal((BLOCK + 1, dim), np.float32)
    native.quantize(values, Source.FP32, row_format, block)
    for start in range(0, rows, len(block)):
        part = packed[start : start + len(block)]
        part[:] = block[: len(part)]
    return Table(packed, row_format, dim)


def calls_of(table: Table, kind: str) -> Callable[[], int]:
    """A round of calls, which says how many there were. Vectors are compared with the fp32 ones first."""
    pooled, count = kind == "pooled", KINDS[kind]
    precision = Precision.FP32 if pooled else Precision.BF16
    pooling = Pooling.SUM if pooled else Pooling.NONE
    lookup = Lookup(table, pooling, 0, count, 0, precision, BAGS if pooled else 0, bag_length=IDS)
    plan, out = native.plan([lookup], threads=1), aligned((BAGS if pooled else count, table.dim))
    ids = list(np.random.default_rng(0).integers(0, table.rows, (4096 if kind == "token" else 16, count)))
    plan.run(ids[0], out)
    exact = torch.from_numpy(native.lookup(table, ids[0], pooling=Pooling.NONE))
    if pooled:
        sums = exact.view(BAGS, IDS, -1).sum(1, dtype=torch.float64)
        torch.testing.assert_close(torch.from_numpy(out).double(), sums, rtol=1e-4, atol=1e-4)
    else:
        found = torch.from_numpy(out.reshape(-1).view(np.uint8)[: 2 * exact.numel()].copy())
        assert torch.equal(found.view(torch.bfloat16), exact.bfloat16().view(-1))

    def run() -> int:
        for one in ids:
            plan.run(one, out)
        return len(ids)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    gib = parser.parse_args().gib
    tables = {(label, dim): table_of(RowFormat.parse(label), dim, gib) for label, dim in CASES}
    for table in tables.values():
        native.planner([LookupKind(table, Pooling.SUM)])  # measures how to prefetch, as a server does
    seconds: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        console.print(f"{kind} ...")
        calls = {f"{label} {dim}": calls_of(table, kind) for (label, dim), table in tables.items()}
        counts = {name: call() for name, call in calls.items()}
        seconds[kind] = {n: t / counts[n] for n, t in alternate(dict(calls), 1.5).items()}
    rows: list[dict[str, Any]] = []
    for (label, dim), table in tables.items():
        row: dict[str, Any] = {"format": label, "dim": dim, "row_bytes": table.row_bytes}
        of = {kind: times[f"{label} {dim}"] for kind, times in seconds.items()}
        row |= {f"{kind}_rows_per_s": KINDS[kind] / of[kind] for kind in ("pooled", "single")}
        rows.append({**row, "us_a_token": of["token"] * 1e6})
    of_int8 = {dim: next(r for r in rows if (r["format"], r["dim"]) == ("int8", dim)) for _, dim in CASES}
    for row in rows:
        for name in ("pooled", "single"):
            key = f"{name}_rows_per_s"
            row[f"{name} of int8"] = row[key] / of_int8[row["dim"]][key]
    report("cpu_formats", f"rows/s of one core by row format, {gib:g} GiB", rows, gib=gib)


if __name__ == "__main__":
    main()
