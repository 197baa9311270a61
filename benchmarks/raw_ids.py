"""Lookups by raw ids against lookups of the same rows by their numbers, on one core; and what else finds an
id.

raw, dense  pooled SUM of int8 rows of D 64, ids drawn evenly; 26 features x 32 bags x 20 ids in one call, as
            a server makes it, and one feature x 4096 bags x 20. Both tables are the same bytes; the raw one
            goes through its index. Checked first.
find        ids to row numbers alone: our index; up to 10 M ids also FBGEMM's pruned_hashmap_lookup and
            zero_collision_hash, and a Python dict
build       making the index, ids a second of one core: counted, put into buckets, distinct, pilots
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import console, report

from tableside.loader.segment.memory import FileToMap, reserve
from tableside.quant import Lookup, Pooling, RowFormat, Table, choose
from tableside.quant.cpu.index_builder import IndexBuilder, find_rows
from tableside.quant.rows.ids import IdIndex, RowMap

DIM, BUCKETS, LENGTH = 64, 1024, 20
SHAPES = ((26, 32), (1, 4096))
TARGETS = {10_000_000: 0.6, 100_000_000: 0.8}
PEERS_IDS = 10_000_000
FOUND_IDS, PROBES = 1 << 20, 512


def shared(size: int) -> np.ndarray[Any, Any]:
    """Zeros in shared memory, on large pages where the kernel gives them; they go with the array."""
    path = Path(f"/dev/shm/tableside-raw-ids-{os.getpid()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    try:
        return reserve([FileToMap(fd, -(-size // 4096) * 4096, True)], path.parent).bytes
    finally:
        os.close(fd)


def build(ids: np.ndarray[Any, Any]) -> tuple[IdIndex, float]:
    """The index of ids, and the seconds that it took on one core."""
    records = shared(16 * len(ids)).view(np.int64)[: 2 * len(ids)].reshape(-1, 2)
    records[:] = 0  # the pages are there before the clock runs
    rows = np.arange(len(ids))
    started = time.perf_counter()
    builder = IndexBuilder(BUCKETS, threads=1)
    builder.count(ids)
    builder.begin()
    builder.put(ids, rows, records)
    builder.distinct(records, "error")
    index = builder.build(records)
    return index, time.perf_counter() - started


def table_of(index: IdIndex, ids: np.ndarray[Any, Any]) -> tuple[Table, np.ndarray[Any, Any]]:
    """A raw table with rows of drawn values, and the row of each id."""
    row_bytes = RowFormat.INT8.row_bytes(DIM)
    packed = shared((index.slots + 1) * row_bytes)[: (index.slots + 1) * row_bytes].reshape(-1, row_bytes)
    drawn = np.random.default_rng(3).integers(0, 256, (1 << 16, row_bytes), dtype=np.uint8)
    drawn[:, :4] = np.array([0.01, -1.0], np.float16).view(np.uint8)
    for start in range(0, len(packed), len(drawn)):
        packed[start : start + len(drawn)] = drawn[: len(packed) - start]
    rows = find_rows(index, ids)
    kept = np.ndarray((index.slots,), np.int64, packed.reshape(-1), row_bytes - 8, (row_bytes,))
    kept[:] = ids[0]
    kept[rows] = ids
    return Table(packed, RowFormat.INT8, DIM, RowMap(len(ids), index.slots, replace(index, ids=kept))), rows


def in_turn(work: list[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Seconds of each, round after round, one after the other."""
    times: list[list[float]] = [[] for _ in work]
    for one in work:
        one()
    for _ in range(rounds):
        for one, found in zip(work, times, strict=True):
            started = time.perf_counter()
            one()
            found.append(time.perf_counter() - started)
    return times


