"""How far a load is, on a terminal and without one."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import rows_of, run_tableside

from tableside.serving.cli import output


def test_without_a_terminal_progress_is_a_line_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(output, "errors", output.make_console(stderr=True))
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with output.progress_bar("ads") as progress:
        for done, at in ((0, 120.0), (500, 125.0), (600, 134.0), (900, 145.0)):
            now[0] = at
            progress(done, 1000)
    assert capsys.readouterr().err.splitlines() == [
        "ads: 50%, 20 rows/s, 0:00:25 left",
        "ads: 90%, 20 rows/s, 0:00:05 left",
    ]


@pytest.mark.thorough
def test_a_terminal_sees_progress(tmp_path: Path, root: Path) -> None:
    """On a real pseudo-terminal: a bar with rows/s; without one, nothing but the result."""
    np.save(tmp_path / "t.npy", rows_of(300_000, 64))
    (tmp_path / "m.toml").write_text('name = "m"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tableside", "load", str(tmp_path / "m.toml"), "--root", str(root)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while part := os.read(ours, 65536):
            seen += part
    os.close(ours)
    assert process.wait(300) == 0
    assert b"rows/s" in seen
    assert b"100 %" in seen
    assert run_tableside("load", tmp_path / "m.toml", root=root).stderr == ""
