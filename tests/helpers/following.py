"""Followers of tests, as processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def following(
    root: Path, source: str, *options: Any, model: str = "demo"
) -> Iterator["subprocess.Popen[str]"]:
    """`tableside follow`, which is killed at the end where it still runs, with the compactions that it
    started."""
    command = [
        sys.executable,
        "-m",
        "tableside",
        "follow",
        model,
        source,
        "--root",
        str(root),
        *map(str, options),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        killed(process)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def killed(process: "subprocess.Popen[str]") -> None:
    """Kills a follower and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended(process: "subprocess.Popen[str]", code: int) -> str:
    """What it said on stderr, once it has ended by itself."""
    _, said = process.communicate(timeout=300)
    assert process.returncode == code, said
    return said
