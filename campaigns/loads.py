"""Loaders are killed, raced and given errors; readers are stopped while versions come and go.

Promised: whenever a load ends or is killed, the live version is whole and right, and is the one from before
or the new one; the next load or `gc` leaves no orphan bytes; no number is given twice. A load that meets an
error says so in one line, or publishes what is right. A reader that was stopped over several publications
reads right rows afterwards, of the version that it has mapped and of the live one.

Who is killed: processes forked from this one, which has imported everything (campaigns/shelf.py), at random
instants and, by strace, at each system call in turn; and the real command in a process of its own, at random
instants. A kill counts where it ended the process. Errors (EIO, ENOSPC, EINTR, ENOMEM, EMFILE) are strace's,
at the n-th call or from there on; short reads are made in the loader, where it calls preadv.
"""

import mmap
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns import strace
from campaigns.common import DIM, folders, random_of, standalone, version_told
from campaigns.shelf import CRASHED, IDS, Loader, Shelf

ERRORS = ("EIO", "ENOSPC", "EINTR", "ENOMEM", "EMFILE")
SHORT_READS = (1, 7, 1000, 4096)
SHARES = {"random": 0.35, "calls": 0.25, "errors": 0.15, "commands": 0.1, "races": 0.08, "readers": 0.07}


class Campaign:
    """One run: a shelf, a generator, and counts of what was done."""

    def __init__(self, shelf: Shelf, seed: int) -> None:
        self.shelf, self.seed = shelf, seed
        self.counts = dict.fromkeys(
            (
                "random",
                "calls",
                "commands",
                "race kills",
                "races",
                "errors",
                "failed",
                "not one line",
                "short",
                "stops",
            ),
            0,
        )
        self.durations = [self._load_whole() for _ in range(5)]
        self.calls, self.failing_calls = self._calls(strace.CALLS), self._calls(strace.FAILING)
        self.left: list[tuple[str, int]] = []
        self.killed_at: set[tuple[str, int]] = set()

    def during(self, part: str, seconds: float, step: Callable[[random.Random, str], None]) -> None:
        """Repeats a step for its share of the time, at least once."""
        end, number = time.monotonic() + seconds * SHARES[part], 0
        while number == 0 or time.monotonic() < end:
            step(random_of(self.seed, part, number), f"seed {self.seed} {part} {number}")
            number += 1

    # ---- preparations ----

    def _load_whole(self, short_reads: int = 0) -> float:
        loader = self.shelf.loader(short_reads)
        started = time.monotonic()
        loader.go()
        code = loader.end()
        took = time.monotonic() - started
        self.shelf.check({loader.value: code}, "a load that is left alone")
        if code:
            self.shelf.wrong("a whole load failed", str(loader.said()))
        return took

    def _calls(self, calls: str) -> list[tuple[str, int]]:
        """The calls that a load makes, each by its name and number."""
        loader, log = self.shelf.loader(), self.shelf.files / "strace"
        tracer = strace.attach(loader.pid, calls, log)
        loader.go()
        code = loader.end()
        tracer.communicate()
        self.shelf.check({loader.value: code}, "a load under strace")
        return strace.calls_of(log)

    def _traced(self, calls: str, inject: str) -> tuple[Loader, int]:
        """A load under strace, and its exit code."""
        loader = self.shelf.loader()
        tracer = strace.attach(loader.pid, calls, self.shelf.files / "strace", inject)
        loader.go()
        code = loader.end()
        tracer.communicate()
        return loader, code

    # ---- kills ----

    def kill_at_random(self, chance: random.Random, where: str) -> None:
        loader = self.shelf.loader()
        loader.go()
        time.sleep(chance.uniform(0, 1.2 * statistics.median(self.durations)))
        os.kill(loader.pid, signal.SIGKILL)
        code = loader.end()
        self.counts["random"] += code == -signal.SIGKILL
        self.shelf.check({loader.value: code}, where)

    def kill_at_call(self, chance: random.Random, where: str) -> None:
        """At each call once, in an order by chance, before any comes a second time."""
        if not self.left:
            self.left = chance.sample(self.calls, len(self.calls))
        name, number = self.left.pop()
        loader, code = self._traced(name, f"signal=KILL:when={number}")
        if code == -signal.SIGKILL:
            self.counts["calls"] += 1
            self.killed_at.add((name, number))
        self.shelf.check({loader.value: code}, f"{where}: killed at {name} {number}")

    def kill_command(self, chance: random.Random, where: str) -> None:
        """The real command; it has ended or is killed within the second that it takes."""
        process, value = self.shelf.start_command()
        try:
            code = process.wait(chance.uniform(0.2, 1.2))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self.counts["commands"] += code == -signal.SIGKILL
        process.communicate()
        self.shelf.check({value: code}, where)

    # ---- errors ----

    def fail(self, chance: random.Random, where: str) -> None:
        """A call fails, once or for good; or reads are short."""
        if chance.random() < 0.1:
            self._load_whole(chance.choice(SHORT_READS))
            self.counts["short"] += 1
            return
        (name, number), error = chance.choice(self.failing_calls), chance.choice(ERRORS)
        for_good = (
            error != "EINTR" and chance.random() < 0.3
        )  # a call that is interrupted for ever is tried for ever
        inject = f"error={error}:when={number}{'+' if for_good else ''}"
        loader, code = self._traced(name, inject)
        self.counts["errors"] += 1
        self.counts["failed"] += code != 0
        if code == -signal.SIGALRM:
            self.shelf.wrong("hung", f"{where}: {name} {inject}")
        elif (
            code and not loader.failed_plainly() and not (name == "write" and not loader.said())
        ):  # stderr itself failed
            self.counts["not one line"] += 1
            self.shelf.details.append(
                f"not one line: {where}: {name} {inject}: exit code {code}: {' | '.join(loader.said()[-3:])}"
            )
        self.shelf.check({loader.value: code}, f"{where}: {name} {inject}")

    # ---- races ----

    def race(self, chance: random.Random, where: str) -> None:
        """Two loaders of one model at once, `gc` beside them, and now and then a kill."""
        loaders = [self.shelf.loader(), self.shelf.loader()]
        for loader in loaders:
            loader.go()
        self.shelf.model.collect(keep=1)
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0, statistics.median(self.durations)))
            os.kill(loaders[0].pid, signal.SIGKILL)
        codes = {loader.value: loader.end() for loader in loaders}
        self.counts["races"] += 1
        self.counts["race kills"] += sum(code == -signal.SIGKILL for code in codes.values())
        for loader in loaders:
            if codes[loader.value] > 0 and not (
                loader.failed_plainly() and "another load" in loader.said()[0]
            ):
                self.shelf.wrong("a loser that does not say why", f"{where}: {codes} {loader.said()}")
        self.shelf.check(codes, where)

    # ---- readers ----

    def stop_reader(self, chance: random.Random, where: str) -> None:
        """A reader is stopped at some instant, versions come and go, and it reads on."""
        shared = mmap.mmap(-1, 4096)
        counts = np.frombuffer(shared, np.int64)
        pid = os.fork()
        if pid == 0:
            _read_until_told(self.shelf, counts)
        for _ in range(3):
            time.sleep(chance.uniform(0, 0.05))
            os.kill(pid, signal.SIGSTOP)
            for _ in range(3):
                self._load_whole()
            os.kill(pid, signal.SIGCONT)
            self.counts["stops"] += 1
        time.sleep(0.02)
        counts[0] = 1
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code or not counts[1]:
            self.shelf.wrong("a reader saw wrong rows", f"{where}: exit code {code} after {counts[1]} reads")


