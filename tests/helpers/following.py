"""Followers of tests, as processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def following(
    root: Path, source: str, *options: Any, model: str = "demo"
) -> Iterator["subprocess.Popen[str]"]:
    """`tableside follow`, which is killed at the end where it still runs."""
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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def ended(process: "subprocess.Popen[str]", code: int) -> str:
    """What it said on stderr, once it has ended by itself."""
    _, said = process.communicate(timeout=300)
    assert process.returncode == code, said
    return said