def lookups(table: Table, ids: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    backend, dense, found = choose("native"), replace(table, row_map=None), []
    for features, bags in SHAPES:
        each = bags * LENGTH
        picked = np.random.default_rng(5).integers(0, len(ids), (16, features * each))
        asked = [(np.ascontiguousarray(rows[p]), np.ascontiguousarray(ids[p])) for p in picked]
        outs = [np.zeros(features * bags * DIM, np.float32) for _ in range(2)]

        def plan(of: Table, features: int = features, bags: int = bags, each: int = each) -> Any:
            places = [
                Lookup(of, Pooling.SUM, f * each * 8, each, f * bags * DIM * 4, bags=bags, bag_length=LENGTH)
                for f in range(features)
            ]
            return backend.plan(places)

        plans = plan(dense), plan(table)
        for pair in asked:
            for p, inputs, out in zip(plans, pair, outs, strict=True):
                p.run(inputs, out)
            assert np.array_equal(outs[0], outs[1]), "raw ids give other vectors than row numbers"

        def run(which: int, asked: Any = asked, plans: Any = plans, outs: Any = outs) -> Callable[[], None]:
            def all_of() -> None:
                for pair in asked:
                    plans[which].run(pair[which], outs[which])

            return all_of

        by_number, raw = in_turn([run(0), run(1)], 31)
        count = len(asked) * features * each
        ratio = float(np.median([a / b for a, b in zip(by_number, raw, strict=True)]))
        found.append(
            {
                "ids": len(ids),
                "features x bags x ids": f"{features} x {bags} x {LENGTH}",
                "dense, M rows/s": count / float(np.median(by_number)) / 1e6,
                "raw, M rows/s": count / float(np.median(raw)) / 1e6,
                "raw over dense": ratio,
                "target": TARGETS.get(len(ids), 0.6),
            }
        )
    return found


def finders(table: Table, ids: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    """Ids to row numbers alone, M ids/s; each checked."""
    picked = np.random.default_rng(7).integers(0, len(ids), FOUND_IDS)
    asked, expected = np.ascontiguousarray(ids[picked]), rows[picked]
    assert table.row_map is not None and table.row_map.index is not None
    index = table.row_map.index
    work: dict[str, Callable[[], Any]] = {"index (rows alone, not checked)": lambda: find_rows(index, asked)}
    assert np.array_equal(work["index (rows alone, not checked)"](), expected)
    if len(ids) <= PEERS_IDS:
        work |= peers(ids, rows, asked, expected)
    timed = in_turn(list(work.values()), 7)
    return [
        {"ids": len(ids), "what": name, "M ids/s": FOUND_IDS / float(np.median(t)) / 1e6}
        for name, t in zip(work, timed, strict=True)
    ]


def peers(ids: Any, rows: Any, asked: Any, expected: Any) -> dict[str, Callable[[], Any]]:
    """FBGEMM's two hash tables, half full, and a dict; each holds all ids. The first one's keys have 32
    bits."""
    import fbgemm_gpu  # noqa: F401  (registers its operators)

    ops, capacity, picked = (
        torch.ops.fbgemm,
        2 * len(ids),
        np.random.default_rng(7).integers(0, len(ids), FOUND_IDS),
    )
    pruned = torch.full((capacity, 2), -1, dtype=torch.int32)
    bounds, capacities = torch.tensor([0, len(ids)], dtype=torch.int32), torch.tensor([0, capacity])
    keys, values = torch.arange(len(ids), dtype=torch.int32), torch.from_numpy(rows.astype(np.int32))
    ops.pruned_hashmap_insert(keys, values, bounds, pruned, capacities)
    some, ends = torch.from_numpy(picked.astype(np.int32)), torch.tensor([0, FOUND_IDS], dtype=torch.int32)

    identities, slots = zero_collision_table(torch.from_numpy(ids), capacity)
    wanted = torch.from_numpy(asked)
    held, asked_list = dict(zip(ids.tolist(), rows.tolist(), strict=True)), asked.tolist()

    def by_pruned() -> Any:
        return ops.pruned_hashmap_lookup(some, ends, pruned, capacities)

    def by_zero_collision() -> Any:
        return ops.zero_collision_hash(wanted, identities, PROBES, True, -1, True)[0]

    assert np.array_equal(by_pruned().numpy(), expected) and np.array_equal(
        by_zero_collision().numpy(), slots[picked]
    )
    assert [held[i] for i in asked_list] == expected.tolist()
    return {
        "FBGEMM pruned_hashmap_lookup (keys of 32 bits)": by_pruned,
        "FBGEMM zero_collision_hash, read only": by_zero_collision,
        "dict": lambda: [held[i] for i in asked_list],
    }


def zero_collision_table(ids: torch.Tensor, capacity: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Identities for `zero_collision_hash`, and the slot of each id. The CPU's operator only reads, so ids
    are put in here: of those that want one slot, one gets it, and the others try the next."""
    made, _ = torch.ops.fbgemm.create_zch_buffer(capacity, long_type=True)
    tried, _ = torch.ops.fbgemm.zero_collision_hash(ids, made, PROBES, True, -1, True)  # where it looks first
    slots = tried.numpy()
    table, keys, left = made.numpy()[:, 0], ids.numpy(), np.arange(len(ids))
    while left.size:
        free = left[table[slots[left]] == -1]
        table[slots[free]] = keys[free]
        left = left[table[slots[left]] != keys[left]]
        slots[left] = (slots[left] + 1) % capacity
    return made, slots


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", type=int, nargs="*", default=[10_000_000, 100_000_000])
    found, alone, built = [], [], []
    torch.set_num_threads(1)
    for count in parser.parse_args().ids:
        console.print(f"{count:,} ids")
        order = np.random.default_rng(count).permutation(np.arange(count, dtype=np.int64))
        ids = order * 0x2545F4914F6CDD1D  # distinct, over all int64
        index, seconds = build(ids)
        kept = 0 if RowFormat.INT8.row_bytes(DIM) - RowFormat.INT8.used_bytes(DIM) >= 8 else 8
        index_bytes = index.directory.nbytes + index.pilots.nbytes
        built.append(
            {"ids": count, "M ids/s a core": count / seconds / 1e6,
             "index bytes an id": index_bytes / count + kept,
             "slots an id": index.slots / count}
        )  # fmt: skip
        table, rows = table_of(index, ids)
        found += lookups(table, ids, rows)
        alone += finders(table, ids, rows)
        del table, rows, index, ids
    report(
        "raw_ids",
        "raw ids against row numbers, int8 D 64, SUM, one core",
        found,
        finding=alone,
        building=built,
    )


if __name__ == "__main__":
    main()
