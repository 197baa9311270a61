"""Metrics: every number, after kills and with damaged files, and no label that a request can invent."""

import gzip
import io
import json
import os
import platform
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from json_keys import documented_keys, keys_of
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from support import run_tableside, until

from tableside.serving import VERSION
from tableside.serving.cli.commands import top
from tableside.serving.client import Client, ClientError
from tableside.serving.metrics import metrics
from tableside.serving.metrics.counters import LabelledMetric
from tableside.serving.metrics.files import NAMES_AT, VARIABLE
from tableside.serving.model.engine import CacheState

Start = Callable[..., Any]


def sample(text: str, name: str) -> float:
    """The value of one sample line."""
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).rsplit(" ", 1)[1])


@pytest.mark.drawn(0.25)
def test_every_number_is_there(start: Start) -> None:
    began = time.time() - 1  # a file's time is that of the kernel's last tick
    server = start("--workers", 2)
    ready = time.time()
    with Client(server.url) as client:
        for _ in range(10):
            client.lookup("demo", {"user": [[1, 2], [3, 4]], "text": [[1]]})
        text = client.metrics()
    assert sample(text, 'tableside_requests_total{model="demo",outcome="ok",protocol="v2"}') == 10
    assert (
        sample(text, f'tableside_build_info{{python="{platform.python_version()}",version="{VERSION}"}}') == 1
    )
    assert began < sample(text, "process_start_time_seconds") <= ready
    assert sample(text, 'tableside_ids_total{model="demo"}') == 50
    assert sample(text, 'tableside_vectors_total{model="demo"}') == 30
    assert sample(text, 'tableside_row_bytes_total{model="demo"}') == 10 * (4 * 68 + 32)
    assert sample(text, 'tableside_response_bytes_total{model="demo"}') == 10 * (2 * 64 * 4 + 16 * 4)
    assert sample(text, 'tableside_request_bytes_total{model="demo"}') > 10 * 40
    for stage in ("parse", "lookup", "encode"):
        labels = f'{{model="demo",protocol="v2",stage="{stage}"}}'
        assert sample(text, f"tableside_stage_seconds_count{labels}") == 10
        assert 0 < sample(text, f"tableside_stage_seconds_sum{labels}") < 10
    assert sample(text, 'tableside_version{model="demo"}') == 1
    assert sample(text, 'tableside_segment_bytes{model="demo"}') > 1000 * 80
    assert sample(text, 'tableside_fp32_bytes{model="demo"}') == 4 * (1000 * 64 + 300 * 32 + 50 * 16)
    assert sample(text, 'tableside_load_seconds{model="demo"}') > 0
    assert sample(text, 'tableside_published_versions{model="demo"}') == 1


def documented() -> set[str]:
    """The names in the table of docs/metrics.md. One that begins with "_" is a part of a name."""
    table = (
        (Path(__file__).parents[3] / "docs/metrics.md").read_text().split("## Metrics")[1].split("\n## ")[0]
    )
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_metric_of_the_table_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every metric that there is stands in the table of docs/metrics.md."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(name="demo", versions=lambda: [1], record=lambda: SimpleNamespace(current=1)),
        attached=lambda: SimpleNamespace(
            version=1,
            sequence=0,
            segment=SimpleNamespace(size=1, deltas=()),
            header=SimpleNamespace(fp32_bytes=1, load={}, tables=()),
            placed=SimpleNamespace(hbm_bytes=0),
            scorer=None,
        ),
        cache=CacheState("cuda:0", 1, 1, 1),
        behind_s=0.0,
    )
    there = {counted.name for counted in LabelledMetric.declared} | {
        f.name for f in metrics._Now([engine]).collect()
    }
    told = documented()
    assert len(there) > 25
    for name in told:
        assert any(name in one for one in there), f"{name} is in the table, and no metric"
    for name in there:
        assert any(part == name or (part.startswith("_") and part in name) for part in told), (
            f"{name} is not in the table"
        )


