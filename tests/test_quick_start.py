"""The quick start of docs/index.md does what it says, line by line."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import end, until

from tableside.serving.client import Client

TEXT = (Path(__file__).parent.parent / "docs/index.md").read_text()
URL = "http://127.0.0.1:8000"
COMMAND = [sys.executable, "-m", "tableside"]


@pytest.mark.drawn(0.25)
def test_the_quick_start(tmp_path: Path, root: Path) -> None:
    """From a checkpoint to a server, a lookup by curl and by the client, changed rows, a swap and back."""
    env, url, said = {**os.environ, "TABLESIDE_ROOT": str(root)}, URL, list[str]()
    servers: list[subprocess.Popen[str]] = []

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)

    try:
        for language, block in re.findall(r"^```(python|sh)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
            if language == "python":
                run(sys.executable, "-c", block.replace(URL, url))
                continue
            for line in block.splitlines():
                name, *rest = shlex.split(line.replace(URL, url))
                if rest[0] != "serve":
                    run(*(COMMAND if name == "tableside" else [name]), *rest)
                    continue
                command = [*COMMAND, *rest, "--port", "0"]
                servers.append(
                    subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
                )
                assert servers[0].stdout is not None
                while (found := re.search(r"http://[\d.:]+", line := servers[0].stdout.readline())) is None:
                    assert line, "the server ended"
                url = found[0]
        text = "".join(said)
        assert "(2, 64) (2, 64)" in text and '"vectors"' in text and "live" in said[-1]
        with Client(url) as client:
            until(lambda: client.models()[0]["version"] == 1, what="the older version to be served")
            np.testing.assert_array_equal(client.lookup("ads", {"user": [[7], [7, 8]]})["user"][:, 0], [1, 2])
        assert httpx.get(url + "/").status_code == httpx.get(url + "/docs").status_code == 200
    finally:
        for server in servers:
            end(server)
