"""The programs of docs/languages.md run, where their languages are installed."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from servers import running

from tableside.serving.client import Client

PAGE = (Path(__file__).parent.parent / "docs/languages.md").read_text()
COMMANDS = {"js": ("node", "lookup.mjs"), "go": ("go", "run", "lookup.go"), "java": ("java", "Lookup.java")}


@pytest.mark.parametrize("language", COMMANDS)
@pytest.mark.drawn(1)
def test_a_program_looks_up_what_the_client_does(language: str, tmp_path: Path) -> None:
    """Its page's block, run by the page's command: the shape, and the same values."""
    command = COMMANDS[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert f"`{' '.join(command)} http://127.0.0.1:8000`" in PAGE
    (tmp_path / command[-1]).write_text(code)
    with running(tmp_path) as server, Client(server.url) as client:
        run = [*command, server.url]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        vectors = client.lookup("demo", {"user": [[1, 2, 3], [7]]})["user"]
    rows, dim, *values = map(float, done.stdout.split())
    assert (rows, dim) == vectors.shape
    np.testing.assert_allclose(values, vectors[0, :4], rtol=1e-6)
