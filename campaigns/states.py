"""States are read in every way, while a writer applies changes at full speed, is killed, and deltas are
compacted.

Readers attach them, look up through a PyTorch module and over HTTP, and `tableside eval` scores a data set of
all rows with two processes. Promised: each sees whole states alone. No row is torn, none of an answer is from
another state, none is older than one that the same reader saw before, and nothing that was applied is lost.

The oracle: every value of a row is the number of the batch that wrote it, and each batch writes row 0. What
else a batch changes follows from its number, so whoever sees row 0 knows every other row of that state.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.common import Goal, at_least, folders, none, random_of, standalone, until
from tableside.loader.deltas.apply import ApplySettings, apply, position_of
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import LoaderError
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.cli.local import local_server

ROWS, DIM, A_BATCH = 20_000, 16, 700
KEPT, KEPT_VERSIONS = 500, 8  # states and versions, as an evaluation takes seconds to begin
SCALE = 2.0**-24  # exact, and a score below 1 whatever number a row has
SOURCE = "numbers"
NEVER = (
    "torn rows",
    "rows of another state",
    "readers that went back",
    "batches lost",
    "evaluations that failed",
)


def changed_by(number: int) -> NDArray[np.int64]:
    """The rows that a batch overwrites, row 0 among them; of some numbers many, so that deltas are merged."""
    rng = np.random.default_rng(number)
    return np.unique(np.append(rng.integers(0, ROWS, A_BATCH * (8 if number % 16 == 0 else 1)), 0))


class Rows:
    """Which batch wrote each row last, up to a number."""

    def __init__(self) -> None:
        self.number, self.writer = 0, np.zeros(ROWS, np.float32)

    def up_to(self, number: int) -> NDArray[np.float32]:
        if number < self.number:
            self.number, self.writer = 0, np.zeros(ROWS, np.float32)
        for n in range(self.number + 1, number + 1):
            self.writer[changed_by(n)] = n
        self.number = max(number, self.number)
        return self.writer


def write(root: Path) -> None:
    """Applies batch after batch, from where the live state is, until it is killed."""
    model = Model(root, "demo")
    while True:
        done = position_of(model, SOURCE)
        number = int(done or 0) + 1
        ids = changed_by(number)
        changes = TableChanges("t", ids, np.full((ids.size, DIM), number, np.float32))
        with contextlib.suppress(LoaderError):  # a compaction made another version live meanwhile
            apply(
                model, ChangeBatch([changes], SOURCE, str(number), done), ApplySettings(keep=Retention(KEPT))
            )


class Seen:
    """What a reader saw, compared with what it must be. counts: by name."""

    def __init__(self, way: str) -> None:
        self.counts, self._way, self._rows, self.latest = Counter[str](), way, Rows(), 0

    def compare(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """One answer: vectors [n, dim] of ids [n], the first of which is row 0."""
        number = int(vectors[0, 0])
        self.counts["readers that went back"] += number < self.latest
        self.latest = max(self.latest, number)
        self.counts["torn rows"] += int((vectors != vectors[:, :1]).any(1).sum())
        self.counts["rows of another state"] += int((vectors[:, 0] != self._rows.up_to(number)[ids]).sum())
        self.counts["rows read"] += ids.size
        self.counts[f"rows read {self._way}"] += ids.size


def drawn(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Rows to read, of which the first is row 0."""
    ids = rng.integers(0, ROWS, count)
    ids[0] = 0
    return ids


def read(root: Path, seed: int, end: float, pipe: Connection) -> None:
    """Reads states as they come, of every eighth also through a module, and sends what was seen."""
    import torch  # here, as the writer starts sooner without it

    from tableside.torch import Embeddings

    model, rng, seen, seen_by_module = (
        Model(root, "demo"),
        np.random.default_rng(seed),
        Seen("attached"),
        Seen("by a module"),
    )
    module, states = Embeddings("demo", ["each"], root=str(root)), 0
    segment = attach_state(model, None, "full")
    while time.monotonic() < end or not states:
        segment, states = attach_state(model, None, "full", segment), states + 1
        ids = drawn(rng, 50_000)
        seen.compare(ids, choose().lookup(segment.tables["t"], ids, pooling=Pooling.NONE))
        position = 0 if segment.change is None else int(segment.change.positions.get(SOURCE, 0))
        seen.counts["rows of another state"] += position != seen.latest
        if states % 8 == 1:
            module.refresh()
            ids = ids[:5000]
            seen_by_module.compare(ids, module({"each": torch.from_numpy(ids)})["each"].numpy())
    pipe.send(seen.counts + seen_by_module.counts + Counter({"states read": states}))


def ask(url: str, seed: int, end: float, pipe: Connection) -> None:
    """Reads over HTTP, through one connection."""
    from tableside.serving.client import Client, Jagged

    rng, seen = np.random.default_rng(seed), Seen("over HTTP")
    with Client(url, retries=0) as client:
        while time.monotonic() < end or not seen.counts:
            ids = drawn(rng, 5000)
            seen.compare(ids, client.lookup("demo", {"each": Jagged(ids, [ids.size])})["each"])
    pipe.send(seen.counts)


