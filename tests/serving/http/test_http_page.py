"""docs/http.md: its blocks run as they stand, against a server of the demo model."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, running

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_there_are_blocks_for_each_client() -> None:
    text = "".join(block for _, block in BLOCKS)
    clients = ("curl", "tritonclient.http", "tritonclient.grpc", "kserve")
    assert len(BLOCKS) == 4 and all(client in text for client in clients)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("page"), "--grpc-port", 0) as one:
        yield one


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("language", "block"), BLOCKS, ids=[f"{k} {language}" for k, (language, _) in enumerate(BLOCKS)]
)
def test_a_block_runs(server: Server, language: str, block: str) -> None:
    if "kserve" in block and importlib.util.find_spec("kserve") is None:
        pytest.skip("KServe's client is not installed; the dev extra brings it")
    text = block.replace("localhost:8000", f"127.0.0.1:{server.port}").replace("localhost:8001", server.grpc)
    text = text.replace("curl -s", "curl -sS --fail-with-body")
    text += "" if language == "bash" else "\nassert vectors.shape == (1, 64)\n"
    program = ["bash", "-euc"] if language == "bash" else [sys.executable, "-c"]
    done = subprocess.run([*program, text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    if language == "bash":
        assert '{"ready":true}' in done.stdout and '"outputs"' in done.stdout and '"vectors"' in done.stdout