def _read_until_told(shelf: Shelf, counts: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
    """A reader's process: attaches what is live, compares every row, and again those of the version that
    it had before."""
    code = CRASHED
    try:
        before, before_value = None, None
        while not counts[0]:
            segment = shelf.model.attach()
            value = version_told(_rows(segment), IDS)
            assert value is not None
            assert before is None or version_told(_rows(before), IDS) == before_value
            before, before_value = segment, value
            counts[1] += 1
        code = 0
    finally:
        os._exit(code)


def _rows(segment: Any) -> NDArray[np.float32]:
    values: NDArray[np.float32] = segment.tables["user"].packed.view(np.float32)
    return values[:, :DIM]


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign. RuntimeError: no strace, or it may not attach."""
    strace.ensure()
    with folders() as (root, files):
        shelf = Shelf(root, files)
        campaign = Campaign(shelf, seed)
        parts = {
            "random": campaign.kill_at_random,
            "calls": campaign.kill_at_call,
            "errors": campaign.fail,
            "commands": campaign.kill_command,
            "races": campaign.race,
            "readers": campaign.stop_reader,
        }
        for part, step in parts.items():
            partial(campaign.during, part, seconds)(step)
        for detail in shelf.details[:20]:
            print(f"loads: {detail}", flush=True)
        return _figures(campaign)


def _figures(campaign: Campaign) -> dict[str, float]:
    counts, found = campaign.counts, campaign.shelf.found
    kills = {name: counts[name] for name in ("random", "calls", "commands", "race kills")}
    return {
        "loader kills": sum(kills.values()),
        "of them at random instants, forked": kills["random"],
        "of them at a system call, forked": kills["calls"],
        "of them the command": kills["commands"],
        "system calls of a load": len(campaign.calls),
        "system calls killed at": len(campaign.killed_at),
        "races of two loaders": counts["races"],
        "readers stopped": counts["stops"],
        "errors injected": counts["errors"],
        "loads that failed of them": counts["failed"],
        "errors not told in one line": counts["not one line"],
        "loads with short reads": counts["short"],
        "loads that hung": found["hung"],
        "orphan bytes": found["orphan bytes"],
        "wrong rows": found["wrong rows"] + found["unreadable"] + found["a reader saw wrong rows"],
        "wrong live version": found["wrong live version"],
        "numbers given twice": found["a number given twice"],
        "whole loads that failed": found["a whole load failed"] + found["a loser that does not say why"],
    }


if __name__ == "__main__":
    standalone(run)
