"""Followers of a Redis stream are killed at random instants, and Redis, while entries come and deltas are
compacted.

Promised: a follower that is started again goes on exactly where the last whole batch ended. Each entry is
applied once, whole and in order; a state never has a part of a batch, and never goes back.

The oracle: each row says which entry wrote it. After each kill the rows of the state are compared with those
that all entries up to the state's position make, and no entry behind it: a row that was lost, torn, applied
out of order or too early differs. Some entries are bad. Followers leave them out and write them to a file,
which has each of them in the end, and no other.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.common import (
    DIM,
    ROWS,
    TABLES,
    Goal,
    at_least,
    folders,
    none,
    publish,
    random_of,
    standalone,
    told,
    until,
)
from tableside.loader.deltas import apply as applying
from tableside.loader.deltas.apply import ApplySettings, position_of
from tableside.loader.deltas.compact import compact
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.follow.loop import BadChangeFile, follow, open_source

KEY, SOURCE = "rows", "redis:rows"
BAD_SHARE = 0.01  # of the entries
LONGEST_S = 0.4  # that a follower lives
MERGED_BYTES = 1 << 10  # of a newest delta that followers merge beside, as if that were much
BAD: list[dict[str, bytes | str]] = [
    {"table": "nobody"},
    {"ids": np.array([ROWS]).tobytes(), "vectors": np.zeros(DIM, np.float32).tobytes()},
    {"ids": np.array([1]).tobytes(), "vectors": np.full(DIM, np.nan, np.float32).tobytes()},
    {"ids": np.array([1, 2]).tobytes(), "vectors": np.zeros(DIM, np.float32).tobytes()},
    {"ids": b"1", "vectors": b"2"},
    {"dtype": "fp64"},
]
NEVER = (
    *("states with wrong rows", "positions that went back", "entries that were not applied in the end"),
    *(
        "followers that ended by themselves",
        "bad entries that were not written aside",
        "good entries that were",
    ),
)


class Redis:
    """A server that keeps what it was sent over its own kills."""

    def __init__(self, folder: Path) -> None:
        command = shutil.which("redis-server")
        if command is None:
            raise RuntimeError("redis-server is not installed (Debian: apt-get install redis-server)")
        import redis

        self._socket = folder / "redis.sock"
        kept = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self._command = [
            command,
            "--port",
            "0",
            "--unixsocket",
            str(self._socket),
            "--dir",
            str(folder),
            *kept,
        ]
        self.client: Any = redis.Redis.from_url(f"unix://{self._socket}")
        self._away = (redis.ConnectionError, redis.TimeoutError)
        self.url = f"unix://{self._socket}?stream={KEY}"
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until(self._is_up, what="redis-server's answer")
        return process

    def _is_up(self) -> bool:
        try:
            return bool(self.client.ping())
        except self._away:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def end(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


class Stream:
    """What was sent, and what its first entries make of the table."""

    def __init__(self, redis: Redis, chance: random.Random) -> None:
        self._redis, self._rng, self._chance = redis, np.random.default_rng(chance.randrange(1 << 32)), chance
        self.bad: set[str] = set()
        self._sent: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._made, self._table = 0, told(TABLES["user"], 1, np.arange(ROWS))

    @property
    def entries(self) -> int:
        return len(self._sent)

    def send(self, entries: int) -> None:
        """Entries whose ids are their numbers, from 1 on."""
        for _ in range(entries):
            number = len(self._sent) + 1
            ids = self._rng.choice(ROWS, int(self._rng.integers(1, 60)), replace=False)
            vectors = written(number, ids)
            fields: dict[Any, Any] = {"table": "user", "ids": ids.tobytes(), "vectors": vectors.tobytes()}
            if self._chance.random() < BAD_SHARE:
                fields |= self._chance.choice(BAD)
                self.bad.add(f"{number}-0")
                ids, vectors = ids[:0], vectors[:0]
            self._redis.client.xadd(KEY, fields, id=f"{number}-0")
            self._sent.append((ids, vectors))

    def table_at(self, entry: int) -> np.ndarray[Any, Any]:
        """The table after so many entries; never fewer than it was asked for before."""
        for ids, vectors in self._sent[self._made : entry]:
            self._table[ids] = vectors
        self._made = max(self._made, entry)
        return self._table


def written(entry: int, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of an entry: its number, the id, a mix, and these negated, which fp32 holds exactly."""
    left = np.stack(
        [np.full(len(ids), entry), ids, (ids * 7919 + entry * 104729) % 1009, np.full(len(ids), 9)], 1
    )
    assert left.shape[1] * 2 == DIM
    return np.concatenate([left, -left], 1).astype(np.float32)


