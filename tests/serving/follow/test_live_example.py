"""`make live`: a trainer, a stream, a follower and a server, for a few seconds."""

import subprocess
import sys
from pathlib import Path

import pytest
from redis_servers import needs_redis

EXAMPLE = Path(__file__).parents[3] / "examples" / "live" / "run.py"


@pytest.mark.thorough
@needs_redis
def test_the_live_example(tmp_path: Path) -> None:
    """The rows that are trained reach the answers through Redis, in order, and the served model is the
    better one in the end. How fast they are is for the example to say, not for a test."""
    pytest.importorskip("redis", reason="the redis extra brings Redis's client")
    pytest.importorskip("matplotlib", reason="the example draws with matplotlib")
    plot = tmp_path / "live.png"
    command = [sys.executable, EXAMPLE, "--seconds", "4", "--lag-s", "60", "--out", plot]
    ran = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "rows in" in ran.stdout and "folder" not in ran.stdout, ran.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
