"""Lookups while deltas lie over a version, beside the same lookups without; what deltas take, and what
compaction does.

A table of row numbers, int8, D 64. Requests of 26 x 32 bags of 20 ids, uniform over all rows, by one thread
of the native kernel. The states with 0, 1 and 2 deltas of 0.1 %, 1 % and 10 % of the rows take turns of 20
requests. Then the same requests over HTTP: a server of one worker on one core, 4 connections from another,
the states in turns as the live one, 0.6 s each. Every state's vectors are checked against rows that were put
together apart from it, bit for bit, before anything is timed.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
from common import console, report, shared_folder
from http_cases import Server, line, serving, warm_up

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.header import Header
from tableside.loader.segment.layout import plan_tables
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import State, attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, RowFormat, Source, Table, choose
from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.generator import run

DIM, BAG, FEATURES, BATCH = 64, 20, 26, 32
BAGS = FEATURES * BATCH
CALLS = 20  # of a state, until it is another one's turn
CONNECTIONS, SECONDS, TURNS = 4, 0.6, 9  # over HTTP: of each state's turns
SERVER_CORE, LOAD_CORE = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
SHARES = (0.001, 0.01, 0.1)
GOAL = 1.02  # times the time without deltas, at 1 %


@contextmanager
def published(rows: int, features: Sequence[str] = ("t",)) -> Iterator[Model]:
    """A model of one table of so many rows, of values that repeat."""
    with shared_folder() as root:
        model = Model(root, "ads")
        with model.loading() as version:
            row_bytes = RowFormat.INT8.row_bytes(DIM)
            tables = plan_tables([StoredTable(rows, row_bytes, 0, 1, 0, "t", "t", "int8", DIM)])
            header = Header("ads", version, "", tables, tuple(FeatureSpec(name, "t") for name in features))
            writer = model.writer(version, header)
            some = packed(np.random.default_rng(0).standard_normal((1 << 16, DIM), dtype=np.float32))
            (table,) = writer.header.tables
            for start in range(0, rows, len(some)):
                stop = min(start + len(some), rows)
                writer.rows(table, start, stop)[:] = some[: stop - start]
            writer.seal({"seconds": 1.0})
            model.publish(version)
        yield model


def packed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    made = np.zeros((len(values), RowFormat.INT8.row_bytes(DIM)), np.uint8)
    choose().quantize(values, Source.FP32, RowFormat.INT8, made)
    return made


class States:
    """The states of a benchmark by name, and what their rows must be."""

    def __init__(self, model: Model, rows: int) -> None:
        self.model, self.rows = model, rows
        self.base = attach_state(model, None, "header")
        self.segments: dict[str, Segment] = {"no delta": self.base}
        self.changes: dict[str, list[TableChanges]] = {"no delta": []}
        for share in SHARES:
            for parts in (1, 2):
                self._add(f"{share:.1%}, {parts}", share, parts)

    def _add(self, name: str, share: float, parts: int) -> None:
        """Changes of this share of the rows in so many deltas, over the bare version."""
        self.model.activate(self.base.header.version, 0)
        rng = np.random.default_rng(int(share * 1e6) + parts)
        ids = rng.choice(self.rows, int(self.rows * share), replace=False)
        split = (
            [ids] if parts == 1 else np.split(ids, [ids.size * 4 // 5])
        )  # the newer one small beside the older
        self.changes[name] = [
            TableChanges("t", part, rng.standard_normal((part.size, DIM), dtype=np.float32)) for part in split
        ]
        for change in self.changes[name]:
            apply(self.model, ChangeBatch([change]), ApplySettings(keep=Retention(100), merge_share=0.3))
        self.segments[name] = attach_state(self.model, None, "header")
        assert len(self.segments[name].deltas) == parts, name

    def check(self, name: str, ids: np.ndarray[Any, Any]) -> None:
        """The rows of `ids`, and of all that was changed, bit for bit."""
        table = self.segments[name].tables["t"]
        changed = np.concatenate([np.empty(0, np.int64), *(c.ids for c in self.changes[name])])[:100_000]
        asked = np.concatenate([ids, changed])
        rows = self.base.tables["t"].packed[asked]
        for change in self.changes[name]:
            order = np.argsort(change.ids)
            at = order[np.minimum(np.searchsorted(change.ids, asked, sorter=order), change.ids.size - 1)]
            hit = change.ids[at] == asked
            rows[hit] = packed(change.vectors[at[hit]])
        expected = choose().lookup(
            Table(rows, RowFormat.INT8, DIM), np.arange(asked.size), pooling=Pooling.NONE
        )
        np.testing.assert_array_equal(choose().lookup(table, asked, pooling=Pooling.NONE), expected)


def reads(states: States, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a request, by state: medians over rounds, and each state's ratio to the one without
    deltas. States take turns of some calls, as a server answers many requests from one state."""
    rng, lengths = np.random.default_rng(1), np.full(BAGS, BAG, np.int32)
    out = np.empty((BAGS, DIM), np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in states.segments}
    for n in range(rounds):
        names = list(seconds)
        for name in names[n % len(names) :] + names[: n % len(names)]:
            for _ in range(CALLS):
                ids = rng.integers(0, states.rows, BAGS * BAG)
                started = time.perf_counter()
                choose().lookup(states.segments[name].tables["t"], ids, lengths, out=out)
                seconds[name].append(time.perf_counter() - started)
    plain = np.array(seconds["no delta"])
    return [
        {
            "state": name,
            "us": float(np.median(of_it) * 1e6),
            "rows_per_s": float(BAGS * BAG / np.median(of_it)),
            "ratio": float(np.median(np.array(of_it)) / np.median(plain)),
        }
        for name, of_it in seconds.items()
    ]


