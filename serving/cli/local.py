"""`with local_server(["demo"], workers=2) as server, Client(server.url) as client: ...`"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tableside.loader.versions.versions import DEFAULT_ROOT
from tableside.serving.errors import ServingError


@dataclass(frozen=True)
class LocalServer:
    """A running `tableside serve`. pid: of its supervisor."""

    url: str
    pid: int


@contextmanager
def local_server(
    models: Sequence[str], *options: str, root: Path = DEFAULT_ROOT, workers: int = 1, port: int = 0
) -> Iterator[LocalServer]:
    """Serves published models on a loopback port (0: a free one) until the block ends. options: of `tableside
    serve`. ServingError: the server did not start, with its log."""
    fixed = ["--root", str(root), "--port", str(port), "--workers", str(workers), "--drain-s", "0"]
    command = [sys.executable, "-m", "tableside", "serve", *models, *fixed, *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                process.wait(30)
                log.seek(0)
                raise ServingError(f"the server did not start:\n{log.read()}")
            yield LocalServer(found[0], process.pid)
        finally:
            process.terminate()
            process.wait(30)
            process.stdout.close()
