"""Evaluations whose workers, forkserver and main process are killed at random instants, with bits flipped in
finished parts.

The oracle is the report of a run that nobody disturbed: the same figures bit for bit, every row once, each
flipped part named by a line of the log, and no partial file and no process left. `python -m campaigns.evals
--kills 50 --seed 1`
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from campaigns.common import Goal, Result, at_least, folders, none, random_of, show, until
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model

ROWS, SHARD_ROWS, DIM = 12_000, 60, 8
SHARDS = ROWS // SHARD_ROWS
VICTIMS = ("worker", "forkserver", "main")
_MARK = "CAMPAIGN_OF_TABLESIDE"  # in the environment of every process of a run
_GO_ON = 0.9  # the chance that a run is disturbed once more
_PAUSE_S = 0.5  # between two disturbances, on average; an undisturbed run takes some 3 s
GOALS: Mapping[str, Goal] = {
    "kills": at_least(50),
    "flips": at_least(50),
    **dict.fromkeys(
        (
            "wrong reports",
            "rows not once",
            "flips not named",
            "partial files left",
            "processes left",
            "tracebacks",
        ),
        none(),
    ),
}


def run(seconds: float, seed: int, kills: int | None = None) -> dict[str, float]:
    """Disturbs and resumes evaluations until `kills` kills and a flip, or for `seconds`; counts by name."""
    found: Counter[str] = Counter(
        dict.fromkeys((*GOALS, *(f"kills of {v}" for v in VICTIMS), "runs", "reports", "refusals"), 0)
    )
    chance, end = random_of(seed, "evals"), time.monotonic() + seconds
    with folders() as (root, files):
        data = _publish(root, files, chance)
        calm = _Evaluation(root, data, files / "calm")
        calm.start()
        calm.process.wait(300)
        wanted = calm.figures()
        evaluation = _Evaluation(root, data, files / "out")
        while time.monotonic() < end and (kills is None or found["kills"] < kills or not found["flips"]):
            evaluation.flip(chance, found)
            evaluation.start()
            try:
                _disturb(evaluation, chance, found)
            finally:
                evaluation.process.kill()  # where it did not end
                evaluation.process.wait()
            _judge(evaluation, wanted, found)
    return {name: float(count) for name, count in found.items()}


def _publish(root: Path, files: Path, chance: random.Random) -> Path:
    """A model of two towers whose products are probabilities, and a data set with a row group a shard;
    where the data lies."""
    values = np.random.default_rng(chance.randrange(2**32))
    np.savez(
        files / "towers.npz",
        user=values.random((500, DIM), np.float32),
        item=values.random((300, DIM), np.float32) / DIM,
    )
    raw = {
        "name": "towers",
        "checkpoint": "towers.npz",
        "tables": {name: {"key": name, "row_format": "fp32"} for name in ("user", "item")},
        "features": {"user": {}, "item": {}},
        "scorer": {"kind": "dot", "features": ["user", "item"]},
        "eval": {"label": "label"},
    }
    load(parse_model(raw, files), root)
    columns = {
        "user": values.integers(0, 500, ROWS),
        "item": values.integers(0, 300, ROWS),
        "label": values.integers(0, 2, ROWS),
    }
    pq.write_table(pa.table(columns), files / "data.parquet", row_group_size=SHARD_ROWS)
    return files / "data.parquet"


@dataclass
class _Evaluation:
    """`tableside eval` with two workers, again and again with the same OUT. flipped: parts whose flip no
    log named yet."""

    root: Path
    data: Path
    out: Path
    flipped: set[str] = field(default_factory=set)
    mark: str = field(default_factory=lambda: uuid4().hex)

    def start(self) -> None:
        options = [
            "--out",
            self.out,
            "--root",
            self.root,
            "--workers",
            2,
            "--shard-rows",
            SHARD_ROWS,
            "--batch",
            1,
        ]
        command = [sys.executable, "-m", "tableside", "eval", "towers", self.data, *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, _MARK: self.mark},
            )

    @property
    def log(self) -> Path:
        return self.out.with_suffix(".log")

    def parts(self) -> list[Path]:
        return sorted((self.out / "parts").glob("*.parquet"))

    def processes(self) -> dict[str, list[int]]:
        """Process ids of a run that are there, by what they are."""
        found: dict[str, list[int]] = {name: [] for name in (*VICTIMS, "other")}
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state not in "ZX":
                        parents[int(folder.name)] = (int(parent), (folder / "cmdline").read_bytes())
            except OSError:
                continue  # it ended meanwhile
        for pid, (parent_pid, command) in parents.items():
            kind = "main" if pid == self.process.pid else "other"
            if b"multiprocessing.forkserver" in command:
                is_forked = parent_pid in parents and b"multiprocessing.forkserver" in parents[parent_pid][1]
                kind = "worker" if is_forked else "forkserver"
            found[kind].append(pid)
        return found

    def flip(self, chance: random.Random, found: Counter[str]) -> None:
        """Flips a bit in one to three finished parts, or in what says what they should hold."""
        for part in chance.sample(parts := self.parts(), min(chance.randint(1, 3), len(parts))):
            path = part if chance.random() < 0.75 else part.with_name(f"{part.name}.xxh3")
            if part.name in self.flipped or not path.exists():
                continue
            content = bytearray(path.read_bytes())
            bit = chance.randrange(8 * len(content))
            with path.open("r+b") as file:
                file.seek(bit // 8)
                file.write(bytes([content[bit // 8] ^ 1 << bit % 8]))
            self.flipped.add(part.name)
            found["flips"] += 1

    def figures(self) -> Any:
        """What does not depend on when and how often the evaluation was stopped."""
        report = json.loads((self.out / "report.json").read_text())
        return {name: report[name] for name in ("candidates", "rows", "overall", "slices")}


def _disturb(evaluation: _Evaluation, chance: random.Random, found: Counter[str]) -> None:
    """Kills and flips at random instants until the run ends."""
    found["runs"] += 1
    process = evaluation.process
    first = chance.choice(
        (0, SHARDS // 10)
    )  # every other run comes far enough that there is something to flip
    while process.poll() is None and len(evaluation.parts()) < first:
        time.sleep(0.005)
    while process.poll() is None and chance.random() < _GO_ON:
        at = time.monotonic() + chance.expovariate(1 / _PAUSE_S)
        while process.poll() is None and time.monotonic() < at:
            time.sleep(0.005)
        if len(evaluation.parts()) < SHARDS / 2:  # so that the report is yet to come, and has to find it
            evaluation.flip(chance, found)
        victim = chance.choices(VICTIMS, (4, 1, 2))[0]
        if pids := evaluation.processes()[victim]:
            try:
                os.kill(chance.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                continue
            found["kills"] += 1
            found[f"kills of {victim}"] += 1
    process.wait(300)


def _judge(evaluation: _Evaluation, wanted: Any, found: Counter[str]) -> None:
    """Compares what a run left with what it should have; begins anew after a report."""
    try:
        until(lambda: not any(evaluation.processes().values()), 300, what="the end of its processes")
    except TimeoutError:
        found["processes left"] += 1
    text = evaluation.log.read_text()
    evaluation.flipped -= {name for name in evaluation.flipped if f"{name} is made again" in text}
    code = evaluation.process.returncode
    if code == -signal.SIGKILL:
        return
    found["tracebacks"] += "Traceback" in text
    if code != 0:
        found["refusals"] += 1
        return
    found["reports"] += 1
    found["wrong reports"] += evaluation.figures() != wanted
    rows = pa.concat_tables([pq.read_table(p) for p in evaluation.parts()]).column("row").to_numpy()
    found["rows not once"] += not np.array_equal(rows, np.arange(ROWS))
    found["flips not named"] += len(evaluation.flipped)
    found["partial files left"] += len(list(evaluation.out.rglob("*.partial*")))
    evaluation.flipped.clear()
    rmtree(evaluation.out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    started = time.monotonic()
    measured = run(given.seconds, given.seed, given.kills)
    show([Result("evals", time.monotonic() - started, given.seed, measured, GOALS)])


if __name__ == "__main__":
    main()
