"""The lookups that are measured over HTTP: their models, the requests in every form, and the check of
their answers."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import httpx
import numpy as np
import orjson
from make_model import publish_random
from numpy.typing import NDArray

from tableside.loader.segment.memory import processes_below
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Lookup, Plan, Pooling, choose
from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.bench import HEADER_LENGTH
from tableside.serving.cli.commands.generator import run

DIM, MAX_ROWS, MODEL_BYTES = 64, 200_000, 1 << 30
WARM_UP_REQUESTS = 200
LARGEST = 6.0  # of the models' values, by far
# What the columns are called: whether all lengths are the same, and the form of the requests.
WAYS: dict[str, tuple[bool, bench.Form]] = {
    "same": (True, "named"),
    "named": (False, "named"),
    "compact": (False, "compact"),
}


@dataclass(frozen=True)
class Case:
    """Requests for `features` features of `batch` bags of `ids` ids each, on average; every feature has a
    table, int8 of DIM."""

    features: int
    batch: int
    ids: int

    def __str__(self) -> str:
        return f"{self.features} x {self.batch} x {self.ids}"

    @property
    def model(self) -> str:
        return f"f{self.features}"

    @property
    def rows(self) -> int:
        """Of a table: as many as a model of MODEL_BYTES has, at most MAX_ROWS."""
        return min(MAX_ROWS, MODEL_BYTES // (DIM + 16) // self.features)

    @property
    def described(self) -> dict[str, Any]:
        """As /v1/models describes the model, as far as the load generator reads it."""
        names = [f"t{i}" for i in range(self.features)]
        tables = [{"name": n, "rows": self.rows} for n in names]
        return {"name": self.model, "tables": tables, "features": [{"name": n, "table": n} for n in names]}

    def shape(self, same: bool) -> bench.Shape:
        return bench.Shape(self.batch, self.ids, same)


CASES = (Case(8, 8, 10), Case(26, 32, 20), Case(100, 64, 5), Case(300, 1, 3), Case(1000, 1, 3))


def publish(root: Path) -> None:
    """Publishes the models of all cases."""
    publish_cases(root, CASES)


def publish_cases(root: Path, cases: Sequence[Case]) -> None:
    for case in {case.model: case for case in cases}.values():
        publish_random(root, case.model, {f"t{i}": (case.rows, DIM, "int8") for i in range(case.features)})


def prepare(case: Case, url: str) -> dict[str, list[bytes]]:
    """Requests for every one of WAYS."""
    return {
        way: bench.make_requests(case.described, url, case.shape(same), form)
        for way, (same, form) in WAYS.items()
    }


class InProcess:
    """A model's lookups without a server: what answers must be, and what they cost."""

    def __init__(self, root: Path, case: Case) -> None:
        self.case = case
        self._segment = attach_state(Model(root, case.model), None, "header")
        self._tables = list(self._segment.tables.values())

    def expected(
        self, values: NDArray[np.int64], lengths: NDArray[np.int32], features: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """fp32 [bags, features * DIM], feature by feature. features: by number; None: all."""
        ids = np.split(values, np.cumsum(lengths.sum(1))[:-1])
        tables = self._tables if features is None else [self._tables[f] for f in features]
        found = [
            choose().lookup(t, i, n, pooling=Pooling.SUM)
            for t, i, n in zip(tables, ids, lengths, strict=True)
        ]
        return np.hstack(found)

    def seconds(self) -> list[float]:
        """Of each of several different lookups: the plan's run alone, laid out before, on inputs that were
        just written."""
        out = np.empty(self.case.features * self.case.batch * DIM * 4, np.uint8)
        received = bytearray(max(len(inputs) for _, inputs in self._runs))
        found = []
        for plan, inputs in self._runs:
            received[: len(inputs)] = inputs  # as a worker's are when it looks up
            view = memoryview(received)[: len(inputs)]
            started = time.perf_counter()
            plan.run(view, out)
            found.append(time.perf_counter() - started)
            view.release()
        return found

    @cached_property
    def _runs(self) -> list[tuple[Plan, bytes]]:
        rng = np.random.default_rng(1)
        runs = []
        for _ in range(48):
            values, lengths = bench.draw(rng, self.case.described, self.case.shape(same=False))
            runs.append((self._plan(lengths), values.tobytes() + lengths.tobytes()))
        return runs

    def _plan(self, lengths: NDArray[np.int32]) -> Plan:
        batch, lookups, at = self.case.batch, [], 0
        counts = lengths.sum(1).tolist()
        lengths_at = 8 * sum(counts)
        for i, (table, count) in enumerate(zip(self._tables, counts, strict=True)):
            out_at = i * batch * DIM * 4
            lookups.append(
                Lookup(
                    table, Pooling.SUM, at, count, out_at, bags=batch, lengths_at=lengths_at + 4 * batch * i
                )
            )
            at += 8 * count
        return choose().plan(lookups, 1, self.case.features * batch * DIM * 4)


def check(case: Case, inside: InProcess, url: str, way: str, exact: bool) -> int:
    """Compares three answers with the lookups in process; returns the bytes of an answer's body.

    exact: bit for bit; else within the error of a sum of as many terms in another order.
    """
    same, form = WAYS[way]
    rng = np.random.default_rng(5)
    size = 0
    for _ in range(3):
        values, lengths = bench.draw(rng, case.described, case.shape(same))
        headers, body = bench.encode(case.described, values, lengths, same=same, form=form)
        reply = httpx.post(f"{url}/v2/models/{case.model}/infer", content=body, headers=headers, timeout=30)
        if reply.status_code != 200:
            raise SystemExit(f"{url} answered {case}, {way}: {reply.status_code} {reply.text[:500]}")
        terms = int(lengths.max())
        bound = 0.0 if exact else 3 * terms * 2.0**-24 * LARGEST * terms
        np.testing.assert_allclose(
            vectors(reply.headers, reply.content), inside.expected(values, lengths), rtol=0, atol=bound
        )
        size = len(reply.content)
    return size


def warm_up(url: str, requests: Sequence[bytes], connections: int) -> int:
    """Sends WARM_UP_REQUESTS or more, as a worker learns headers from the first ones that it gets. Returns
    how many."""
    sent = 0
    while sent < WARM_UP_REQUESTS:
        load = run(url, requests, concurrency=connections, seconds=0.1, first=sent)
        if load.failed:
            raise SystemExit(f"{url}: {load.failed} requests failed: {load.failure}")
        sent += load.latencies_s.size
    return sent


def vectors(headers: Mapping[str, str], body: bytes) -> NDArray[np.float32]:
    """All vectors of an answer side by side, fp32 [bags, sum of dims]; of either form."""
    at = int(headers[HEADER_LENGTH])
    found = []
    for output in orjson.loads(body[:at])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found.append(np.frombuffer(body[at : at + size], np.float32).reshape(output["shape"]))
        at += size
    assert at == len(body)
    return np.hstack(found)


def line(row: Mapping[str, Any]) -> str:
    """A row to look at while others are measured."""
    return ", ".join(
        f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if v is not None
    )


@dataclass(frozen=True)
class Server:
    """A server that runs: where, as which process, what it logs to, and the seconds until it was ready."""

    url: str
    process: "subprocess.Popen[str]"
    log: IO[str]
    ready_s: float

    def cpu_s(self) -> float:
        """Seconds of processor time that its processes have used."""
        pids = (self.process.pid, *processes_below(self.process.pid))
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # clock_getcpuclockid(3) of each


@contextmanager
def serving(*command: object, checkout: Path | None = None) -> Iterator[Server]:
    """A server in processes of its own, started by Python with these arguments. It is ready when it prints
    its url. checkout: another one, whose environment and files it takes."""
    with TemporaryFile("w+") as log:
        python = sys.executable if checkout is None else str(checkout / ".venv/bin/python")
        arguments = [python, *(str(c) for c in command)]
        started = time.perf_counter()
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=log, text=True, cwd=checkout)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not (found := re.search(r"http://\S+", line)):
                log.seek(0)
                raise SystemExit(f"the server did not start: {line}{log.read()}")
            yield Server(found[0], process, log, time.perf_counter() - started)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
