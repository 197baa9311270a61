"""2 -> 3 -> 2 owners by the commands, while clients read and rows change."""

import contextlib
import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from following import following, killed
from hosts import ITEM_IDS, RAW, UNPOOLED, USER_ROWS, ZERO, checkpoint, load_door, load_shares, place, spec_of
from servers import Server
from support import run_tableside, until

from tableside.loader.errors import VersionError
from tableside.loader.model.tiers import TIER, owner_name
from tableside.loader.versions.versions import Model
from tableside.serving.client import Client

ROWS, DIMS = {"user": USER_ROWS, "item": ITEM_IDS, "small": 20}, {"user": 16, "item": 8, "small": 4}
IDS = {"user": np.arange(USER_ROWS), "item": RAW, "small": np.arange(20)}


def is_removed(model: Model) -> bool:
    """Removes it, unless what its follower started, such as a compaction, did not end yet."""
    try:
        model.remove_all()
    except VersionError:
        return False
    return True


class Changes:
    """A folder of changes: file n has every ninth row of all tables become n. The next one is written once a
    reader saw the one but two before it, so that followers keep up on a busy machine too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.written, self.readers = folder, 0, list[Reader]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def write(self) -> None:
        number, changed = self.written + 1, dict[str, np.ndarray]()
        for table, ids in IDS.items():
            changed[f"{table}.ids"] = ids[::9].astype(np.int64)
            changed[f"{table}.vectors"] = np.full((ids[::9].size, DIMS[table]), number, np.float32)
        np.savez(self.folder / "next", **changed)
        os.rename(self.folder / "next.npz", self.folder / f"{number}.npz")
        self.written = number

    def _run(self) -> None:
        while not self._is_over.wait(0.5):
            if max(reader.seen for reader in self.readers) >= self.written - 2:
                self.write()

    def __enter__(self) -> "Changes":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()


class Reader:
    """A client that looks all rows up, again and again: those that change say which file they are of, and
    all of them are of one; the others are those of the checkpoint, bit by bit. On a busy machine rows may be
    late, and it is told so."""

    def __init__(self, url: str, arrays: dict[str, np.ndarray]) -> None:
        self._url, self._arrays, self._is_over = url, arrays, threading.Event()
        self.seen, self.whole, self.error = 0, 0, ""
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with Client(self._url) as client:
                while not self._is_over.wait(0.01):
                    got = client.lookup("ads", {name: ids[:, None] for name, ids in IDS.items()})
                    if not client.late_rows():
                        self._check(got)
                        self.whole += 1
        except Exception as error:  # noqa: BLE001  # the test says it
            self.error = repr(error)

    def _check(self, got: dict[str, np.ndarray]) -> None:
        number = int(got["small"][0, 0])
        assert number >= self.seen, "rows went back"
        for name, vectors in got.items():
            expected = self._arrays[name].copy()
            expected[::9] = number
            if not np.array_equal(vectors, expected):
                wrong = np.flatnonzero((vectors != expected).any(1))
                raise AssertionError(
                    f"{name} rows {wrong} are {vectors[wrong, 0]}; expected {expected[wrong, 0]}"
                )
        self.seen = number

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    """Roots of three hosts of owners, and of a server."""
    found = [Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}" for _ in range(4)]
    for root in found:
        root.mkdir()
    yield found
    for root in found:
        shutil.rmtree(root)


def command(*arguments: object, root: Path) -> None:
    """Runs it; again, as it says, if a follower's compaction is under way."""
    while "is under way" in (done := run_tableside(*arguments, root=root)).stderr:
        time.sleep(0.1)
    assert done.returncode == 0, done.stderr


def tier(servers: list[Server], count: int) -> str:
    return TIER + ",".join(map(place, servers[:count]))


def has_turned(door: Server, model: Model, first: str, followers: "Sequence[subprocess.Popen[str]]") -> bool:
    """Whether a server has its rows of owners of whom this is the first one."""
    for follower in followers:
        assert follower.poll() is None, follower.communicate()[1]
    try:
        served = model.attach(door.get("/v1/models").json()["models"][0]["version"], "header")
    except VersionError:  # the next compaction removed it
        return False
    return served.header.remote[0].shares[0].model == first


@pytest.mark.drawn(0.25)
def test_owners_come_and_go_under_readers(
    folders: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """No request fails, none has rows of two states or of another id; changes go on with new followers."""
    arrays, said = checkpoint(tmp_path), {"tables": ZERO, "features": UNPOOLED}
    load_shares(spec_of(tmp_path, owners=["a:1", "b:1"], **said), folders[:2])
    owners = [serve(root, "--all", models=()) for root in folders[:3]]

    def is_served(host: int, count: int) -> None:
        asked = f"/v2/rows/{owner_name('ads', host, count)}"
        until(lambda: owners[host].get(asked).status_code == 200, what="an owner's model")

    for host in range(2):
        is_served(host, 2)
    load_door(spec_of(tmp_path, owners=list(map(place, owners[:2])), **said), folders[3])
    door = serve(folders[3], models=("ads",))
    with Client(door.url) as client:  # of int8, as it is read
        arrays["small"] = client.lookup("ads", {"small": IDS["small"][:, None]})["small"]
    changes = Changes(tmp_path / "changes")
    changes.write()
    with contextlib.ExitStack() as running:

        def follow(root: Path, model: str) -> "subprocess.Popen[str]":
            # On a busy machine followers lag: what the slowest one has must be kept by all
            options = ("--every-s", 0.5, "--keep-states", "1h", "--nice", 0, "--compact-at", 0.3)
            return running.enter_context(following(root, str(changes.folder), *options, model=model))

        of_door = follow(folders[3], "ads")
        followers = [follow(folders[host], owner_name("ads", host, 2)) for host in range(2)]
        with Client(door.url) as client:
            until(lambda: client.lookup("ads", {"small": [[0]]})["small"][0, 0] == 1, what="the first change")
        readers = [running.enter_context(Reader(door.url, arrays)) for _ in range(2)]
        changes.readers = readers
        running.enter_context(changes)
        for before, after in ((2, 3), (3, 2)):
            present = tier(owners, before)
            for host in range(after):
                share = ("reshard", "ads", "--from", present, "--owners", after, "--share", host)
                command(*share, root=folders[host])
                is_served(host, after)
            new = [follow(folders[host], owner_name("ads", host, after)) for host in range(after)]
            command("cluster", "turn", "ads", "--to", tier(owners, after), root=folders[3])

            all_followers, first = (*followers, *new, of_door), owner_name("ads", 0, after)
            until(
                lambda f=all_followers, m=first: has_turned(door, Model(folders[3], "ads"), m, f),
                what="the server to turn",
            )
            for host, follower in enumerate(followers):
                killed(follower)
                model = Model(folders[host], owner_name("ads", host, before))
                until(lambda m=model: is_removed(m), what="what the follower started to end")
                asked = owners[host], f"/v2/rows/{model.name}"  # its name is given again
                until(lambda a=asked: a[0].get(a[1]).status_code == 404, what="the server to drop it")
            followers, number = new, changes.written
            until(lambda n=number: all(r.error or r.seen >= n for r in readers), what="later changes")
            assert not any(reader.error for reader in readers), [reader.error for reader in readers]
    assert not any(reader.error for reader in readers), [reader.error for reader in readers]
    assert all(reader.whole > 10 for reader in readers) and changes.written > 10
