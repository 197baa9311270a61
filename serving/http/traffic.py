"""A worker's traffic: connections, requests in flight, and seconds per request, from its first byte to the
last byte handed to the kernel. So waits, slow bodies and slow readers count."""

import time
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tableside.serving.metrics.metrics import REQUEST_SECONDS

if TYPE_CHECKING:  # of an extra
    from tableside.serving.http.tracing import SpanWriter

V1, V2, OTHER = "v1", "v2", "http"
REQUEST_ID, PARENT = b"x-request-id", b"traceparent"
TRACED = (REQUEST_ID, PARENT)
_LONGEST_ID = 128
_LOOKUPS = (b"/v1/lookup", b"/v1/score")


class Trace(NamedTuple):
    """A request's origin. request_id: echoed; None: absent, too long or not plain text. parent: W3C's
    traceparent."""

    method: bytes
    url: bytes
    request_id: bytes | None = None
    parent: bytes | None = None


def trace_of(method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Trace:
    """Reads a request's trace. headers: TRACED and any others."""
    request_id = parent = None
    for name, value in headers:
        if (
            name == REQUEST_ID
            and 0 < len(value) <= _LONGEST_ID
            and value.isascii()
            and value.decode().isprintable()
        ):
            request_id = value
        elif name == PARENT:
            parent = value
    return Trace(method, url, request_id, parent)


def protocol_of(method: bytes, url: bytes) -> str:
    """Labels a request: v1 or v2 for lookups and scores, else http."""
    path = url.partition(b"?")[0]
    if method != b"POST":
        return OTHER
    if path.startswith(b"/v2/models/") and path.endswith(b"/infer"):
        return V2
    return V1 if path in _LOOKUPS else OTHER


def outcome_of(status: int) -> str:
    """Labels a status: ok, refused (4xx), unavailable (503, retry), failed (other 5xx)."""
    if status < 400:
        return "ok"
    if status < 500:
        return "refused"
    return "unavailable" if status == 503 else "failed"


class Traffic:
    """Counts a worker's open connections and requests in flight. Belongs to one event loop. models: that it
    serves. spans: the trace writer, or None."""

    def __init__(self, models: Container[str] = ()) -> None:
        self.connections = self.in_flight = 0
        self.models = models
        self.spans: SpanWriter | None = None

    def began(self) -> None:
        self.in_flight += 1

    def ended(self, protocol: str, status: int, since: float, trace: Trace, model: str = "") -> None:
        """Counts a finished response. status 0: the client left. since: time.perf_counter(). model: as the
        client named it; "": none."""
        self.in_flight -= 1
        outcome = outcome_of(status) if status else "aborted"
        seconds = time.perf_counter() - since
        REQUEST_SECONDS.labels(model if model in self.models else "", protocol, outcome).add(seconds)
        if self.spans is not None:
            self.spans.write(protocol, outcome, status, seconds, trace)

    def refused(self, status: int, since: float) -> None:
        """Counts bytes that were refused before they were a request."""
        seconds = time.perf_counter() - since if since else 0.0
        REQUEST_SECONDS.labels("", OTHER, outcome_of(status)).add(seconds)
