"""Real servers: `tableside serve` in processes of its own, on a free loopback port."""

import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import end, rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.memory import processes_below
from tableside.serving.engine_process.main import NAME

TABLES = {"user": rows_of(1000, 64, 1), "item": rows_of(300, 32, 2), "word": rows_of(50, 16, 3)}
FORMATS = {"user": "int8", "item": "int4", "word": "fp16"}
FEATURES = {
    "clicked": {"table": "item", "pooling": "mean"},
    "user": {"table": "user", "pooling": "sum"},
    "liked": {"table": "item", "pooling": "sum", "output": "fp16"},
    "text": {"table": "word", "pooling": "none"},
}


@dataclass
class Server:
    """A running server. `url` has no trailing slash; `process` is the supervisor; `said` its
    announcement."""

    url: str
    process: "subprocess.Popen[str]"
    root: Path
    said: str = ""

    @property
    def grpc(self) -> str:
        """Host and port of its gRPC server."""
        found = re.search(r"gRPC on (\S+)", self.said)
        assert found is not None, self.said
        return found[1]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def workers(self) -> list[int]:
        """Process ids of the workers: those that have a segment mapped, and no GPU."""
        return [p for p in self._attached() if not _name(p).startswith(NAME)]

    def engines(self) -> list[int]:
        """Process ids of the engine processes that have a segment mapped."""
        return [p for p in self._attached() if _name(p).startswith(NAME)]

    def _attached(self) -> list[int]:
        return [p for p in processes_below(self.process.pid) if _maps_segment(p, self.root)]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=300)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _maps_segment(pid: int, root: Path) -> bool:
    try:
        return str(root) in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def start_server(
    root: Path,
    *options: object,
    models: tuple[str, ...] = ("demo",),
    program: tuple[object, ...] = ("-m", "tableside"),
) -> Server:
    """Starts a server and waits for its announcement; fails with its log where there is none. program: of
    Python, that is the command."""
    command = [
        sys.executable,
        *map(str, program),
        "serve",
        *models,
        "--root",
        str(root),
        "--port",
        "0",
        "--drain-s",
        "0",
        "--max-wait-s",  # for the device, which Triton's interpreter is on a busy machine
        "60",
        *map(str, options),
    ]
    log = root.parent / f"{root.name}.log"
    with log.open("w") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    text = log.read_text()
    log.unlink()
    if not found:
        process.wait(300)
        pytest.fail(f"the server did not start: {text}")
    return Server(found[0], process, root, line)


@contextmanager
def running(folder: Path, *options: object) -> Iterator[Server]:
    """A server over the demo model, made of files in `folder`; it has to end with exit code 0, and its
    models go with it."""
    root = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    publish_demo(root, folder)
    server = start_server(root, *options)
    yield server
    try:
        assert end(server.process) == 0
    finally:
        shutil.rmtree(root)


def publish_demo(
    root: Path, folder: Path, tables: dict[str, np.ndarray] = TABLES, name: str = "demo"
) -> None:
    np.savez(folder / f"{name}.npz", **tables)
    raw = {
        "name": name,
        "checkpoint": f"{name}.npz",
        "tables": {t: {"key": t, "row_format": FORMATS.get(t, "fp32")} for t in tables},
        "features": {f: d for f, d in FEATURES.items() if d["table"] in tables},
    }
    load(parse_model(raw, folder), root)
