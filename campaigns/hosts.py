"""A model over several hosts follows a Redis stream, while hosts and followers are killed and stand still,
and hosts are loaded anew.

Two owners of two hosts each, and a server of the whole, all on this machine. Promised: a request is answered
from one place of the stream on all hosts, and answers never go back. As long as each owner has a host, no
request fails and no row is late. In the end all changes are there.

The oracle: an entry writes its number to all rows of one table, one table after another. So all rows of a
table have one number, and the numbers of the tables differ by one at most, in their order. A version that is
loaded has a number two above the last, in all rows, so that no mix of versions looks like one.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.common import Goal, at_least, folders, none, random_of, standalone, until
from campaigns.follows import KEY, Redis
from tableside.loader.deltas.apply import position_of
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import LoaderError
from tableside.loader.load.load import load
from tableside.loader.load.share import share_of
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.client import Client, ClientError
from tableside.serving.cluster.calls import close_hosts
from tableside.serving.cluster.describe import remote_tables
from tableside.serving.errors import ServingError

SHARES, HOSTS = 2, 2  # owners, and hosts of each
ROWS, DIM, EVERY_S = 3000, 8, 0.1
TIMEOUT_S = 10  # after which rows are late: no busy machine takes so long
RAW = np.sort(np.random.default_rng(0).choice(10**12, 2000, replace=False))
IDS = {
    "user": np.arange(ROWS),
    "item": RAW,
    "country": np.arange(50),
}  # in the order in which they are written
NEVER = (
    *("rows of several entries", "tables of several places", "answers that went back"),
    *("requests that failed", "rows that came late", "changes that were not there in the end"),
)


class Host:
    """A server, its root and its follower. Their processes are those of a session each."""

    def __init__(self, root: Path, model: str, url: str) -> None:
        self.root, self.model, self._url = root, Model(root, model), url
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.server: subprocess.Popen[bytes] | None = None
        self.follower: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        options = "--port", self.port, "--drain-s", 0, "--disk-timeout-s", TIMEOUT_S
        self.server = self._run("serve", self.model.name, *options)

    def follow(self, start: str = "start") -> None:
        options = "--every-s", EVERY_S, "--from", start
        self.follower = self._run("follow", self.model.name, self._url, *options)

    def is_ready(self) -> bool:
        with Client(f"http://127.0.0.1:{self.port}", retries=0) as client:
            return client.is_ready()

    def _run(self, *arguments: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tableside", *map(str, arguments), "--root", str(self.root)]
        log = (self.root / f"{arguments[0]}.log").open("ab")
        with log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=self.root)

    def end(self) -> None:
        for process in (self.follower, self.server):
            signalled(process, signal.SIGKILL)


def signalled(process: "subprocess.Popen[bytes] | None", how: signal.Signals) -> None:
    """Sends a signal to a process and all below it; waits where it kills."""
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    if how == signal.SIGKILL:
        process.wait()


class Campaign:
    """The hosts, and what was counted."""

    def __init__(self, root: Path, files: Path, redis: Redis, seed: int) -> None:
        self._redis, self._chance = redis, random_of(seed, "hosts")
        names = [f"ads-owner-{number}-of-{SHARES}" for number in range(SHARES)]
        self.owners = [[self._host(root, f"{name}-{n}", name) for n in range(HOSTS)] for name in names]
        self.door = self._host(root, "door", "ads")
        self.hosts = [*itertools.chain.from_iterable(self.owners), self.door]
        self._files, self._written, self._last, self._start = files, 0, "", "start"
        self._seen, self._contents = dict.fromkeys(IDS, 0), set[int]()
        tier = "rows://" + ",".join("|".join(f"127.0.0.1:{h.port}" for h in hosts) for hosts in self.owners)
        raw = {"ids": "raw", "id_key": "item.ids", "buckets": 16, "tier": tier, "missing": "zero"}
        of_tables: dict[str, dict[str, Any]] = {
            "user": {"tier": tier, "missing": "zero"},
            "item": raw,
            "country": {},
        }
        tables = {n: {"key": n, "row_format": "fp32", **more} for n, more in of_tables.items()}
        features = {name: {"pooling": "none"} for name in IDS}
        self._spec = parse_model(
            {"name": "ads", "checkpoint": "rows.npz", "tables": tables, "features": features}, files
        )
        torments = "kills of servers", "kills of followers", "stops", "compactions", "version flips"
        self.counts = dict.fromkeys(("rows read", *torments), 0)
        self.counts |= dict.fromkeys(NEVER, 0)

    def _host(self, root: Path, folder: str, model: str) -> Host:
        (root / folder).mkdir()
        return Host(root / folder, model, self._redis.url)

    def begin(self) -> None:
        self._write_checkpoint()
        self._load_owners()
        for host in self.hosts[:-1]:
            host.serve()
        for host in self.hosts[:-1]:
            until(host.is_ready, what="an owner")
        until(self._load_door, what="what owners have")
        self.door.serve()
        until(self.door.is_ready, what="the server of the whole")
        for host in self.hosts:
            host.follow()
        self._client = Client(f"http://127.0.0.1:{self.door.port}", timeout_s=60.0)

    def _write_checkpoint(self) -> None:
        """Has the next versions' rows be of the last number."""
        values = {name: np.full((ids.size, DIM), self._written, np.float32) for name, ids in IDS.items()}
        np.savez(self._files / "rows.npz", **values, **{"item.ids": RAW})  # type: ignore[arg-type]

    def _load_owners(self) -> None:
        for number, hosts in enumerate(self.owners):
            for host in hosts:
                load(share_of(self._spec, number), host.root)
                host.model.collect(keep=1)

    def _load_door(self) -> bool:
        """Loads the server of the whole; False: not all owners' servers have their next version yet."""
        try:
            remote = remote_tables(self._spec, choose(), None)
        except ServingError:
            return False
        finally:
            close_hosts()
        contents = {share.content for table in remote for share in table.shares}
        if contents & self._contents:
            return False
        load(self._spec, self.door.root, remote=remote)
        self.door.model.collect(keep=1)
        self._contents = contents
        return True

    def _load_all(self) -> None:
        self._load_owners()
        until(self._load_door, what="owners to have their next version")

    def flip(self) -> None:
        """Loads all hosts anew, the owners first, while rows are read and written."""
        for host in self.hosts:
            signalled(host.follower, signal.SIGKILL)
        self._start = self._last or "start"
        self._written += 2
        self._write_checkpoint()
        with ThreadPoolExecutor(1) as beside:
            loading = beside.submit(self._load_all)
            while not loading.done():
                self._go_on(0.05)
        loading.result()
        for host in self.hosts:
            host.follow(self._start)
        self.counts["version flips"] += 1

    def write(self) -> None:
        """Has all rows get the next number."""
        self._written += 1
        for table, ids in IDS.items():
            vectors = np.full((ids.size, DIM), self._written, "<f4")
            fields = {"table": table, "ids": ids.tobytes(), "vectors": vectors.tobytes()}
            self._last = self._redis.client.xadd(KEY, fields).decode()

    def read(self) -> None:
        """Asks for some rows of all tables."""
        asked = {name: self._some(ids) for name, ids in IDS.items()}
        try:
            got = self._client.lookup("ads", {name: ids[:, None] for name, ids in asked.items()})
        except ClientError as error:
            print(f"a request failed: {error}", file=sys.stderr)
            self.counts["requests that failed"] += 1
            return
        self.counts["rows read"] += sum(ids.size for ids in asked.values())
        if late := sum(self._client.late_rows().values()):
            self.counts["rows that came late"] += late
            return
        self.counts["rows of several entries"] += sum(
            bool((rows != rows[0, 0]).any()) for rows in got.values()
        )
        found = {name: int(rows[0, 0]) for name, rows in got.items()}
        numbers = list(found.values())
        is_one = numbers == sorted(numbers, reverse=True) and numbers[0] - numbers[-1] <= 1
        self.counts["tables of several places"] += not is_one
        self.counts["answers that went back"] += any(found[name] < self._seen[name] for name in found)
        self._seen = found

    def _some(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        first = self._chance.randrange(ids.size // 2)
        return ids[first : first + self._chance.randrange(1, ids.size - first)]

    def torment(self) -> None:
        """Does something to one host, and goes on reading and writing until it is well again."""
        host = self._chance.choice(self.hosts[:-1])
        what = self._chance.choice(("kill", "stop", "follower", "follower", "compact", "flip"))
        if what == "kill":
            signalled(host.server, signal.SIGKILL)
            self.counts["kills of servers"] += 1
            self._go_on(0.3)
            host.serve()
            until(lambda: self._go_on(0.05) and host.is_ready(), what="a host that was killed")
        elif what == "stop":
            signalled(host.server, signal.SIGSTOP)
            self.counts["stops"] += 1
            self._go_on(self._chance.uniform(0.1, 3.0))
            signalled(host.server, signal.SIGCONT)
        elif what == "follower":
            host = self._chance.choice(self.hosts)
            signalled(host.follower, signal.SIGKILL)
            self.counts["kills of followers"] += 1
            self._go_on(self._chance.uniform(0.0, 1.0))
            host.follow(self._start)
        elif what == "flip":
            self.flip()
        else:
            with contextlib.suppress(LoaderError):  # another state became live meanwhile
                self.counts["compactions"] += compact(self._chance.choice(self.hosts).model) is not None
        self._go_on(self._chance.uniform(0.0, 2.0))
        until(lambda: self._go_on(0.05) and all(map(self._is_well, self.hosts)), what="all hosts to be well")

    def _is_well(self, host: Host) -> bool:
        """Whether a host has all changes."""
        return self._last == (position_of(host.model, f"redis:{KEY}") or "") and host.is_ready()

    def _go_on(self, seconds: float) -> bool:
        """Reads, and writes now and then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._chance.random() < 0.05:
                self.write()
            self.read()
        return True

    def finish(self) -> None:
        """Waits until the last changes are seen."""
        self.write()
        with contextlib.suppress(TimeoutError):
            until(self._has_read_all, 60, "all changes")
        self.counts["changes that were not there in the end"] = self._written - min(self._seen.values())
        self._client.close()

    def _has_read_all(self) -> bool:
        self.read()
        return set(self._seen.values()) == {self._written}


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign."""
    with folders() as (root, files):
        redis = Redis(files)
        campaign = Campaign(root, files, redis, seed)
        try:
            campaign.begin()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                campaign.torment()
            campaign.finish()
        finally:
            for host in campaign.hosts:
                host.end()
            redis.end()
    return dict(campaign.counts)


GOALS: dict[str, Goal] = {
    "rows read": at_least(10_000_000),
    "kills of servers": at_least(50),
    "kills of followers": at_least(100),
    "stops": at_least(50),
    "compactions": at_least(50),
    "version flips": at_least(30),
    **dict.fromkeys(NEVER, none()),
}


if __name__ == "__main__":
    standalone(run)
