"""Readers attach states and look rows up, while a writer applies changes at full speed, is killed, and deltas are compacted.

Promised: a reader sees whole states alone. No row is torn, none of a lookup is from another state, none is older than one that
the same reader saw before, and nothing that was applied is lost.

The oracle: every value of a row is the number of the batch that wrote it. What each batch changes follows from its number, so a
reader knows each row of the state that it reads. The number of a batch is its position in the stream, which the state says.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from campaigns.common import Goal, at_least, folders, none, random_of, standalone, until
from tableside.loader.apply import ApplySettings, apply, position_of
from tableside.loader.changes import Batch, TableChanges
from tableside.loader.compact import compact
from tableside.loader.errors import LoaderError
from tableside.loader.load import load
from tableside.loader.model import parse_model
from tableside.loader.states import attach_state
from tableside.loader.versions import Model
from tableside.quant import Pooling, choose

ROWS, DIM, A_BATCH, READERS = 20_000, 16, 700, 2
SOURCE = "numbers"
NEVER = ("torn rows", "rows of another state", "readers that went back", "batches lost")


def changed_by(number: int) -> NDArray[np.int64]:
    """The rows that a batch overwrites; of some numbers many, so that deltas are merged."""
    rng = np.random.default_rng(number)
    return np.unique(rng.integers(0, ROWS, A_BATCH * (8 if number % 16 == 0 else 1)))


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
            apply(model, Batch([changes], SOURCE, str(number), done), ApplySettings(keep=4))


def read(root: Path, seed: int, end: float, pipe: Connection) -> None:
    """Reads states as they come, every other one through a module, and sends what was seen."""
    import torch  # here, as the writer starts sooner without it

    from tableside.torch import Embeddings

    model, rng, rows = Model(root, "demo"), np.random.default_rng(seed), Rows()
    module = Embeddings("demo", ["t"], root=str(root))
    counts: Counter[str] = Counter()
    segment, latest = attach_state(model, None, "full"), 0
    while time.monotonic() < end:
        segment = attach_state(model, None, "full", segment)
        change = segment.change
        number = 0 if change is None else int(change.positions.get(SOURCE, 0))
        counts["readers that went back"] += number < latest
        latest = max(latest, number)
        ids = rng.integers(0, ROWS, 50_000)
        found = choose().lookup(segment.tables["t"], ids, pooling=Pooling.NONE)
        counts["torn rows"] += int((found != found[:, :1]).any(1).sum())
        counts["rows of another state"] += int((found[:, 0] != rows.up_to(number)[ids]).sum())
        counts["rows read"] += ids.size
        counts["states read"] += 1
        if counts["states read"] % 8 == 0:
            module.refresh()
            vectors = module({"t": torch.from_numpy(ids[:5000])})["t"].numpy()
            counts["torn rows"] += int((vectors != vectors[:, :1]).any(1).sum())
            counts["rows read"] += 5000
    pipe.send(counts)


def _has_moved(model: Model, began: str | None) -> bool:
    return position_of(model, SOURCE) != began


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign."""
    chance, counts = random_of(seed, "states"), Counter[str](dict.fromkeys(NEVER, 0))
    counts.update({"kills of the writer": 0, "compactions": 0})
    spawn = multiprocessing.get_context("spawn")
    with folders() as (root, files):
        np.savez(files / "zeros.npz", t=np.zeros((ROWS, DIM), np.float32))
        tables = {"t": {"key": "t", "row_format": "fp32"}}
        raw = {"name": "demo", "checkpoint": "zeros.npz", "tables": tables, "features": {"t": {"table": "t", "pooling": "none"}}}
        load(parse_model(raw, files), root)
        model = Model(root, "demo")
        end = time.monotonic() + seconds
        readers = []
        for n in range(READERS):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=read, args=(root, seed + n, end, theirs), daemon=True)
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
                    model.collect(0)
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
    **dict.fromkeys(NEVER, none()),
}


if __name__ == "__main__":
    standalone(run)