def rows_now(model: Model, name: str) -> np.ndarray[Any, Any]:
    """The rows of a table of dense ids in the live state, fp32 [rows, dim]."""
    table = attach_state(model).tables[name]
    ids = np.arange(
        table.rows if table.row_map is None else table.row_map.count
    )  # without the row of missing ids
    return choose("native").lookup(table, ids, None, pooling=Pooling.NONE)


def fork_follower(root: Path, url: str, every_s: float, rows: int, aside: Path) -> int:
    """A follower's process, forked from this one, which has imported everything; its id. aside: gets bad
    entries."""
    if pid := os.fork():
        return pid
    code = 1
    applying.SMALL_BYTES = MERGED_BYTES
    try:
        source = open_source(url, None, None, "start", lambda: False)
        with BadChangeFile(source, aside) as skip:
            model, settings = Model(root, "demo"), ApplySettings(threads=1)
            follow(model, source, rows, every_s, lambda: False, lambda _: None, settings=settings, skip=skip)
    except BaseException:  # noqa: BLE001  (told here, as the process ends below, whatever it was)
        traceback.print_exc()
    finally:
        os._exit(code)


class Campaign:
    """A model, its stream, and what was counted."""

    def __init__(self, root: Path, redis: Redis, aside: Path, seed: int) -> None:
        self._aside = aside
        self._root, self._redis, self._chance = root, redis, random_of(seed, "follows")
        self._model, self._stream = Model(root, "demo"), Stream(redis, self._chance)
        self._position = 0
        counted = (
            "kills",
            "of them while a batch was under way",
            "kills of Redis",
            "compactions meanwhile",
            "states compared",
        )
        self.counts = dict.fromkeys((*counted, *NEVER), 0)

    def torment(self, kills_redis: bool, compacts: bool) -> None:
        """One follower's life: entries come before and while it lives, and it is killed at a random
        instant."""
        self._stream.send(self._chance.randrange(20))
        before = self._position
        pid = fork_follower(
            self._root,
            self._redis.url,
            self._chance.uniform(0.005, 0.1),
            self._chance.randrange(1, 2000),
            self._aside,
        )
        end = time.monotonic() + self._chance.uniform(0, LONGEST_S)
        while time.monotonic() < end:
            self._stream.send(self._chance.randrange(5))
            time.sleep(self._chance.uniform(0, 0.01))
            if kills_redis:
                self._redis.kill()
                self.counts["kills of Redis"] += 1
                kills_redis = False
            if compacts and self._kept() > before:  # while the follower applies
                self.counts["compactions meanwhile"] += compact(self._model) is not None
                compacts = False
        self._end(pid)
        self._compare()
        self.counts["of them while a batch was under way"] += before < self._position < self._stream.entries

    def finish(self) -> None:
        """A last follower applies what is left."""
        pid = fork_follower(self._root, self._redis.url, 0.05, 1000, self._aside)
        with contextlib.suppress(TimeoutError):
            until(lambda: self._kept() == self._stream.entries, 30, "the last entry to be applied")
        self._end(pid)
        self._compare()
        self.counts["entries that were not applied in the end"] = self._stream.entries - self._position
        left_out = {json.loads(line)["position"] for line in self._aside.read_text().splitlines()}
        self.counts["bad entries"] = len(self._stream.bad)
        self.counts["bad entries that were not written aside"] = len(self._stream.bad - left_out)
        self.counts["good entries that were"] = len(left_out - self._stream.bad)

    def _end(self, pid: int) -> None:
        """Kills a follower; one that had ended by itself is counted."""
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended:
            self.counts["followers that ended by themselves"] += 1
            return
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.counts["kills"] += 1

    def _kept(self) -> int:
        """The number of the entry up to which the state was applied."""
        return int((position_of(self._model, SOURCE) or "0").partition("-")[0])

    def _compare(self) -> None:
        """The state beside what its entries make."""
        kept = self._kept()
        self.counts["positions that went back"] += kept < self._position
        self._position = kept
        self.counts["states compared"] += 1
        if not np.array_equal(rows_now(self._model, "user"), self._stream.table_at(kept)):
            self.counts["states with wrong rows"] += 1


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign."""
    with folders() as (root, files):
        publish(root, files, value=1)
        redis = Redis(files)
        try:
            campaign = Campaign(root, redis, files / "bad.jsonl", seed)
            end = time.monotonic() + seconds
            for round_ in itertools.count():
                campaign.torment(kills_redis=round_ % 10 == 5, compacts=round_ % 10 in (2, 8))
                if time.monotonic() > end and round_ > 5:
                    break
            campaign.finish()
        finally:
            redis.end()
    return dict(campaign.counts)


GOALS: dict[str, Goal] = {
    "kills": at_least(500),
    "kills of Redis": at_least(50),
    "bad entries": at_least(50),
    "compactions meanwhile": at_least(50),
    "states compared": at_least(500),
    **dict.fromkeys(NEVER, none()),
}


if __name__ == "__main__":
    standalone(run)
