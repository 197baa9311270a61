"""Signals to `tableside serve` at any moment of its start: no traceback, and only those end it that ask
for that."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import publish_demo
from support import end, until

from tableside.loader.segment.memory import processes_below


@pytest.fixture
def starting(root: Path, tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    """A server that starts, in a group of processes of its own."""
    publish_demo(root, tmp_path)
    command = [
        sys.executable,
        "-m",
        "tableside",
        "serve",
        "demo",
        "--root",
        str(root),
        "--port",
        "0",
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        [*command, "--drain-s", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    end(process)
    assert process.stderr is not None
    process.stderr.close()


def has_imported(process: "subprocess.Popen[str]", module: str) -> bool:
    return module in Path(f"/proc/{process.pid}/maps").read_text() or process.poll() is not None


STAGES = {
    "it imports": lambda process: has_imported(process, "_ctypes"),
    "the process that workers are forked from starts": lambda process: len(processes_below(process.pid)) >= 2,
    "workers start": lambda process: len(processes_below(process.pid)) >= 3,
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", STAGES)
def test_the_end_of_a_start_is_quiet(
    starting: "subprocess.Popen[str]", stage: str, sig: signal.Signals
) -> None:
    """Ctrl-C in a terminal goes to all processes of the server: each ends, none prints where it was."""
    until(lambda: STAGES[stage](starting), what=stage)
    os.killpg(starting.pid, sig)
    _, log = starting.communicate(timeout=300)
    assert starting.returncode in (0, -sig, 128 + sig), log
    assert "Traceback" not in log and "KeyboardInterrupt" not in log, log


@pytest.mark.thorough
@pytest.mark.parametrize("sig", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("stage", STAGES)
def test_other_signals_end_nothing(
    starting: "subprocess.Popen[str]", stage: str, sig: signal.Signals
) -> None:
    """A reload or a new log that is asked for before the server is there, of it or of all its processes;
    and then again."""
    until(lambda: STAGES[stage](starting), what=stage)
    os.killpg(starting.pid, sig)
    assert starting.stdout is not None
    assert "tableside serves demo" in starting.stdout.readline()
    os.kill(starting.pid, sig)
    starting.send_signal(signal.SIGTERM)
    assert starting.wait(300) == 0


_IN_A_FINALIZER = """
import os, signal, sys
from tableside.serving.cli.cli import main
from tableside.serving.workers import server

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv.pop()))

def bind(settings, bind=server.bind):
    Dropped()
    return bind(settings)

server.bind = bind
sys.exit(main(sys.argv[1:-1]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_in_a_finalizer(root: Path, tmp_path: Path, sig: signal.Signals) -> None:
    """What a handler raises there is ignored by Python; the server ends before it serves,
    quietly."""
    publish_demo(root, tmp_path)
    options = "serve", "demo", "--root", str(root), "--port", "0", str(int(sig))
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_FINALIZER, *options], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + sig, "", "")
