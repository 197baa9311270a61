"""Lookups on one GPU while rows change: what deltas cost, how long a state takes, and whether any answer is
of no one state.

    python benchmarks/gpu_updates.py --deltas   # 26 tables x 500 k ids, pooled, 4096 bags of 20 ids: all in
                                                # HBM, and 10 % cached
    python benchmarks/gpu_updates.py --oracle   # 50 M reads while another process applies deltas as fast as
                                                # it can

Deltas are applied as a user applies them, to a model in shared memory. Without one, with one, and with a
second one of a tenth of its rows over it, the same batches are looked up in turn, through the same cache;
times are medians of steady state, ratios are to the state without deltas of the same round. What comes out is
compared bit by bit with the CPU's. Goal: at most 2 % slower where 1 % of the rows changed.

In the oracle's run every row carries the sequence of the delta that wrote it, and what each state must hold
is made again from the sequence alone. A row whose values differ is torn; one that is of another state than
its request's is mixed; a request of an earlier state than the one before it went back.
"""

import argparse
import multiprocessing
import queue
import threading
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from cache_workload import DEVICE, steady_ms
from common import console, report, shared_folder
from device_lookup import DeviceLookup
from raw_tables import distinct_ids, raw_table_in_shm

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.registration import Registration
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, Precision, choose
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.residence.tables import DeviceTable

TABLES, IDS_OF_TABLE, DIM, IDS, BAG = 26, 500_000, 128, 4096 * 20, 20
WARM, TIMED, ROUNDS = 60, 20, 5  # batches
SHARES = (
    0.001,
    0.01,
    0.1,
)  # of the rows that a delta overwrites, in the order in which they are merged into one another
CACHED_SHARE, INDEX_BYTES = 0.1, 24  # of a slot of the cache, beside its row
ZIPF = 1.05
ORACLE_ROWS, ORACLE_DIM, ORACLE_IDS, ORACLE_SHARE = 1_000_000, 16, 262_144, 0.01
ORACLE_TABLES = ("a", "b")


class Placed(NamedTuple):
    """The tables of a model on the device, without deltas."""

    backend: GpuBackend
    tables: dict[str, DeviceTable]

    @classmethod
    def of(cls, segment: Segment, registration: Registration, cached_share: float | None) -> "Placed":
        """cached_share: of the rows that the cache has slots for; None: all rows are copied to HBM."""
        backend, rows = GpuBackend(str(DEVICE), choose()), segment.header.tables
        if cached_share is not None:
            size = sum(int(t.rows * cached_share) * (t.row_bytes + INDEX_BYTES) for t in rows) * 5 // 4
            backend.open_cache(size, min(t.row_bytes for t in rows), CacheSettings(replays=True))
        kind = "hbm" if cached_share is None else "cached"
        views = {t.name: registration.view(t.offset, t.bytes) for t in rows}
        tables = {n: backend.place(kind, segment.tables[n], view) for n, view in views.items()}
        backend.launcher.warm_up_overlays()
        return cls(backend, tables)

    def state(self, segment: Segment) -> tuple[dict[str, DeviceTable], int]:
        """Its tables in a state, and the bytes that were copied to HBM."""
        changed = {name: segment.tables[name] for delta in segment.deltas for name in delta.tables}
        size = sum(self.backend.overlay_bytes(self.tables[name], table) for name, table in changed.items())
        return self.tables | {n: self.backend.overlay(self.tables[n], t) for n, t in changed.items()}, size


# ---- what deltas cost ----


def changes_of(known: list[Any], share: float, rng: np.random.Generator) -> ChangeBatch:
    """New values for a share of the ids of each table, drawn evenly."""
    count = int(IDS_OF_TABLE * share)
    pool = rng.standard_normal((count, DIM)).astype(np.float16)
    made = [
        TableChanges(f"t{n:02}", rng.choice(ids, count, replace=False), pool) for n, ids in enumerate(known)
    ]
    return ChangeBatch(made)


def check(backend: GpuBackend, tables: dict[str, DeviceTable], segment: Segment, ids: torch.Tensor) -> None:
    """Rows of some ids are the CPU's, bit by bit."""
    for n, (name, table) in enumerate(tables.items()):
        asked = ids[n * IDS : n * IDS + 4096].cpu().numpy()
        found = backend.lookup(table, asked, pooling=Pooling.NONE)
        np.testing.assert_array_equal(
            found, choose().lookup(segment.tables[name], asked, pooling=Pooling.NONE), name
        )


