"""JSON logs, spans of requests, request ids: each as a real server writes them."""

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Server, publish_demo
from support import end, run_tableside, until

from tableside.serving.client import Client
from tableside.serving.logs import Once

Start = Callable[..., Server]
ASKED = {"model": "demo", "features": {"user": [[1]]}}


def served(root: Path, tmp_path: Path, *options: str) -> tuple["subprocess.Popen[str]", Path, Path]:
    """A server whose stdout and stderr are files."""
    publish_demo(root, tmp_path)
    out, err = tmp_path / "out", tmp_path / "err"
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
        "--drain-s",
        "0",
        *options,
    ]
    with out.open("w") as a, err.open("w") as b:
        process = subprocess.Popen(
            command, stdout=a, stderr=b, text=True, env={**os.environ, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        )
    until(lambda: "http://" in out.read_text() or process.poll() is not None, what="the announcement")
    return process, out, err


def url_of(out: Path) -> str:
    return next(word for word in out.read_text().split() if word.startswith("http://"))


@pytest.mark.drawn(0.25)
def test_the_log_as_json(root: Path, tmp_path: Path) -> None:
    """Every line is one object, of the supervisor and of workers, tracebacks in it."""
    process, _, err = served(root, tmp_path, "--log-format", "json")
    (worker,) = {json.loads(line)["pid"] for line in err.read_text().splitlines()} - {process.pid}
    os.kill(worker, signal.SIGKILL)
    until(lambda: err.read_text().count("serving demo version 1") == 2, what="the successor")
    current = root / "demo" / "current"
    record = current.read_text()
    current.chmod(0o600)
    current.write_text("nonsense")
    until(lambda: "cannot see which version" in err.read_text(), what="a warning")
    current.write_text(record)
    assert end(process) == 0
    lines = [json.loads(line) for line in err.read_text().splitlines()]
    assert all({"time", "level", "pid", "logger", "message"} <= set(line) for line in lines)
    assert {"INFO", "WARNING"} <= {line["level"] for line in lines} and all(
        line["time"].endswith("+00:00") for line in lines
    )
    assert any(
        line["message"].startswith("serving demo version 1") and line["pid"] == worker for line in lines
    )
    assert f"worker {worker} ended; it is replaced" in [
        line["message"] for line in lines if line["pid"] == process.pid
    ]


def test_tracebacks_stay_in_their_line() -> None:
    import logging

    from tableside.serving.logs import JsonFormatter

    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord(
            "tableside", logging.ERROR, "f", 1, "it failed: %s", ("x",), sys.exc_info()
        )
    (line,) = JsonFormatter().format(record).splitlines()
    found = json.loads(line)
    assert found["message"] == "it failed: x" and found["error"].endswith("ValueError: two\nlines")


def test_a_line_is_said_once_a_second_with_its_count() -> None:
    """Warnings and errors alone; one with another error is another line."""
    once, made = Once(), logging.getLogger("tableside.test").makeRecord

    def passed(
        at: float, text: str, level: int = logging.ERROR, error: Exception | None = None
    ) -> str | None:
        record = made("tableside.test", level, "", 0, text, (), (type(error), error, None) if error else None)
        record.created = at
        return record.getMessage() if once.filter(record) else None

    assert [passed(at, "lost") for at in (0.0, 0.1, 0.9)] == ["lost", None, None]
    assert passed(0.5, "found") == "found"
    assert passed(0.9, "lost", error=ValueError("x")) == "lost"
    assert passed(1.1, "lost") == "lost (and 2 times since it was said last)"
    assert passed(5.0, "lost") == "lost"
    assert [passed(at, "said", logging.INFO) for at in (6.0, 6.1)] == ["said", "said"]
    assert all(passed(7.0, f"line {n}") for n in range(10_000)) and len(once._passed) <= 256


@pytest.mark.thorough
def test_a_span_of_each_request(root: Path, tmp_path: Path) -> None:
    """With its parent, its times and its attributes, whichever way it was answered; refused and unknown
    ones too."""
    pytest.importorskip("opentelemetry.sdk", reason="the dev extra brings OpenTelemetry's SDK")
    process, out, _ = served(root, tmp_path, "--traces", "console")
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    url, headers = url_of(out), {"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "r-1"}
    with Client(url) as client:
        client.lookup("demo", {"user": [[1]]})
    httpx.post(f"{url}/v1/lookup", json=ASKED, headers=headers)
    httpx.post(f"{url}/v1/lookup?x=1", json={**ASKED, "model": "nothing"})
    httpx.get(f"{url}/some/path")
    assert end(process) == 0  # which sends what waits
    text = out.read_text()
    spans = [json.loads(block + "}") for block in text[text.index("\n{") :].split("\n}")[:-1]]
    assert [s["name"] for s in spans] == [
        "POST /v2/models/{model}/infer",
        "POST /v1/lookup",
        "POST /v1/lookup",
        "GET",
    ]
    first, second, third, fourth = (s["attributes"] for s in spans)
    assert (first["tableside.protocol"], first["url.path"]) == ("v2", "/v2/models/demo/infer")
    assert (second["tableside.outcome"], second["tableside.request_id"]) == ("ok", "r-1")
    assert (third["http.response.status_code"], third["tableside.outcome"], third["url.path"]) == (
        404,
        "refused",
        "/v1/lookup",
    )
    assert fourth["url.path"] == "/some/path" and "http.route" not in fourth
    assert spans[1]["context"]["trace_id"] == f"0x{trace}" and spans[1]["parent_id"] == f"0x{parent}"
    assert spans[0]["parent_id"] is None and all(s["kind"] == "SpanKind.SERVER" for s in spans)
    assert all(s["start_time"] < s["end_time"] for s in spans)
    assert spans[0]["resource"]["attributes"]["service.name"] == "tableside"


@pytest.mark.thorough
def test_spans_reach_a_collector(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over OTLP, where the SDK's own variable says: here a server of the test stands for the collector."""
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    pytest.importorskip(exporter, reason="the dev extra brings OpenTelemetry's exporter")
    came: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            came.append(
                (self.path, gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            )
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "embeddings-of-ads")
        try:
            process, out, _ = served(root, tmp_path, "--traces", "otlp_proto_http")
            httpx.post(f"{url_of(out)}/v1/lookup", json=ASKED, headers={"X-Request-Id": "r-7"})
            until(lambda: came, what="a span")
            assert end(process) == 0
        finally:
            collector.shutdown()
            thread.join()
    path, body = came[0]
    assert path == "/v1/traces" and all(
        part in body for part in (b"POST /v1/lookup", b"r-7", b"embeddings-of-ads")
    )


@pytest.mark.drawn(0.5)
def test_an_exporter_that_is_none_is_refused_at_the_start(root: Path, tmp_path: Path) -> None:
    publish_demo(root, tmp_path)
    done = run_tableside("serve", "demo", "--traces", "nothing", root=root)
    assert done.returncode == 1
    assert (
        "no OpenTelemetry exporter is called 'nothing'" in done.stderr
        or "install tableside[otel]" in done.stderr
    )


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/lookup", ASKED, 200),
        ("POST", "/v1/lookup", {}, 400),
        ("GET", "/v2/health/live", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/nothing", None, 404),
        (
            "POST",
            "/v2/models/demo/infer",
            {"inputs": [{"name": "user", "datatype": "INT64", "shape": [1, 1], "data": [1]}]},
            200,
        ),
        ("POST", "/v2/models/nothing/infer", {"inputs": []}, 404),
        ("DELETE", "/v2", None, 405),
    ],
)
def test_request_ids_are_echoed(server: Any, method: str, path: str, body: Any, status: int) -> None:
    """With every answer; none is made up, and what is no plain text or too long is left out."""
    with httpx.Client(base_url=server.url) as client:
        found = client.request(method, path, json=body, headers={"X-Request-Id": "id of mine/7"})
        assert (found.status_code, found.headers["x-request-id"]) == (status, "id of mine/7")
        assert "x-request-id" not in client.request(method, path, json=body).headers
        for odd in (b"", b"x" * 129, b"\xe9", b"a\tb"):
            assert (
                "x-request-id"
                not in client.request(method, path, json=body, headers={"X-Request-Id": odd}).headers
            )
