"""Loads that are killed, that run at once, and that find no room in shared memory: real processes, and what
they leave."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from load_steps import PUBLISHING
from small_memory import mounted_tmpfs
from support import files_of, rows_of, run_tableside, until

from tableside.loader.errors import NoSpace
from tableside.loader.load.load import Loaded
from tableside.loader.segment.memory import available_bytes
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model

Publish = Callable[..., Loaded]


def _model_file(folder: Path, rows: int = 60_000) -> Path:
    np.save(folder / "t.npy", rows_of(rows, 64))
    path = folder / "model.toml"
    path.write_text('name = "demo"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\nrow_format = "int4"\n')
    return path


def _start_load(path: Path, root: Path, patch: str = "") -> subprocess.Popen[str]:
    """A load in a process of its own, with `patch` run before it."""
    command = ["load", str(path), "--root", str(root)]
    script = (
        f"{textwrap.dedent(patch)}\nimport sys\nfrom tableside.serving.cli.cli import "
        f"main\nsys.exit(main({command!r}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


STEPS = {
    "reserving": "import os; os.posix_fallocate = lambda *a: os.kill(os.getpid(), 9)",
    "reading": "import tableside.loader.checkpoint.rows as r, os; r.read_into = lambda *a: "
    "os.kill(os.getpid(), 9)",
    **PUBLISHING,
}


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("step", STEPS)
def test_a_load_killed_at_each_publishing_step(
    step: str, publish: Publish, root: Path, tmp_path: Path
) -> None:
    """The version before it stays live and whole; the next load succeeds, and gc leaves nothing behind."""
    publish({"t": rows_of(100, 64)})
    process = _start_load(_model_file(tmp_path), root, STEPS[step])
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    model = Model(root, "demo")
    assert model.current() == 1
    Segment(model.path(1))
    again = run_tableside("load", tmp_path / "model.toml", "--root", root)
    assert again.returncode == 0, again.stderr
    assert model.current() > 1
    assert model.attach().tables["t"].rows == 60_000
    model.collect(keep=0)
    assert files_of(model.folder) == {f"{model.current()}.segment"}


@pytest.mark.drawn(0.5)
def test_a_version_that_was_about_to_be_live_goes_with_the_next_load(
    publish: Publish, root: Path, tmp_path: Path
) -> None:
    """A load that is killed between the rename and the flip leaves a version that nobody asked for; gc is
    not needed."""
    publish({"t": rows_of(100, 64)})
    process = _start_load(_model_file(tmp_path), root, STEPS["flipping"])
    process.communicate(timeout=300)
    model = Model(root, "demo")
    assert (process.returncode, model.versions(), model.current()) == (-signal.SIGKILL, [1, 2], 1)
    publish({"t": rows_of(100, 64)})
    assert (model.versions(), model.current()) == ([1, 3], 3)


@pytest.mark.thorough
def test_a_load_killed_at_random_instants(publish: Publish, root: Path, tmp_path: Path) -> None:
    """Whenever it dies, some version is live and whole, and what it left is collectable."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    instants = random.Random(seed)
    publish({"t": rows_of(100, 64)})
    path, model = _model_file(tmp_path, rows=400_000), Model(root, "demo")
    killed = 0
    for _ in range(8):
        process = _start_load(path, root)
        partial = model.folder
        until(
            lambda p=process, f=partial: p.poll() is not None or list(f.glob("*.partial")),
            what="the load to begin",
        )
        time.sleep(instants.uniform(0, 0.06))
        process.kill()
        process.communicate(timeout=300)
        killed += process.returncode == -signal.SIGKILL
        rows = Segment(model.path(model.current())).tables["t"].rows
        assert rows in (100, 400_000)
        model.collect(keep=0)
        assert list(model.folder.glob("*.partial")) == []
    assert killed > 0, "every load finished before it was killed"


@pytest.mark.thorough
def test_two_loads_at_once(publish: Publish, root: Path, tmp_path: Path) -> None:
    """The second is refused with the reason; the first one, stopped meanwhile, goes on and publishes."""
    path, model = _model_file(tmp_path, rows=1_000_000), Model(root, "demo")
    first = _start_load(path, root)
    until(
        lambda: model.folder.is_dir() and list(model.folder.glob("*.partial")), what="the first load to begin"
    )
    first.send_signal(signal.SIGSTOP)
    second = run_tableside("load", path, "--root", root)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 1
    assert "another load of model 'demo' is under way" in second.stderr
    first.communicate(timeout=300)
    assert (first.returncode, model.current()) == (0, 1)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 8 MiB."""
    with mounted_tmpfs(tmp_path / "shm", "8m") as folder:
        yield folder


@pytest.mark.thorough
def test_shared_memory_that_is_too_small(small_tmpfs: Path, tmp_path: Path) -> None:
    """ENOSPC, not SIGBUS: one line, exit code 1, nothing left, and what was published before still serves."""
    np.save(tmp_path / "small.npy", rows_of(1000, 64))
    small = tmp_path / "small.toml"
    small.write_text('name = "demo"\ncheckpoint = "small.npy"\n[tables.t]\nkey = "small"\n')
    assert run_tableside("load", small, "--root", small_tmpfs).returncode == 0
    large = _model_file(tmp_path, rows=1_000_000)
    large.write_text(large.read_text() + "row_alignment = 4\n")
    found = run_tableside("load", large, "--root", small_tmpfs)
    assert found.returncode == 1
    assert "bytes free, the segment needs 36," in found.stderr
    assert found.stderr.count("\n") == 1
    model = Model(small_tmpfs, "demo")
    assert model.attach().tables["t"].rows == 1000
    assert list(model.folder.glob("*.partial")) == []


def test_space_that_vanishes_between_the_check_and_the_reservation(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reservation itself finds it: the file system says that there is room, and is full."""
    from tableside.loader.segment import memory

    monkeypatch.setattr(memory, "available_bytes", lambda where: 1 << 40)
    path = small_tmpfs / "x"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(NoSpace, match="the segment needs 67,108,864"):
            memory.reserve([memory.FileToMap(fd, 64 << 20, writable=True)], small_tmpfs)
        assert os.fstat(fd).st_size == 0
        monkeypatch.undo()
        assert available_bytes(small_tmpfs) >= 7 << 20
    finally:
        os.close(fd)


def test_a_file_system_without_a_size_has_what_memory_has() -> None:
    """As a tmpfs with size=0; /proc is one everywhere. It is counted in KiB."""
    free, whole = (os.sysconf("SC_PAGE_SIZE") * os.sysconf(f"SC_{of}PHYS_PAGES") for of in ("AV", ""))
    found = available_bytes(Path("/proc"))
    assert free / 2 < found <= whole and found % 1024 == 0
