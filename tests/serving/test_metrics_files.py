"""Files of counts: what killed workers left is folded and counted once, and memory that is full costs metrics, not requests."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from servers import Server, publish_demo
from small_memory import fill, on_small_tmpfs, seen_by
from support import end, is_running, until

from tableside.loader.memory import processes_below
from tableside.serving import metrics_files
from tableside.serving.metrics_files import collect, fold, metrics_folder, totals
from tableside.serving.shared_counts import VARIABLE

REQUEST = {"features": {"user": [[1]]}}


def key(name: str, **labels: str) -> str:
    return str(mmap_key(name, f"{name}_total", list(labels), list(labels.values()), "help"))


def counted(folder: Path, kind: str, pid: int, **values: float) -> None:
    """The file of a process that counted: names and values."""
    file: Any = MmapedDict(str(folder / f"{kind}_{pid}.db"))  # type: ignore[no-untyped-call]
    for name, value in values.items():
        file.write_value(key(name), value, 0.0)
    file.close()


def python(code: str, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_folded_counts_are_what_they_were(tmp_path: Path) -> None:
    """Fold after fold, and one again: the sums stay, and two files are left."""
    for pid in range(1, 6):
        counted(tmp_path, "counter", pid, shared=pid, **{f"own{pid}": 0.1 * pid})
        counted(tmp_path, "histogram", pid, seconds=pid / 3)
    before = totals(tmp_path)
    assert before["counter"][key("shared")] == 15
    for pid in (3, 1, 1, 5, 2, 4, 4):
        fold(tmp_path, pid)
        assert totals(tmp_path) == {kind: pytest.approx(sums) for kind, sums in before.items()}
        assert not (tmp_path / f"counter_{pid}.db").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["counter_folded.db", "histogram_folded.db"]


def test_a_number_that_comes_again_counts_again(tmp_path: Path) -> None:
    """The kernel gives process numbers anew: the file of the later process is not taken for the folded one."""
    for turn in (1, 2, 3):
        counted(tmp_path, "counter", 7, requests=10)
        assert totals(tmp_path)["counter"] == {key("requests"): 10 * turn}
        fold(tmp_path, 7)
        assert totals(tmp_path)["counter"] == {key("requests"): 10 * turn}


KILLED_FOLD = """
import os, signal, sys
from pathlib import Path
from tableside.serving import metrics_files
left = int(sys.argv[2])
def dying(function):
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call
os.posix_fallocate = dying(os.posix_fallocate)
Path.replace, Path.unlink = dying(Path.replace), dying(Path.unlink)
metrics_files.MmapedDict.write_value = dying(metrics_files.MmapedDict.write_value)
metrics_files.fold(Path(sys.argv[1]), 2)
"""


def test_a_fold_that_is_killed_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """At each of its steps, of both types: readers see what was counted, and so they do when a later fold has ended it."""
    killed = 0
    for step in range(100):
        folder = tmp_path / str(step)
        folder.mkdir()
        for pid in (1, 2, 3):
            for kind in metrics_files.TYPES:
                counted(folder, kind, pid, shared=pid, more=1)
        fold(folder, 1)
        before = totals(folder)
        process = python(KILLED_FOLD, folder, step)
        error = process.communicate(timeout=30)[1]
        assert totals(folder) == before, f"killed at step {step}"
        for pid in (2, 3, 2):
            fold(folder, pid)
            assert totals(folder) == before, f"killed at step {step}, then {pid} folded"
        assert sorted(p.name for p in folder.iterdir()) == ["counter_folded.db", "histogram_folded.db"]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, error
        killed += 1
    assert killed >= 14  # two types, and in each at least: remove, reserve, three values and the entry, rename, remove, clear


def test_scrapes_beside_folds_see_every_count_once(tmp_path: Path) -> None:
    """Another process folds 200 files, while this one reads sums over and over."""
    for pid in range(200):
        counted(tmp_path, "counter", pid, requests=1)
        counted(tmp_path, "histogram", pid, seconds=1)
    code = "import sys; from pathlib import Path; from tableside.serving.metrics_files import fold\n"
    code += "for pid in range(200): fold(Path(sys.argv[1]), pid)"
    process, seen = python(code, tmp_path), 0
    while process.poll() is None:
        files = len(list(tmp_path.glob("*.db")))
        assert totals(tmp_path) == {"counter": {key("requests"): 200}, "histogram": {key("seconds"): 200}}
        seen += 2 < files < 400
    assert process.returncode == 0, process.communicate()[1]
    assert seen > 3, "no scrape came in between"
    process.communicate()


def test_torn_files_are_left_out_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the process may live, and when it is folded: then the file goes."""
    counted(tmp_path, "counter", 1, requests=5)
    torn = tmp_path / "counter_2.db"
    torn.write_bytes(b"\xff\xff\x00\x00" + b"garbage" * 10)
    (tmp_path / "counter_3.db").touch()  # one that just begins
    for _ in range(3):
        assert totals(tmp_path)["counter"] == {key("requests"): 5}
    assert caplog.text.count(f"metrics file {torn} is damaged and left out") == 1 and "counter_3" not in caplog.text
    fold(tmp_path, 2)
    assert not torn.exists() and totals(tmp_path)["counter"] == {key("requests"): 5}


