"""What it costs a worker to sample the ids of its requests (`tableside plan --live`), beside their lookups.

    python benchmarks/live_ids.py

26 features of int8 tables of 400,000 rows, D 64, sums, ids of Zipf's law with 1.05; 8 bags of 10 ids a
feature, and 32 of 20. Samples are full, as they are after the first seconds; before that they are compared
with what NumPy takes.
"""

from typing import Any

import numpy as np
from common import alternate, console, report

from tableside.quant import LookupKind, Pooling, RowFormat, Table, choose
from tableside.quant.contract import Place
from tableside.quant.cpu.uses import keys_of, read_uses, sample_uses

FEATURES, ROWS, DIM, REQUESTS, BYTES = 26, 400_000, 64, 64, 1 << 20
SHAPES = {"8 x 10": (8, 10), "32 x 20": (32, 20)}
PER_S = 10_000_000  # ids, of which the goal speaks
SALTS = np.random.default_rng(1).integers(0, 2**64, FEATURES, np.uint64)


def request_of(rng: np.random.Generator, bags: int, length: int) -> tuple[bytes, np.ndarray]:
    """Places of a request, and its ids [features, ids]."""
    uniform = rng.random((FEATURES, bags * length))
    ids = ((((ROWS + 1.0) ** -0.05 - 1) * uniform + 1) ** -20).astype(np.int64).clip(1, ROWS) - 1
    size = 8 * bags * length
    places = [
        Place(n, n * size, bags * length, -1, length, bags, -1, n * 4 * bags * DIM) for n in range(FEATURES)
    ]
    return np.array(places, np.int64).tobytes(), ids


def filled(requests: list[tuple[bytes, np.ndarray]]) -> np.ndarray:
    """A full sample of these requests, which holds the uses that it has to."""
    sample, ids = np.zeros(BYTES, np.uint8), np.concatenate([of for _, of in requests], 1)
    for places, of in requests:
        sample_uses(sample, places, of, SALTS, False, 0)
    found = read_uses(sample.tobytes(), FEATURES)
    assert found is not None and found.totals.sum() == ids.size
    keys = keys_of(ids, SALTS[:, None])
    wanted = np.sort(ids[keys <= np.uint64((1 << (64 - found.bits)) - 1)])
    assert (np.sort(found.uses["id"]) == wanted).all()
    while (now := read_uses(sample.tobytes(), FEATURES)) is not None and now.bits < 4:
        for places, of in requests:
            sample_uses(sample, places, of, SALTS, False, 0)
    return sample


def main() -> None:
    native, rows = choose("native"), list[dict[str, Any]]()
    row_bytes = RowFormat.INT8.row_bytes(DIM, 4)
    packed = np.zeros((ROWS, row_bytes), np.uint8)
    tables = [Table(packed.copy(), RowFormat.INT8, DIM) for _ in range(FEATURES)]
    planner = native.planner([LookupKind(table, Pooling.SUM) for table in tables])
    for name, (bags, length) in SHAPES.items():
        console.print(f"{name} ...")
        rng = np.random.default_rng(2)
        requests = [request_of(rng, bags, length) for _ in range(REQUESTS)]
        sample, out = filled(requests), np.empty(4 * FEATURES * bags * DIM, np.uint8)
        plans = [planner.plan(places, out.size) for places, _ in requests]

        def look_up(plans: Any = plans, requests: Any = requests, out: Any = out) -> None:
            for plan, (_, ids) in zip(plans, requests, strict=True):
                plan.run(ids, out)

        def take(requests: Any = requests, sample: Any = sample) -> None:
            for places, ids in requests:
                sample_uses(sample, places, ids, SALTS, False, 0)

        seconds = alternate({"lookup": look_up, "sample": take}, 1.5)
        ids = REQUESTS * FEATURES * bags * length
        row = {"bags x ids": name, "ns an id": seconds["sample"] / ids * 1e9}
        row |= {"of a core at 10 M ids/s": seconds["sample"] / ids * PER_S}
        rows.append({**row, "of the lookup": seconds["sample"] / seconds["lookup"]})
    report("live_ids", "sampling the ids of requests", rows)


if __name__ == "__main__":
    main()
