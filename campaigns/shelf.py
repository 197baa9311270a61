"""A model's folder with loaders that can be killed, and what must be true of it after each of them.

A loader is a process that was forked from this one, which has imported everything: it runs `tableside load`
through tableside.serving.cli.cli.main within some 30 ms, so that a thousand kills are affordable.
`start_command` runs the real command.

The oracle knows which value each load published, because the rows say so (common.told). After each load,
whatever became of it: the live version is whole and is either the one from before or the one that was loaded;
every number means the rows that it has always meant; and once `gc` has run, the folder holds the published
versions and small records, nothing else.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

from campaigns.common import DIM, ROWS, TABLES, told, version_told, write_checkpoint
from tableside.loader.errors import LoaderError
from tableside.loader.segment.layout import file_name
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.serving.cli import cli

VALUES, SMALL_BYTES, CRASHED, DEADLINE_S = 16, 4096, 99, 30.0
IDS = np.arange(ROWS)


class Loader:
    """A process that loads one value, forked and waiting for `go`."""

    def __init__(self, shelf: "Shelf", value: int, short_reads: int = 0) -> None:
        """short_reads: bytes that a read gives at most; 0: as many as were asked for."""
        self.value, self.errors = value, shelf.files / f"errors-{value}"
        self._go, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._go.close()
            self._load(shelf, value, short_reads, there)
        there.close()
        self._go.recv(1)

    def _load(self, shelf: "Shelf", value: int, short_reads: int, there: socket.socket) -> None:
        """The child's part; it does not return."""
        code = CRASHED
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.stdout, sys.stderr = (
                os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2)
            )  # whoever has replaced them
            if short_reads:
                shorten_reads(short_reads)
            there.send(b"r")
            there.recv(1)
            code = cli.main(["load", str(shelf.toml(value)), "--root", str(shelf.root), "--keep", "1"])
        finally:
            try:
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(
                    code
                )  # whatever fails: this process must not go on as the campaign, and clear its folders

    def go(self) -> None:
        self._go.send(b"g")
        self._go.close()

    def end(self) -> int:
        """Waits for it; its exit code, negative where a signal ended it. One that hangs: -SIGALRM."""
        deadline = time.monotonic() + DEADLINE_S
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return -signal.SIGALRM
            time.sleep(0.001)
        return os.waitstatus_to_exitcode(ended[1])

    def said(self) -> list[str]:
        """The lines that it wrote to stderr."""
        return self.errors.read_text().splitlines() if self.errors.exists() else []

    def failed_plainly(self) -> bool:
        """Whether stderr has one line, as every error of the command has."""
        return len(lines := self.said()) == 1 and lines[0].startswith("tableside: ")


def shorten_reads(most: int) -> None:
    """From now on this process's reads at a place give at most `most` bytes, as a kernel may at any time."""
    whole = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        return whole(fd, [memoryview(buffers[0])[:most]], offset, flags)

    os.preadv = preadv  # type: ignore[assignment]


class Shelf:
    """One model's folder. `found` counts what was wrong, by what it was."""

    def __init__(self, root: Path, files: Path) -> None:
        self.root, self.files, self.model = root, files, Model(root, "demo")
        self.found: Counter[str] = Counter()
        self.details: list[str] = []
        self.told: dict[int, int] = {}  # version -> value
        self.live_value = 0
        self._next = 0
        for value in range(1, VALUES + 1):
            self._write(value)

    def _write(self, value: int) -> None:
        raw = write_checkpoint(self.files, value)
        lines = [f'name = "{raw["name"]}"', f'checkpoint = "{raw["checkpoint"]}"']
        for table, entry in raw["tables"].items():
            lines += [f"[tables.{table}]", *(f'{k} = "{v}"' for k, v in entry.items())]
        for feature, entry in raw["features"].items():
            lines += [f"[features.{feature}]", *(f'{k} = "{v}"' for k, v in entry.items())]
        self.toml(value).write_text("\n".join(lines) + "\n")

    def toml(self, value: int) -> Path:
        return self.files / f"{value}.toml"

    def next_value(self) -> int:
        """Another value than the live one and than the ones just before."""
        self._next = self._next % VALUES + 1
        return self._next if self._next != self.live_value else self.next_value()

    def loader(self, short_reads: int = 0) -> Loader:
        return Loader(self, self.next_value(), short_reads)

    def start_command(self) -> tuple["subprocess.Popen[str]", int]:
        """The real `tableside load` in a process of its own, and the value that it loads."""
        value = self.next_value()
        command = [
            sys.executable,
            "-m",
            "tableside",
            "load",
            str(self.toml(value)),
            "--root",
            str(self.root),
            "--keep",
            "1",
        ]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True), value

    # ---- the oracle ----

    def wrong(self, what: str, detail: str) -> None:
        self.found[what] += 1
        self.details.append(f"{what}: {detail}")

    def check(self, loaded: dict[int, int], where: str) -> None:
        """After loads ended: value -> exit code. Then `gc`, and the folder's bytes. where: to find the
        case again."""
        before = self.live_value
        try:
            for version in self.model.versions():
                self._check_version(version, where)
            live = self.model.record().current
        except LoaderError as error:
            self.wrong("unreadable", f"{where}: {error}")
            return
        self.live_value = self.told.get(live, 0)
        done = [value for value, code in loaded.items() if code == 0]
        if self.live_value not in {*loaded, before}:
            self.wrong("wrong live version", f"{where}: {self.live_value}, from {before}, loaded {loaded}")
        if done and before == self.live_value:
            self.wrong("wrong live version", f"{where}: still {before}, though {done} were loaded")
        self.collect(where)

    def _check_version(self, version: int, where: str) -> None:
        """Its rows are one value's, the one that this number has always had."""
        tables = Segment(self.model.path(version)).tables
        rows = {name: table.packed.view(np.float32)[:, :DIM] for name, table in tables.items()}
        value = version_told(rows["user"], IDS)
        if value is None or not np.array_equal(rows["item"], told(TABLES["item"], value, IDS)):
            self.wrong("wrong rows", f"{where}: version {version}")
            return
        if version not in self.told and version <= max(self.told, default=0):
            self.wrong(
                "a number given twice", f"{where}: {version} is new, and {max(self.told)} was there before"
            )
        if self.told.setdefault(version, value) != value:
            self.wrong(
                "a number given twice", f"{where}: version {version} was {self.told[version]}, now {value}"
            )

    def collect(self, where: str) -> None:
        """`gc`, and then the bytes that are no published version's and no small record's."""
        self.model.collect(keep=1)
        if bytes_ := self.orphan_bytes():
            self.wrong("orphan bytes", f"{where}: {bytes_}")
            self.found["orphan bytes"] += bytes_ - 1

    def orphan_bytes(self) -> int:
        paths = [self.model.path(v) for v in self.model.versions()]
        published = {
            name for p in paths for name in (p.name, *(file_name(p, n + 1) for n in range(len(TABLES))))
        }
        sizes = [
            p.stat().st_blocks * 512 for p in self.root.rglob("*") if p.is_file() and p.name not in published
        ]
        return sum(size for size in sizes if size > SMALL_BYTES)