def measure_deltas(root: Path, files: Path) -> list[dict[str, Any]]:
    known = [distinct_ids(IDS_OF_TABLE, seed=n + 1) for n in range(TABLES)]
    console.print(f"making {TABLES} tables of {IDS_OF_TABLE:,} ids")
    base = raw_table_in_shm(root, files, "updated", known, DIM)
    model, registration, rng = Model(root, "updated"), Registration(base, DEVICE), np.random.default_rng(0)
    batches = [_drawn(known, rng) for _ in range(WARM + TIMED)]
    ways = {
        "hbm": Placed.of(base, registration, None),
        "cached, 10 %": Placed.of(base, registration, CACHED_SHARE),
    }
    found, segment = [], base
    for share in SHARES:
        states = [base]
        for of_it in (share, share / 10):
            apply(model, changes_of(known, of_it, rng))
            states.append(attach_state(model, None, "header", segment))
            segment = states[-1]
        assert [len(state.deltas) for state in states] == [0, 1, 2], (
            "the second delta is small beside the first"
        )
        for way, placed in ways.items():
            found += _compare(way, share, placed, states, batches)
    return found


def _drawn(known: list[Any], rng: np.random.Generator) -> torch.Tensor:
    """Ids of all tables by Zipf's law, on the device."""
    power = 1 - ZIPF
    uniform = rng.random((TABLES, IDS))
    ranks = (((IDS_OF_TABLE + 1.0) ** power - 1) * uniform + 1) ** (1 / power)
    places = (np.minimum(ranks, IDS_OF_TABLE).astype(np.int64) - 1) * 2654435761 % IDS_OF_TABLE
    return torch.from_numpy(np.concatenate([ids[at] for ids, at in zip(known, places, strict=True)])).to(
        DEVICE
    )


def _compare(
    way: str, share: float, placed: Placed, states: list[Segment], batches: list[torch.Tensor]
) -> list[dict[str, Any]]:
    lookups, taken = [], []
    for state in states:
        torch.cuda.synchronize()
        started = time.perf_counter()
        tables, size = placed.state(state)
        taken.append((1e3 * (time.perf_counter() - started), size))
        check(placed.backend, tables, state, batches[0])
        lookups.append(DeviceLookup(placed.backend, [*tables.values()], BAG))
    times: list[list[float]] = [[] for _ in states]
    with torch.cuda.stream(placed.backend.launcher.stream):
        for lookup in lookups:
            for batch in batches[:WARM]:
                lookup(batch)
        for _ in range(ROUNDS):
            for lookup, of_state in zip(lookups, times, strict=True):
                of_state.append(steady_ms(lookup, batches[WARM:]))
    for lookup in lookups:
        lookup.check()
    found = []
    for deltas, (of_state, (state_ms, size)) in enumerate(zip(times, taken, strict=True)):
        ratio = median(ms / plain for ms, plain in zip(of_state, times[0], strict=True))
        row = {
            "rows": way,
            "changed": f"{100 * share:g} %",
            "deltas": deltas,
            "ms": median(of_state),
            "ratio": ratio,
            "state ms": state_ms,
            "copied MB": size / 1e6,
        }
        found.append(row)
        console.print(row)
    return found


# ---- the oracle ----


def _written(sequence: int) -> np.ndarray:
    """The rows that a delta overwrites, of all tables."""
    return np.random.default_rng(sequence).choice(ORACLE_ROWS, int(ORACLE_ROWS * ORACLE_SHARE), replace=False)


def write(root: Path, ids: np.ndarray, stop: Any) -> None:
    """Applies deltas until it is to stop. A process of its own."""
    model, sequence = Model(root, "oracle"), 0
    while not stop.is_set():
        sequence += 1
        rows = _written(sequence)
        values = np.full((rows.size, ORACLE_DIM), sequence, np.float32)
        apply(
            model,
            ChangeBatch([TableChanges(table, ids[rows], values) for table in ORACLE_TABLES]),
            ApplySettings(keep=Retention(2)),
        )


class _State(NamedTuple):
    """A state that was taken. expected: fp32 [rows], the sequence that each row must carry."""

    sequence: int
    lookup: DeviceLookup
    expected: torch.Tensor