def test_buckets_count_those_below(tmp_path: Path) -> None:
    """As Prometheus has it: cumulative, the last one being the count."""
    file: Any = MmapedDict(str(tmp_path / "histogram_1.db"))  # type: ignore[no-untyped-call]
    for bound, value in (("+Inf", 4), ("0.1", 1), ("1.0", 2)):
        file.write_value(str(mmap_key("s", "s_bucket", ["model", "le"], ["m", bound], "h")), value, 0.0)
    file.write_value(str(mmap_key("s", "s_sum", ["model"], ["m"], "h")), 2.5, 0.0)
    file.close()
    (metric,) = collect(tmp_path)
    assert {(s.name, s.labels.get("le")): s.value for s in metric.samples} == {
        ("s_bucket", "0.1"): 1,
        ("s_bucket", "1.0"): 3,
        ("s_bucket", "+Inf"): 7,
        ("s_count", None): 7,
        ("s_sum", None): 2.5,
    }


def test_a_folder_that_is_just_made_is_not_taken_for_a_stale_one(tmp_path: Path) -> None:
    """Many servers that start at once: each keeps its own folder until it ends, and then none is left."""
    code = "import os, sys; from pathlib import Path; from tableside.serving.metrics_files import metrics_folder\n"
    code += "from tableside.serving.shared_counts import VARIABLE\n"
    code += "for _ in range(100):\n    with metrics_folder(Path(sys.argv[1])): assert Path(os.environ[VARIABLE]).is_dir()"
    processes = [python(code, tmp_path) for _ in range(3)]
    for process in processes:
        error = process.communicate(timeout=60)[1]
        assert process.returncode == 0 and not error, error
    assert not list(tmp_path.iterdir())


@contextmanager
def small_server(root: Path, folder: Path, options: str, before: str = "true") -> Iterator[tuple[Server, Path]]:
    """A server with its models on a small tmpfs, and its log. before: a command of sh that runs before it serves."""
    publish_demo(folder / "source", folder)
    serve = f"{sys.executable} -m tableside serve demo --root {root} --port 0 --drain-s 0 --workers 2 --verify header"
    script = f"cp -a {folder}/source/. {root} && {before} && exec {serve}"
    log = folder / "server.log"
    with log.open("w") as err:
        command = [*on_small_tmpfs(root, options), "sh", "-c", script]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, log.read_text()
        yield Server(found[0], process, root), log
    finally:
        below = processes_below(process.pid)
        end(process)
        until(lambda: not any(map(is_running, below)), what="the server's processes to end")


def test_a_worker_that_dies_on_a_full_memory_is_replaced_by_one_that_serves(tmp_path: Path) -> None:
    """Its replacement finds no room for its counts: it says so with the remedy, and answers; what others counted stays."""
    root = tmp_path / "shm"
    with small_server(root, tmp_path, "size=16m") as (server, log):
        name = 'tableside_requests_total{model="demo",outcome="ok",protocol="v1"}'
        for _ in range(5):
            assert httpx.post(f"{server.url}/v1/lookup", json={"model": "demo", **REQUEST}).status_code == 200
        assert f"{name} 5" in httpx.get(f"{server.url}/metrics").text
        fill(seen_by(server.process.pid, root))
        until(lambda: len(server.workers()) == 2, what="two workers")
        victims = server.workers()
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        until(lambda: len(set(server.workers()) - set(victims)) == 2, 60, what="two replacements")
        replaced = set(server.workers())
        quiet_until = time.monotonic() + 2
        while time.monotonic() < quiet_until:
            with httpx.Client(transport=httpx.HTTPTransport(retries=3)) as client:
                assert client.post(f"{server.url}/v1/lookup", json={"model": "demo", **REQUEST}).status_code == 200
                assert f"{name} 5" in client.get(f"{server.url}/metrics").text
        assert set(server.workers()) == replaced, "workers went on dying"
        text = log.read_text()
        assert "no room for metrics in" in text and "free shared memory (tableside gc)" in text


def test_a_server_starts_where_no_folder_can_be_made(tmp_path: Path) -> None:
    """A tmpfs without one more inode: counters are missing, which the log says; lookups and gauges are not."""
    root = tmp_path / "shm"
    code = f"i=0; while true > {root}/file$i; do i=$((i+1)); done 2>/dev/null; true"
    with small_server(root, tmp_path, "size=16m,nr_inodes=100", f"({code})") as (server, log):
        assert httpx.post(f"{server.url}/v1/lookup", json={"model": "demo", **REQUEST}).status_code == 200
        text = httpx.get(f"{server.url}/metrics").text
        assert 'tableside_version{model="demo"} 1' in text and "tableside_requests_total{" not in text
        assert "served without counters and histograms; free shared memory" in log.read_text()


def test_counts_lie_beside_the_root_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that may only read what is published has its folder next to that."""
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with metrics_folder(tmp_path / "root"):
        assert Path(os.environ[VARIABLE]).parent == tmp_path
    assert [p.name for p in tmp_path.iterdir()] == ["root"]


def test_the_variable_goes_with_the_server(tmp_path: Path) -> None:
    with metrics_folder(tmp_path):
        assert Path(os.environ[VARIABLE]).parent == tmp_path
    assert VARIABLE not in os.environ and not list(tmp_path.iterdir())
