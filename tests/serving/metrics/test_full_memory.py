"""Counts in memory that is full: it costs metrics, not requests."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from counts import add, counting, let_go, line
from servers import Server, publish_demo
from small_memory import fill, on_small_tmpfs, seen_by
from support import end, is_running, until

from tableside.loader.segment.memory import processes_below
from tableside.serving.metrics.files import NAMES_AT, CountsFile, sums

REQUEST = {"features": {"user": [[1]]}}


FULL = """
import resource, sys
from pathlib import Path
from tableside.serving.metrics import files, metrics
metrics.IDS.labels("first").inc()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
for model in range(2000):
    metrics.IDS.labels(f"model{model}").inc()
    metrics.IDS.labels("first").inc()
found = files.sums(Path(sys.argv[2]))["tableside_ids_total"]
print(len(found), found["first",][0])
"""


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, NAMES_AT + 10_000], ids=["room", "no room"])
@pytest.mark.drawn(1)
def test_names_without_room_are_left_out(tmp_path: Path, limit: int) -> None:
    """The kernel refuses that a file grows: what has its place counts on, what has none is logged once and
    left out."""
    process = counting(FULL, tmp_path, limit, tmp_path)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    names, first = out.split()
    assert float(first) == 2001
    is_refused = limit != resource.RLIM_INFINITY
    assert (int(names) < 1000) == is_refused and (int(names) != 2001) == is_refused
    assert error.count("new ones are left out; free shared memory (tableside gc)") == is_refused


def test_doubles_without_room_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reserved is used up; their name is not written. A file has an end as well."""
    one = CountsFile(tmp_path)
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *_: exec("raise OSError(28, 'No space left on device')")
    )
    place = one.place(line("first"), 1)
    assert place is not None
    assert one.place(line("large", count=9000), 9000) is None
    add(one, "second", 2)
    place[0] += 1
    assert sums(tmp_path) == {"first": {(): [1]}, "second": {(): [2]}}
    monkeypatch.undo()
    assert one.place(line("huge", count=NAMES_AT // 8), NAMES_AT // 8) is None
    add(one, "large", *[1.0] * 9000)
    assert set(sums(tmp_path)) == {"first", "second", "large"}
    let_go(one)


def test_bytes_are_reserved_before_they_are_written(tmp_path: Path) -> None:
    """All doubles that have a name have memory: none is left to take at a write."""
    one = CountsFile(tmp_path)
    for number in range(5):
        end = os.lseek(one._fd, 0, os.SEEK_HOLE)
        assert end >= max(1 << 16, one._used)
        assert one.place(line("requests", str(number), count=3000), 3000) is not None
    assert end > 1 << 16
    let_go(one)


@contextmanager
def small_server(
    root: Path, folder: Path, options: str, before: str = "true"
) -> Iterator[tuple[Server, Path]]:
    """A server with its models on a small tmpfs, and its log. before: a command of sh that runs before it
    serves."""
    publish_demo(folder / "source", folder)
    serve = (
        f"{sys.executable} -m tableside serve demo --root {root} --port 0 --drain-s 0 --workers 2 "
        f"--verify header"
    )
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


@pytest.mark.thorough
def test_workers_on_a_full_memory_are_replaced_by_ones_that_count_on(tmp_path: Path) -> None:
    """In the files of those that were killed. One more worker has no room for its counts: it says so with
    the remedy, and answers."""
    root = tmp_path / "shm"
    with small_server(root, tmp_path, "size=16m") as (server, log):

        def counted() -> float:
            with httpx.Client(transport=httpx.HTTPTransport(retries=3)) as client:
                text = client.get(f"{server.url}/metrics").text
            return float(
                re.findall(r'tableside_requests_total{model="demo",outcome="ok",protocol="v1"} (\S+)', text)[
                    0
                ]
            )

        def ask(times: int) -> None:
            for _ in range(times):
                with httpx.Client(transport=httpx.HTTPTransport(retries=3)) as client:
                    assert (
                        client.post(f"{server.url}/v1/lookup", json={"model": "demo", **REQUEST}).status_code
                        == 200
                    )

        ask(40)  # so that both workers have names for their counts
        assert counted() == 40
        fill(seen_by(server.process.pid, root))
        until(lambda: len(server.workers()) == 2, what="two workers")
        victims = server.workers()
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        until(lambda: len(set(server.workers()) - set(victims)) == 2, what="two replacements")
        replaced = set(server.workers())
        ask(20)
        assert counted() == 60
        assert "no room" not in log.read_text()
        server.process.send_signal(signal.SIGTTIN)
        until(lambda: "no room for metrics in" in log.read_text(), what="a third worker to find no room")
        assert "free shared memory (tableside gc)" in log.read_text()
        until(lambda: len(server.workers()) == 3, what="three workers")
        quiet_until = time.monotonic() + 2
        while time.monotonic() < quiet_until:
            ask(1)
            assert counted() >= 60
        assert replaced < set(server.workers()), "workers went on dying"


@pytest.mark.thorough
def test_a_server_starts_where_no_folder_can_be_made(tmp_path: Path) -> None:
    """A tmpfs without one more inode: counters are missing, which the log says; lookups and gauges are
    not."""
    root = tmp_path / "shm"
    code = f"i=0; while true > {root}/file$i; do i=$((i+1)); done 2>/dev/null; true"
    with small_server(root, tmp_path, "size=16m,nr_inodes=100", f"({code})") as (server, log):
        assert httpx.post(f"{server.url}/v1/lookup", json={"model": "demo", **REQUEST}).status_code == 200
        text = httpx.get(f"{server.url}/metrics").text
        assert 'tableside_version{model="demo"} 1' in text and "tableside_requests_total{" not in text
        assert "served without counters and histograms; free shared memory" in log.read_text()
