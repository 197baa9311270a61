"""Evaluations whose processes are killed: what is said, what is made good, and what is left behind
(nothing)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import is_running, until
from towers import publish_towers

from tableside.loader.segment.memory import processes_below

TOP = Path(__file__).resolve().parents[3]


@pytest.mark.thorough
def test_killed_and_resumed_evaluations_give_the_same_report() -> None:
    """A short campaign: kills and flips at random instants; it says how many, and finds no difference,
    file or process left."""
    seed = int(time.time()) % 1000
    print(f"seed {seed}")
    code = (
        "import sys, json; from campaigns.evals import run; print(json.dumps(run(float('inf'), "
        "int(sys.argv[1]), 8)))"
    )
    command = [sys.executable, "-c", code, str(seed)]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] >= 8 and found["flips"] >= 1, found
    for name in (
        "wrong reports",
        "rows not once",
        "flips not named",
        "partial files left",
        "processes left",
        "tracebacks",
    ):
        assert found[name] == 0, found


@pytest.fixture
def command(root: Path, tmp_path: Path) -> list[str]:
    """An evaluation of a small model of two towers."""
    publish_towers(root, tmp_path)
    pq.write_table(pa.table({"user": [1, 2], "item": [3, 4], "label": [0, 1]}), tmp_path / "data.parquet")
    options = ("--out", str(tmp_path / "out"), "--root", str(root))
    return [sys.executable, "-m", "tableside", "eval", "towers", str(tmp_path / "data.parquet"), *options]


def kill_forkservers(process: "subprocess.Popen[str]", times: int) -> int:
    """Kills the process that workers are forked from as soon as it is there, that many times over; how
    many were killed."""
    killed: set[int] = set()
    while process.poll() is None and len(killed) < times:
        for pid in set(processes_below(process.pid)) - killed:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"multiprocessing.forkserver" in command and b"resource_tracker" not in command:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            except (OSError, ValueError):
                continue
        time.sleep(0.001)
    return len(killed)


@pytest.mark.thorough
@pytest.mark.parametrize("times", [1, 99], ids=["once", "always"])
def test_a_forkserver_that_is_killed_as_it_starts(command: list[str], times: int) -> None:
    """Once: it is started again. Each time: lines that say what failed, and the last one where and the
    remedy."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killed = kill_forkservers(process, times)
    out, error = process.communicate(timeout=300)
    assert killed >= min(times, 3) and "Traceback" not in error, error
    if times == 1:
        assert process.returncode == 0 and "2 rows in" in out, error
        return
    assert process.returncode == 1
    *tries, last = error.splitlines()
    assert tries and all("a process of the pool did not start (" in line for line in tries)
    assert (
        last.startswith("tableside: a process of the pool did not start, 3 times over")
        and "is there enough memory" in last
    )


@pytest.mark.drawn(0.25)
def test_a_long_name_of_the_folder_of_temporary_files(command: list[str], tmp_path: Path) -> None:
    """A socket's name has 107 bytes: the error names the folder and the variable that it comes from."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert found.returncode == 1 and "Traceback" not in found.stderr
    assert (
        "AF_UNIX path too long); is there enough memory, and is the folder of temporary files, TMPDIR "
        f"({folder})" in found.stderr
    )


def forked(process: "subprocess.Popen[str]") -> tuple[list[int], list[int]]:
    """Process ids of (workers, the process that they were forked from)."""
    below = set(processes_below(process.pid))
    workers = {w for pid in below for w in processes_below(pid)}
    return sorted(workers), sorted({p for p in below - workers if set(processes_below(p)) & workers})


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["main", "forkserver"])
def test_workers_end_with_what_they_belong_to(command: list[str], tmp_path: Path, victim: str) -> None:
    """In the middle of a shard: where the pool is killed no part appears later; where the forkserver is,
    both are replaced."""
    rows = 40_000
    ids = np.zeros(rows, np.int64)
    pq.write_table(pa.table({"user": ids, "item": ids, "label": ids}), tmp_path / "data.parquet")
    process = subprocess.Popen(
        [*command, "--batch", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: forked(process)[0], what="a worker")
        (worker,), (forkserver,) = forked(process)
        until(lambda: "towers" in Path(f"/proc/{worker}/maps").read_text(), what="its model")
        os.kill({"main": process.pid, "forkserver": forkserver}[victim], signal.SIGKILL)
        until(lambda: not is_running(worker), what="the worker to end")
        assert not list((tmp_path / "out" / "parts").glob("*.parquet"))
        if victim == "forkserver":
            until(lambda: set(forked(process)[0]) - {worker}, what="a replacement")
            process.kill()
        _, error = process.communicate(timeout=300)
        assert ("it is replaced" in error) == (victim == "forkserver")
    finally:
        process.kill()
