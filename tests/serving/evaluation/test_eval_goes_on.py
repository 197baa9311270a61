"""`tableside eval` goes on after kills, stops and damage, and leaves what is not its own alone."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from evaluated import data, evaluate, model, parts, publish, scores_of, write
from support import is_running, until

from tableside.loader.segment.memory import processes_below
from tableside.loader.versions.versions import Model

pytestmark = pytest.mark.gpu


@pytest.mark.thorough
def test_the_same_command_goes_on_with_what_it_loaded(root: Path, tmp_path: Path) -> None:
    """A model.toml is loaded once for an evaluation, also where it was stopped; again where a file of it
    changed."""
    path, toml, out = write(tmp_path, data(100)), model(tmp_path, "int8"), tmp_path / "out"
    first = evaluate(root, toml, path, "--out", out)
    assert first.returncode == 0 and "loaded ctr version 1, not activated" in first.stdout, first.stderr
    again = evaluate(root, toml, path, "--out", out)
    assert again.returncode == 0, again.stderr
    assert (
        "was loaded as ctr version 1 when this evaluation began" in again.stdout
        and "100 of them by an earlier" in again.stdout
    )
    assert Model(root, "ctr").versions() == [1]
    os.utime(toml)
    changed = evaluate(root, toml, path, "--out", out)
    assert changed.returncode == 1 and "holds another evaluation (different: candidates)" in changed.stderr
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    refused = evaluate(root, toml, path, "--out", foreign)
    assert refused.returncode == 1 and "is not empty and holds no evaluation" in refused.stderr
    assert Model(root, "ctr").versions() == [1, 2] and [p.name for p in foreign.iterdir()] == ["thesis.txt"]


def begin(root: Path, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tableside", "eval", *map(str, arguments), "--root", str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers_of(process: "subprocess.Popen[str]", root: Path) -> list[int]:
    """Processes that have the model mapped."""

    def maps(pid: int) -> bool:
        try:
            return str(root / "ctr") in Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return False

    return [p for p in processes_below(process.pid) if maps(p)]


@pytest.mark.thorough
def test_killed_workers_are_replaced(root: Path, tmp_path: Path) -> None:
    """Every row is still there once; what was begun is begun again."""
    publish(root, tmp_path)
    columns = data(40_000)
    path, out = write(tmp_path, columns), tmp_path / "out"
    process = begin(root, "ctr", path, "--out", out, "--workers", 2, "--shard-rows", 400, "--batch", 8)
    until(lambda: len(list((out / "parts").glob("*.parquet"))) > 3, what="some shards")
    victims = workers_of(process, root)
    begun, others = out / "parts" / f"00099.partial-{victims[0]}", out / "parts" / "00098.partial-1"
    begun.touch()
    others.touch()
    os.kill(victims[0], signal.SIGKILL)
    until(lambda: set(workers_of(process, root)) - set(victims), what="a replacement")
    assert not begun.exists() and others.exists()
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    assert "ended with -9" in error and "it is replaced" in error
    found = parts(out)
    assert found.column("row").to_pylist() == [*range(20_000)] * 2
    np.testing.assert_allclose(found.column("score_0").to_numpy(), scores_of(columns), rtol=1e-4, atol=1e-6)
    assert not list((out / "parts").glob("*.partial*"))


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_evaluation_goes_on(root: Path, tmp_path: Path, how: signal.Signals) -> None:
    """What is whole is kept, what is not is done again; no process stays behind."""
    publish(root, tmp_path)
    columns = data(20_000)
    path, out = write(tmp_path, columns), tmp_path / "out"
    arguments = ("ctr", path, "--out", out, "--shard-rows", 400, "--batch", 4)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it, as would this one's
    process = begin(root, *arguments)
    signal.signal(signal.SIGINT, before)
    until(lambda: len(list((out / "parts").glob("*.parquet"))) > 3, what="some shards")
    below = processes_below(process.pid)
    process.send_signal(how)
    process.communicate(timeout=300)
    assert process.returncode in (130, -9)
    until(lambda: not any(map(is_running, below)), what="its processes to end")
    kept = {p: p.stat().st_mtime_ns for p in (out / "parts").glob("*.parquet")}
    assert 3 < len(kept) < 50
    result = evaluate(root, *arguments[:4], *arguments[4:6], "--batch", 4096, "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert "of them by an earlier run" in result.stdout
    assert all(p.stat().st_mtime_ns == at for p, at in kept.items())
    assert parts(out).num_rows == 20_000
    np.testing.assert_allclose(
        parts(out).column("score_0").to_numpy(), scores_of(columns), rtol=1e-4, atol=1e-6
    )


@pytest.mark.thorough
def test_out_of_another_evaluation_is_left_alone(root: Path, tmp_path: Path) -> None:
    publish(root, tmp_path)
    columns = data(100)
    path, out = write(tmp_path, columns), tmp_path / "out"
    assert evaluate(root, "ctr", path, "--out", out).returncode == 0
    result = evaluate(root, "ctr", path, "--out", out, "--slice", "kind")
    assert result.returncode == 1
    assert "holds another evaluation (different: slice); remove it, or choose another --out" in result.stderr
    with (out / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is being written by another evaluation" in evaluate(root, "ctr", path, "--out", out).stderr
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    assert "is not empty and holds no evaluation" in evaluate(root, "ctr", path, "--out", other).stderr
    assert [p.name for p in other.iterdir()] == ["precious"]


@pytest.mark.thorough
def test_a_damaged_part_is_made_again(root: Path, tmp_path: Path) -> None:
    publish(root, tmp_path)
    columns = data(300)
    path, out = write(tmp_path, columns), tmp_path / "out"
    arguments = ("ctr", path, "--out", out, "--shard-rows", 100)
    assert evaluate(root, *arguments).returncode == 0
    (out / "parts" / "00000.parquet").write_bytes(b"")
    assert evaluate(root, *arguments).returncode == 0
    assert parts(out).num_rows == 300
