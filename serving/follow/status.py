"""A follower's own /metrics and /health, for Prometheus and an orchestrator.

    tableside_follower_rows_total, _batches_total, _left_out_total     applied, and refused and left out
    tableside_follower_lag_seconds       of the last batch: from its oldest change to when it was visible
    tableside_follower_applied_timestamp_seconds, _alive_timestamp_seconds

and those of a process. /health is 503 where the follower has not come round for STUCK_S.
"""

import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, make_wsgi_app

from tableside.serving.errors import ServingError
from tableside.serving.follow.loop import Step

STUCK_S = 300.0  # longer than a batch, or a wait for room, between two rounds
_LABELS = ("model", "source")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing."""


class Status:
    """Counts, and answers over HTTP until it is closed. ServingError: the address is taken, or none."""

    def __init__(self, model: str, source: str, host: str, port: int) -> None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def made(kind: Any, name: str, text: str) -> Any:
            return kind(f"tableside_follower_{name}", text, _LABELS, registry=registry).labels(model, source)

        self._rows = made(Counter, "rows", "Changed rows that were applied.")
        self._batches = made(Counter, "batches", "Batches that were applied.")
        self._left_out, self._known = made(Counter, "left_out", "Changes that were refused and left out."), 0
        self._lag = made(Gauge, "lag_seconds", "Age of the last batch's oldest change when it was visible.")
        self._applied = made(
            Gauge, "applied_timestamp_seconds", "When a batch was applied last; 0: none was."
        )
        self._alive = made(Gauge, "alive_timestamp_seconds", "When the follower came round last.")
        self._metrics, self._at = make_wsgi_app(registry), float("-inf")
        self.alive(0)
        try:
            self._server = make_server(host, port, self._answer, _Server, _Quiet)
        except OSError as error:
            raise ServingError(
                f"--metrics {host}:{port}: {error.strerror}; choose another address"
            ) from error
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="tableside-metrics", daemon=True).start()

    def alive(self, left_out: int) -> None:
        """Takes note that the follower runs, and of how many changes it has left out."""
        self._left_out.inc(left_out - self._known)
        self._known = left_out
        if (now := time.monotonic()) - self._at > 1.0:
            self._at = now
            self._alive.set_to_current_time()

    def applied(self, step: Step) -> None:
        self._rows.inc(step.applied.rows)
        self._batches.inc()
        self._applied.set_to_current_time()
        if step.lag_s is not None:
            self._lag.set(step.lag_s)

    def _answer(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if request["PATH_INFO"] == "/metrics":
            found: Iterable[bytes] = self._metrics(request, start)
            return found
        text, status = b"GET /metrics or /health\n", "404 Not Found"
        if request["PATH_INFO"] == "/health":
            is_well = time.monotonic() - self._at < STUCK_S
            text, status = (b"ok\n", "200 OK") if is_well else (b"stuck\n", "503 Service Unavailable")
        start(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
        return [text]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
