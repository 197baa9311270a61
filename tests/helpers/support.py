"""What tests of several rooms use: values, deadlines, real processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tableside.loader.hot.hot import hot_path

LONGEST_S = 300.0  # how long a test waits for what has to come, on however busy a machine


def rows_of(rows: int, dim: int, seed: int = 0) -> np.ndarray:
    """Values whose every row is different: fp32 [rows, dim]."""
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)


def files_of(folder: Path) -> set[str]:
    """The names of a model's files, without locks, records and what is noted of files that are there."""
    names = {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}
    notes = {name for name in names if name.endswith(".verified")}
    assert {name.removesuffix(".verified") for name in notes} <= names, "a note stayed behind its file"
    return names - notes - {"current", "current.new"}


def drop_hot(root: Path) -> None:
    """Removes what lies in memory of the hot rows of a root's models."""
    hot = hot_path(root, "m").parent
    shutil.rmtree(hot, ignore_errors=True)
    with suppress(OSError):  # other tests have theirs
        hot.parent.rmdir()


def flip_bit(path: Path, at: int, whence: int = os.SEEK_SET) -> None:
    """Changes a bit of a published file, as who may write to it can."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at, whence)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    path.chmod(mode)


def until(
    condition: Callable[[], object], deadline_s: float = LONGEST_S, what: str = "the condition"
) -> None:
    """Waits for a condition; fails at the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"{what} was not met within {deadline_s} s")
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process has not ended. One that has stays listed until its parent asks how, which may take
    seconds."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run_tableside(
    *arguments: object, root: Path | None = None, timeout_s: float = LONGEST_S
) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    environment = {**os.environ, **({"TABLESIDE_ROOT": str(root)} if root else {})}
    command = [sys.executable, "-m", "tableside", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )


def end(process: subprocess.Popen[str], deadline_s: float = LONGEST_S) -> int:
    """SIGTERM, then the exit code; SIGKILL and a failure at the deadline."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    finally:
        if process.stdout:
            process.stdout.close()


def descriptors(path: Path) -> int:
    """How many descriptors of this process are of a file, by its name as it was opened."""
    found = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    ]
    return sum(name.removesuffix(" (deleted)") == str(path) for name in found)
