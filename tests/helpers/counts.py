"""Files of counts, written by hand and by processes of their own."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tableside.serving.metrics.files import VARIABLE, CountsFile


def line(name: str, *labels: str, count: int = 1) -> bytes:
    return json.dumps([name, count, *labels]).encode() + b"\n"


def add(file: CountsFile, name: str, *values: float) -> None:
    """Adds to the doubles of a name."""
    place = file.place(line(name, count=len(values)), len(values))
    assert place is not None
    for number, value in enumerate(values):
        place[number] += value


def let_go(file: CountsFile) -> None:
    """As the end of its process does. Its mapping has a descriptor of its own."""
    fcntl.flock(file._fd, fcntl.LOCK_UN)
    os.close(file._fd)


def python(code: str, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def counting(code: str, folder: Path, *arguments: object) -> "subprocess.Popen[str]":
    """A process that counts in a folder."""
    return python(code, *arguments, env={**os.environ, VARIABLE: str(folder)})