def over_http(states: States, turns: int) -> list[dict[str, Any]]:
    """Requests a second, and the worker's processor time for one, by state: medians over turns; ratios to
    the state without deltas."""
    described = {
        "name": "ads",
        "tables": [{"name": "t", "rows": states.rows}],
        "features": [{"name": f"f{i}", "table": "t"} for i in range(FEATURES)],
    }
    rates: dict[str, list[float]] = {name: [] for name in states.segments}
    cpu_s: dict[str, list[float]] = {name: [] for name in states.segments}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {SERVER_CORE})  # inherited by the server
    with serving(
        "-m",
        "tableside",
        "serve",
        "ads",
        "--root",
        states.model.root,
        "--port",
        0,
        "--drain-s",
        0,
        "--scrub-hours",
        0,
    ) as server:
        os.sched_setaffinity(0, {LOAD_CORE})
        requests = bench.make_requests(described, server.url, bench.Shape(BATCH, BAG, same=True), "named")
        warm_up(server.url, requests, CONNECTIONS)
        for n in range(turns):
            names = list(rates)
            for name in names[n % len(names) :] + names[: n % len(names)]:
                make_live(states, name, server)
                before = server.cpu_s()
                load = run(server.url, requests, concurrency=CONNECTIONS, seconds=SECONDS)
                if load.failed:
                    raise SystemExit(
                        f"{load.failed} of {load.latencies_s.size} requests failed: {load.failure}"
                    )
                rates[name].append(load.requests_per_s)
                cpu_s[name].append((server.cpu_s() - before) / load.latencies_s.size)
    os.sched_setaffinity(0, cores)
    plain = np.median(rates["no delta"]), np.median(cpu_s["no delta"])
    return [
        {
            "state": name,
            "requests_per_s": float(np.median(rates[name])),
            "times_fewer": float(plain[0] / np.median(rates[name])),
            "cpu_us": float(np.median(cpu_s[name]) * 1e6),
            "cpu_ratio": float(np.median(cpu_s[name]) / plain[1]),
        }
        for name in rates
    ]


def make_live(states: States, name: str, server: Server) -> None:
    """Returns when the server answers from a state."""
    deltas = states.segments[name].deltas
    sequence = deltas[0].sequence if deltas else 0
    states.model.activate(states.base.header.version, sequence)
    until = time.monotonic() + 10
    while httpx.get(f"{server.url}/v1/models").json()["models"][0]["sequence"] != sequence:
        if time.monotonic() > until:
            raise SystemExit(f"the server does not answer from the state {name}")
        time.sleep(0.02)


def memory(states: States) -> list[dict[str, Any]]:
    """Bytes of the files of each state's deltas for each byte of their rows."""
    found = []
    for name, segment in states.segments.items():
        if not segment.deltas:
            continue
        of_rows = sum(d.segment.header.table_bytes for d in segment.deltas)
        files = sum(d.segment.size for d in segment.deltas)
        found.append(
            {"state": name, "rows_mb": of_rows / 1e6, "files_mb": files / 1e6, "ratio": files / of_rows}
        )
    return found


def taken(states: States, rounds: int = 20) -> dict[str, float]:
    """Milliseconds until a state is attached and its delta verified, by a process that has its version
    mapped."""
    found = {}
    for name, segment in states.segments.items():
        if segment.deltas:
            state, times = State(states.base.header.version, segment.deltas[0].sequence), []
            for _ in range(rounds):
                started = time.perf_counter()
                attach_state(states.model, state, "full", states.base)
                times.append(time.perf_counter() - started)
            found[name] = float(np.median(times) * 1e3)
    return found


def compaction(states: States) -> dict[str, Any]:
    """The live state, of 10 % in two deltas, becomes a version; beside a copy of the segment by numpy."""
    started = time.perf_counter()
    copied = states.base.mapping.bytes.copy()
    copy_s = time.perf_counter() - started
    del copied
    name = list(states.segments)[-1]
    states.model.activate(states.base.header.version, states.segments[name].deltas[0].sequence)
    rng = np.random.default_rng(3)
    asked = rng.integers(0, states.rows, 100_000)
    before = choose().lookup(states.segments[name].tables["t"], asked, pooling=Pooling.NONE)
    done = compact(states.model)
    assert done is not None
    after = choose().lookup(
        attach_state(states.model, None, "header").tables["t"], asked, pooling=Pooling.NONE
    )
    np.testing.assert_array_equal(after, before)
    return {
        "merged_rows": done.merged,
        "segment_gb": done.segment_bytes / 1e9,
        "seconds": done.seconds,
        "gb_per_s": done.segment_bytes / done.seconds / 1e9,
        "copy_gb_per_s": states.base.size / copy_s / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--turns", type=int, default=TURNS, help="of each state over HTTP (default: %(default)s)"
    )
    options = parser.parse_args()
    with published(options.rows, [f"f{i}" for i in range(FEATURES)]) as model:
        states = States(model, options.rows)
        for name in states.segments:
            states.check(name, np.random.default_rng(2).integers(0, options.rows, 100_000))
        console.print("every state's rows are right")
        found = reads(states, options.rounds)
        more = {
            "rows_of_the_table": options.rows,
            "goal": GOAL,
            "memory": memory(states),
            "attach_ms": taken(states),
        }
        more["over_http"] = over_http(states, options.turns)
        for row in more["over_http"]:
            console.print(line(row))
        report(
            "update_reads", f"lookups with deltas, int8 D {DIM}", found, **more, compaction=compaction(states)
        )


if __name__ == "__main__":
    main()