def _take(
    model: Model, placed: Placed, states: "queue.Queue[_State]", base: Segment, stop: threading.Event
) -> None:
    """Takes each state that is live, beside lookups."""
    segment, taken, expected = base, -1, np.zeros(ORACLE_ROWS, np.float32)
    while not stop.is_set():
        segment = attach_state(model, None, "header", segment)
        sequence = segment.sequence
        if sequence == taken:
            time.sleep(1e-3)
            continue
        for one in range(max(taken, 0) + 1, sequence + 1):
            expected[_written(one)] = one
        taken = sequence
        tables, _ = placed.state(segment)
        lookup = DeviceLookup(placed.backend, [*tables.values()], precision=Precision.FP32)
        states.put(_State(sequence, lookup, torch.from_numpy(expected.copy()).to(DEVICE)))


def run_oracle(root: Path, files: Path, reads: int) -> list[dict[str, Any]]:
    ids = distinct_ids(ORACLE_ROWS, seed=1)
    arrays: dict[str, Any] = {t: np.zeros((ORACLE_ROWS, ORACLE_DIM), np.float32) for t in ORACLE_TABLES}
    np.savez(files / "o.npz", ids=ids, **arrays)
    how = {"row_format": "fp32", "ids": "raw", "id_key": "ids", "missing": "error"}
    spec = {
        "name": "oracle",
        "checkpoint": "o.npz",
        "tables": {t: {"key": t, **how} for t in ORACLE_TABLES},
        "features": {},
    }
    load(parse_model(spec, files), root)
    model = Model(root, "oracle")
    found = []
    for way, share in (("hbm", None), ("cached, 10 %", CACHED_SHARE)):
        model.activate(1, 0)
        found.append(_read(way, share, model, root, ids, reads // 2))
        console.print(found[-1])
        assert not found[-1]["torn"] + found[-1]["mixed"] + found[-1]["back"], found[-1]
        root = root / "next"
        load(parse_model(spec, files), root)
        model = Model(root, "oracle")
    return found


def _read(
    way: str, share: float | None, model: Model, root: Path, ids: np.ndarray, reads: int
) -> dict[str, Any]:
    base = model.attach(verify="header")
    placed = Placed.of(base, Registration(base, DEVICE), share)
    context = multiprocessing.get_context("spawn")
    stop, done = context.Event(), threading.Event()
    writer = context.Process(target=write, args=(root, ids, stop))
    states: queue.Queue[_State] = queue.Queue(2)
    taker = threading.Thread(target=_take, args=(model, placed, states, base, done), daemon=True)
    writer.start()
    taker.start()
    on_device, rng = torch.from_numpy(ids).to(DEVICE), torch.Generator(device=DEVICE).manual_seed(0)
    torn, mixed = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2))
    state, taken, back, count, started = states.get(), 1, 0, 0, time.perf_counter()
    with torch.cuda.stream(placed.backend.launcher.stream):
        while count < reads:
            if not states.empty():
                torch.cuda.current_stream().synchronize()  # the state that goes is not read any more
                before, state = state, states.get()
                taken, back = taken + 1, back + (state.sequence < before.sequence)
            rows = torch.randint(
                ORACLE_ROWS, (len(ORACLE_TABLES) * ORACLE_IDS,), device=DEVICE, generator=rng
            )
            vectors = state.lookup(on_device[rows]).view(-1, ORACLE_DIM)
            is_torn = (vectors != vectors[:, :1]).any(1)
            torn += is_torn.sum()
            mixed += (~is_torn & (vectors[:, 0] != state.expected[rows])).sum()
            count += rows.numel()
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    done.set()
    stop.set()
    while taker.is_alive():
        while not states.empty():
            states.get()
        taker.join(0.1)
    writer.join()
    return {
        "rows": way,
        "M reads": count / 1e6,
        "states taken": taken,
        "deltas applied": model.record().latest_sequence,
        "seconds": seconds,
        "torn": int(torn),
        "mixed": int(mixed),
        "back": back,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("deltas", "oracle"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(
        "--reads", type=int, default=50_000_000, help="of the oracle's run, over both placements"
    )
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name(DEVICE)
    with shared_folder() as root, TemporaryDirectory(dir="/dev/shm") as folder:
        if options.deltas:
            report(
                "gpu_updates", "lookups with deltas, on one GPU", measure_deltas(root, Path(folder)), gpu=gpu
            )
        if options.oracle:
            found = run_oracle(root, Path(folder), options.reads)
            report("gpu_updates_oracle", "lookups while rows change, on one GPU", found, gpu=gpu)


if __name__ == "__main__":
    main()