@pytest.mark.drawn(0.5)
def test_errors_by_kind_without_invented_labels(start: Start) -> None:
    """A thousand unknown names make one label."""
    server = start("--workers", 1)
    with Client(server.url) as client:
        for i in range(50):
            try:
                client.lookup(f"model{i}", {"user": [[1]]})
            except ClientError as error:
                assert error.status == 404
        try:
            client.lookup("demo", {"user": [[-1]]})
        except ClientError as error:
            assert error.status == 400
        text = client.metrics()
    assert sample(text, 'tableside_errors_total{kind="not_found",model="unknown"}') == 50
    assert sample(text, 'tableside_errors_total{kind="bad_id",model="demo"}') == 1
    assert "model7" not in text


def quiet_sum(text: str, name: str, **labels: str) -> float:
    """The sum of all samples of that name with these labels."""
    families = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(s.value for s in families if s.name == name and labels.items() <= s.labels.items())


@pytest.mark.drawn(0.25)
def test_whole_requests_are_timed_by_protocol_and_outcome(start: Start) -> None:
    """From the first byte to the last: a body that comes late is in it, and so is a client that leaves."""
    server = start("--workers", 2)

    def count(protocol: str, outcome: str, what: str = "count", **more: str) -> float:
        name, labels = f"tableside_request_seconds_{what}", {"protocol": protocol, "outcome": outcome, **more}
        return quiet_sum(server.get("/metrics").text, name, **labels)

    with Client(server.url) as client:
        for _ in range(7):
            client.lookup("demo", {"user": [[1]]})
    asked = {"model": "demo", "features": {"user": [[1]]}}
    for _ in range(3):
        httpx.post(f"{server.url}/v1/lookup", json=asked)
    httpx.post(f"{server.url}/v1/lookup", json={**asked, "model": "nothing"})
    httpx.post(f"{server.url}/v2/models/demo/infer", content=b"{")
    assert [count("v2", "ok"), count("v1", "ok"), count("v1", "refused"), count("v2", "refused")] == [
        7,
        3,
        1,
        1,
    ]
    assert count("http", "ok") >= 4  # the scrapes
    httpx.post(f"{server.url}/v2/models/nothing/infer", content=b"{")
    zipped = gzip.compress(json.dumps({"inputs": []}).encode())
    httpx.post(f"{server.url}/v2/models/demo/infer", content=zipped, headers={"Content-Encoding": "gzip"})
    assert [count(p, "ok", model="demo") for p in ("v1", "v2")] == [3, 7]
    assert [count(p, "refused", model="demo") for p in ("v1", "v2")] == [0, 2]
    assert [count(p, "refused", model="") for p in ("v1", "v2")] == [1, 1]
    body, before = json.dumps(asked).encode(), count("v1", "ok", "sum")
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as late:
        late.sendall(b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
        time.sleep(0.4)
        late.sendall(body)
        assert late.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: count("v1", "ok") == 4, what="the late one to be counted")
    assert count("v1", "ok", "sum") - before > 0.35
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as gone:
        gone.sendall(b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        time.sleep(0.1)
    until(lambda: count("v1", "aborted") == 1, what="the one that left to be counted")
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as wrong:
        wrong.sendall(b"NONSENSE\r\n\r\n")
        assert wrong.recv(100).startswith(b"HTTP/1.1 400")
    until(lambda: count("http", "refused") == 1, what="what was no request to be counted")


@pytest.mark.thorough
def test_what_workers_do_now_is_summed(start: Start, root: Path) -> None:
    """Connections and requests of all workers, whichever is asked; a worker that was killed is in no sum,
    and counted."""
    server = start("--workers", 2)

    def now(name: str) -> float:
        return sample(server.get("/metrics").text, f"tableside_{name}")

    until(lambda: now("workers") == now("ready_workers") == 2, what="both to tell")
    assert now("worker_restarts_total") == now("waiting_requests") == 0 and now("max_connections") == 2048
    begun = b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    opened = [socket.create_connection(("127.0.0.1", server.port), timeout=300) for _ in range(20)]
    for one in opened[:12]:
        one.sendall(begun)
    until(lambda: now("open_connections") >= 20 and now("in_flight_requests") >= 12, what="all to be seen")
    assert now("held_bytes") >= 12
    for one in opened:
        one.close()
    until(lambda: now("open_connections") < 5 and now("in_flight_requests") <= 1, what="all to be gone")
    text = server.get("/metrics").text
    for kind in ("private", "file", "shared"):
        assert sample(text, f'tableside_memory_bytes{{kind="{kind}"}}') > 1e5
    assert 10 < now("open_files") < 500
    used = sample(text, 'tableside_cpu_seconds_total{process="worker"}')
    started = sample(server.get("/metrics").text, "process_start_time_seconds")
    os.kill(server.workers()[0], signal.SIGKILL)
    until(lambda: now("worker_restarts_total") == 1 and now("workers") == 2, what="the successor to tell")
    assert (
        0 < used <= sample(server.get("/metrics").text, 'tableside_cpu_seconds_total{process="worker"}') < 60
    )
    assert sample(server.get("/metrics").text, "process_start_time_seconds") == started, (
        "of the server, not of its workers"
    )
    (folder,) = root.glob(".metrics-*")
    assert len(list(folder.glob("counts_*"))) == 3  # the supervisor's, and one that the successor took over


@pytest.mark.thorough
def test_a_damaged_metrics_file_does_not_fail_the_scrape(start: Start, root: Path) -> None:
    """It is left out, the rest counts."""
    server = start("--workers", 2)
    with Client(server.url) as client:
        client.lookup("demo", {"user": [[1]]})
        (folder,) = root.glob(".metrics-*")
        (folder / "counts_99").write_bytes(b"\xff\xff\x00\x00" + b"garbage\n" * (NAMES_AT // 8 + 1))
        assert (
            sample(client.metrics(), 'tableside_requests_total{model="demo",outcome="ok",protocol="v2"}') == 1
        )


@pytest.mark.thorough
def test_counters_survive_kills(start: Start, root: Path) -> None:
    """What a killed worker counted is still counted, at once and after its replacement; its file is taken
    over."""
    server = start("--workers", 2)
    name = 'tableside_requests_total{model="demo",outcome="ok",protocol="v2"}'
    with Client(server.url, retries=3) as client:
        for killed in range(1, 4):
            for _ in range(10):
                client.lookup("demo", {"user": [[1]]})
            os.kill(server.workers()[0], signal.SIGKILL)
            assert sample(client.metrics(), name) == 10 * killed
            until(lambda: len(server.workers()) == 2, what="a replacement")
            assert sample(client.metrics(), name) == 10 * killed
        (folder,) = root.glob(".metrics-*")
        assert len(list(folder.glob("counts_*"))) == 3


@pytest.mark.thorough
def test_top_shows_rates(start: Start) -> None:
    """Of each model; what is cached on a GPU has tables of its own."""
    server = start()
    result = run_tableside("top", "--url", server.url, "--once", "--seconds", "0.2")
    assert result.returncode == 0 and "requests/s" in result.stdout and "demo" in result.stdout
    shown = run_tableside("top", "--url", server.url, "--once", "--seconds", "0.2", "--json").stdout
    assert [m["model"] for m in json.loads(shown)["models"]] == ["demo"] and shown.count("\n") == 1
    before = top.samples(
        'tableside_version{model="ads"} '
        '1\ntableside_requests_total{model="ads",outcome="ok",protocol="v2"} 90\n'
    )
    now = top.samples(
        'tableside_version{model="ads"} '
        '1\ntableside_requests_total{model="ads",outcome="ok",protocol="v2"} 100\n'
        'tableside_requests_total{model="ads",outcome="refused",protocol="v1"} 4\n'
        'tableside_cache_ids_total{table="ads/user"} 200\n'
        'tableside_cache_hits_total{table="ads/user"} 150\ntableside_cache_slots{device="cuda:0"} 8\n'
        'tableside_cache_occupied_slots{device="cuda:0"} 6\n'
        'tableside_disk_rows_total{model="ads",source="disk",table="user"} 8642\n'
        'tableside_disk_rows_total{model="ads",source="late",table="item"} 222\n'
        'tableside_hot_ids_total{hot="yes",model="ads",table="user"} 3\n'
        'tableside_hot_ids_total{hot="no",model="ads",table="user"} 5\n'
    )
    assert keys_of(top.rates(before, now, 2.0)) == documented_keys("top")
    console = Console(width=120, file=io.StringIO())
    console.print(top.tables(top.rates(before, now, 2.0)))
    shown = console.file.getvalue().split()  # type: ignore[attr-defined]
    expected = "ads 5 2 ads/user 100 hit bus 0.750 cuda:0 75.0% 4,321 111 0.375"
    assert {*expected.split()} <= {*shown}