def evaluate(root: Path, files: Path, end: float, pipe: Connection) -> None:
    """Scores all rows again and again. A score is the row's number times SCALE, exactly."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids, seen = np.arange(ROWS), Seen("by evaluations")
    rows = pa.table({"t": ids, "scale": np.zeros(ROWS, np.int64), "label": ids % 2})
    pq.write_table(rows, files / "rows.parquet", row_group_size=1000)
    while time.monotonic() < end or not seen.counts["evaluations"] + seen.counts["evaluations that failed"]:
        out = files / "out"
        command = [
            sys.executable,
            "-m",
            "tableside",
            "eval",
            "demo",
            files / "rows.parquet",
            "--out",
            out,
            "--root",
            root,
        ]
        ran = subprocess.run(
            [*map(str, command), "--workers", "2", "--shard-rows", "1000"],
            capture_output=True,
            text=True,
            check=False,
        )
        if (
            ran.returncode and "not published" in ran.stderr
        ):  # a compaction pushed it out before all processes had it
            seen.counts["evaluations whose state was gone"] += 1
        elif ran.returncode:
            print(f"states: an evaluation failed: {ran.stderr}", flush=True)
            seen.counts["evaluations that failed"] += 1
        else:
            parts = pa.concat_tables(
                [pq.read_table(p) for p in sorted((out / "parts").glob("*.parquet"))]
            ).sort_by("row")
            scores = parts.column("score_0").to_numpy() / (SCALE * DIM)
            seen.compare(ids, np.repeat(scores[:, None], DIM, 1).astype(np.float32))
            seen.counts["evaluations"] += 1
        rmtree(out, ignore_errors=True)
    pipe.send(seen.counts)


def _has_moved(model: Model, began: str | None) -> bool:
    return position_of(model, SOURCE) != began


def publish(root: Path, files: Path) -> Model:
    """A table of zeros, and one row that scales it to a score."""
    np.savez(
        files / "rows.npz", t=np.zeros((ROWS, DIM), np.float32), scale=np.full((1, DIM), SCALE, np.float32)
    )
    raw = {
        "name": "demo",
        "checkpoint": "rows.npz",
        "tables": {name: {"key": name, "row_format": "fp32"} for name in ("t", "scale")},
        "features": {"t": {}, "scale": {}, "each": {"table": "t", "pooling": "none"}},
        "scorer": {"kind": "dot", "features": ["t", "scale"]},
        "eval": {"label": "label"},
    }
    load(parse_model(raw, files), root)
    return Model(root, "demo")


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign."""
    chance, counts = random_of(seed, "states"), Counter[str](dict.fromkeys(NEVER, 0))
    counts.update({"kills of the writer": 0, "compactions": 0, "evaluations": 0})
    spawn = multiprocessing.get_context("spawn")
    with folders() as (root, files), ExitStack() as stack:
        model = publish(root, files)
        url = stack.enter_context(local_server(["demo"], root=root, workers=1)).url
        end = time.monotonic() + seconds
        works: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (read, (root, seed)),
            (ask, (url, seed)),
            (evaluate, (root, files)),
        ]
        readers = []
        for work, given in works:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(*given, end, theirs), daemon=True)
            process.start()
            readers.append((process, ours))
        while time.monotonic() < end or not counts["compactions"]:
            writer = spawn.Process(target=write, args=(root,), daemon=True)
            began = position_of(model, SOURCE)
            writer.start()
            until(partial(_has_moved, model, began), what="the writer's first batch")
            time.sleep(chance.random())
            if chance.random() < 0.5 or not counts["compactions"]:
                with contextlib.suppress(LoaderError):  # the writer's merge came between
                    counts["compactions"] += compact(model) is not None
                    model.collect(KEPT_VERSIONS)
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            counts["kills of the writer"] += 1
        for process, ours in readers:
            counts.update(ours.recv())
            process.join()
        counts["batches applied"] = number = int(position_of(model, SOURCE) or 0)
        table = attach_state(model).tables["t"]
        last = choose().lookup(table, np.arange(ROWS), pooling=Pooling.NONE)
        counts["batches lost"] = int(np.unique(last[last[:, 0] != Rows().up_to(number), 0]).size)
    return dict(counts)


GOALS: dict[str, Goal] = {
    "rows read": at_least(50_000_000),
    "batches applied": at_least(1000),
    "kills of the writer": at_least(50),
    "compactions": at_least(20),
    "rows read by a module": at_least(1_000_000),
    "rows read over HTTP": at_least(1_000_000),
    "rows read by evaluations": at_least(200_000),
    **dict.fromkeys(NEVER, none()),
}


if __name__ == "__main__":
    standalone(run)
