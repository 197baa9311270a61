"""Requests that name no version, while changes are applied, compacted and gone back from, and workers and
engines are killed.

Promised: each is answered from one state that there is, and says from which; none is a 404. Every state that
is to be kept can be gone back to. Once changes end, the server answers from the live state, however small the
budget of its GPU is.

The oracle: each batch writes its number into all values of some rows, row 0 among them, and what every row is
in each state is kept. An answer names its state, so every row of it is known.

A server on CPUs, then on a GPU in each placement with a budget of 1.1 and of 0.3 times the model. Without a
GPU these run in Triton's interpreter, few requests of them.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.common import Goal, at_least, folders, none, random_of, standalone, until, workers_of
from campaigns.engines import device
from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.memory import processes_below
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import State, kept_states, state_of
from tableside.loader.versions.versions import Model
from tableside.quant.contract import INTERPRETER
from tableside.serving.cli.local import local_server
from tableside.serving.client import Client, ClientError, Jagged
from tableside.serving.engine_process.main import NAME

ROWS, DIM, A_BATCH, IDS = 4000, 16, 150, 40
RAW_STEP = 7919  # between the ids of the table of raw ids
KEPT, CLIENTS, COMPACT_EVERY = 8, 4, 40
PLACEMENTS, BUDGETS = ("hbm", "cached", "hybrid", "zero_copy", "auto"), (1.1, 0.3)
NEVER = (
    *(
        "wrong rows",
        "answers of no state",
        "404 without a version",
        "other refusals",
        "states that were kept and are not there",
    ),
    "servers that stayed behind",
)


class Steps:
    """A thread that takes one step after another. An error ends it, and comes out of `finish`."""

    def __init__(self) -> None:
        self.counts, self._ending = Counter[str](), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: Exception | None = None

    def step(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self.step()
        except Exception as error:  # noqa: BLE001  (raised by `finish`)
            self._error = error

    def begin(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        self._ending.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


class Writer(Steps):
    """Applies, compacts and goes back, until it is told to end. rows: state -> which batch wrote each row
    last; both tables are changed alike."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__()
        self.model, self.rows = Model(root, "demo"), {State(1): np.zeros(ROWS, np.float32)}
        self._applied = 0
        self._chance, self._rng, self._number = random_of(seed, "present"), np.random.default_rng(seed), 0

    def step(self) -> None:
        if self._number % COMPACT_EVERY == COMPACT_EVERY - 1:
            live, record = self._live(), self.model.record()
            merged = record.latest_sequence + 1  # the deltas as one, of which the next version is made
            for state in (
                State(live.version, merged),
                State(record.latest + 1),
                State(record.latest + 1, merged),
            ):
                self.rows[state] = self.rows[live]
            self.rows[State(record.latest + 1, live.sequence)] = self.rows[live]
            compact(self.model)
            self.model.collect(1)
            self.counts["compactions"] += 1
        elif self._chance.random() < 0.05:
            self._go_back()
        self._change()
        time.sleep(self._chance.choice((0.0, 0.0, 0.05)))

    def _live(self) -> State:
        return state_of(self.model.record())

    def _change(self) -> None:
        self._number += 1
        before, rows = self._live(), np.unique(np.append(self._rng.integers(0, ROWS, A_BATCH), 0))
        vectors = np.full((rows.size, DIM), self._number, np.float32)
        changes = [TableChanges("dense", rows, vectors), TableChanges("raw", rows * RAW_STEP, vectors)]
        after = self.rows[before].copy()
        after[rows] = self._number
        self.rows[State(before.version, self.model.record().latest_sequence + 1)] = after
        state = apply(self.model, ChangeBatch(changes), ApplySettings(threads=1, keep=Retention(KEPT))).state
        self.rows[state] = after
        self.counts["batches applied"] += 1
        self._applied += 1

    def _go_back(self) -> None:
        """To one of the states that are kept; each of them has to be there."""
        live = self._live()
        kept = [
            s for v in self.model.versions() for s in kept_states(self.model, v) if s.sequence and s != live
        ]
        self.counts["states that were kept and are not there"] += len(kept) < min(KEPT, self._applied - 1)
        if there := [s for s in kept if s.version == live.version]:
            state = self._chance.choice(there)
            self.model.activate(*state)
            self.counts["times gone back"] += 1


class Asker(Steps):
    """A client in a thread. It sends a request again only where its connection broke."""

    def __init__(self, url: str, writer: Writer, seed: int) -> None:
        super().__init__()
        self._client, self._writer, self._rng = (
            Client(url, retries=20, timeout_s=60),
            writer,
            np.random.default_rng(seed),
        )
        self.state = State(0)

    def step(self) -> None:
        rows = self._rng.integers(0, ROWS, IDS)
        rows[0] = 0
        try:
            found = self._client.lookup("demo", {"dense": Jagged(rows), "raw": Jagged(rows * RAW_STEP)})
        except ClientError as error:
            what = {404: "404 without a version", 503: "answered 503"}.get(error.status, "other refusals")
            self.counts[what] += 1
            if what != "answered 503" and not self.counts[f"told: {what}"]:
                print(f"present: {error}", flush=True)
            self.counts[f"told: {what}"] = 1
            time.sleep(0.01)
            return
        self.state = State(*self._client.answered_by())
        expected: NDArray[np.float32] | None = self._writer.rows.get(self.state)
        self.counts["requests"] += 1
        self.counts["answers of no state"] += expected is None
        if expected is not None:
            for vectors in found.values():
                self.counts["wrong rows"] += int((vectors != expected[rows][:, None]).any(1).sum())

    def finish(self) -> None:
        super().finish()
        self._client.close()


def publish(root: Path, files: Path) -> int:
    """A table of row numbers and one of raw ids, of zeros; the bytes of both."""
    zeros, ids = np.zeros((ROWS, DIM), np.float32), np.arange(ROWS) * RAW_STEP
    arrays: dict[str, Any] = {"dense": zeros, "raw.weight": zeros, "raw.ids": ids}
    np.savez(files / "rows.npz", **arrays)
    raw = {
        "name": "demo",
        "checkpoint": "rows.npz",
        "tables": {
            "dense": {"key": "dense", "row_format": "fp32"},
            "raw": {"key": "raw.weight", "row_format": "fp32", "ids": "raw", "id_key": "raw.ids"},
        },
        "features": {"dense": {"pooling": "none"}, "raw": {"pooling": "none"}},
    }
    load(parse_model(raw, files), root)
    return sum(t.packed.nbytes for t in Model(root, "demo").attach().tables.values())


def victims(supervisor: int, root: Path) -> list[int]:
    """Engine processes and workers of a server."""
    return [
        pid for pid in {*processes_below(supervisor), *workers_of(supervisor, root)} if _is_victim(pid, root)
    ]


def _is_victim(pid: int, root: Path) -> bool:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/comm").read_text().startswith(NAME)
            or str(root) in Path(f"/proc/{pid}/maps").read_text()
        )
    return False


def one_server(seconds: float, seed: int, options: tuple[str, ...], budget: float) -> Counter[str]:
    """The campaign against one server. budget: of its GPU, in models."""
    chance, counts = random_of(seed, "present", *options, budget), Counter[str]()
    with folders() as (root, files):
        size = publish(root, files)
        if budget:
            options = (
                *options,
                "--hbm-budget",
                str(int(budget * size) + (1 << 17)),
            )  # and room for the indexes of a small model
        with local_server(["demo"], *options, root=root, workers=2) as server:
            writer = Writer(root, seed)
            askers = [Asker(server.url, writer, seed + n) for n in range(CLIENTS)]
            writer.begin()
            for asker in askers:
                asker.begin()
            try:
                _torment(server.pid, root, seconds, chance, counts)
                counts["servers that stayed behind"] += not _catches_up(writer, askers)
            finally:
                for one in (writer, *askers):
                    one.finish()
    return sum((asker.counts for asker in askers), counts + writer.counts)


def _torment(
    supervisor: int, root: Path, seconds: float, chance: random.Random, counts: Counter[str]
) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(chance.uniform(0.3, 1.5))
        if there := victims(supervisor, root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(there), signal.SIGKILL)
                counts["kills"] += 1


def _catches_up(writer: Writer, askers: list[Asker]) -> bool:
    """Whether every client is answered from the live state, once nothing changes any more."""
    writer.finish()
    live = state_of(writer.model.record())
    try:
        until(lambda: all(asker.state == live for asker in askers), 120, "answers from the live state")
    except TimeoutError:
        return False
    return True


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign."""
    counts = Counter[str](dict.fromkeys(NEVER, 0))
    with device() as name:
        on_device = ("--devices", name, "--gpu-from-ids", "0")
        servers: list[tuple[tuple[str, ...], float]] = [
            ((*on_device, "--placement", p), b) for b in BUDGETS for p in PLACEMENTS if (p, b) != ("hbm", 0.3)
        ]
        if name == INTERPRETER:  # slow: one placement each time
            servers = [random_of(seed, "present").choice(servers)]
        for options, budget in [((), 0.0), *servers]:
            counts += one_server(seconds / (1 + len(servers)), seed, options, budget)
            counts["servers"] += 1
            print(
                f"present: {' '.join(options) or 'CPUs'}, {budget or 'no'} budget: {dict(counts)}", flush=True
            )
    return {**dict.fromkeys(NEVER, 0), **counts}


GOALS: dict[str, Goal] = {
    "requests": at_least(100_000),
    "batches applied": at_least(1000),
    "compactions": at_least(20),
    "times gone back": at_least(20),
    "kills": at_least(50),
    **dict.fromkeys(NEVER, none()),
}


if __name__ == "__main__":
    standalone(run)
