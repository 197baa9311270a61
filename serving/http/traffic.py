"""What comes through a worker's connections: how many there are, what is in flight, and how long each request
took.

A request's time goes from its first byte received to the last byte of its response handed to the kernel. So
waiting for a turn, a slow body and a client that reads slowly are all in it, as they are in what a user sees.
"""

import time
from collections.abc import Sequence
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
    """Who asked, by a request's headers. request_id: is echoed; None: none came, or one that is too long or
    no plain text.

    parent: W3C's traceparent.
    """

    method: bytes
    url: bytes
    request_id: bytes | None = None
    parent: bytes | None = None


def trace_of(method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Trace:
    """headers: those of TRACED, and any others."""
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
    """The label of a request: v1 or v2 for lookups and scores, http for everything else."""
    path = url.partition(b"?")[0]
    if method != b"POST":
        return OTHER
    if path.startswith(b"/v2/models/") and path.endswith(b"/infer"):
        return V2
    return V1 if path in _LOOKUPS else OTHER


def outcome_of(status: int) -> str:
    """The label of a response: ok; refused (4xx, the client's to mend); unavailable (503, to be tried
    again); failed (5xx)."""
    if status < 400:
        return "ok"
    if status < 500:
        return "refused"
    return "unavailable" if status == 503 else "failed"


class Traffic:
    """Counts over the connections of a worker. Belongs to one event loop. connections: that are open;
    in_flight: requests.

    spans: what writes a trace of each request; None: nothing does.
    """

    def __init__(self) -> None:
        self.connections = self.in_flight = 0
        self.spans: SpanWriter | None = None

    def began(self) -> None:
        """A request's headers are here."""
        self.in_flight += 1

    def ended(self, protocol: str, status: int, since: float, trace: Trace) -> None:
        """The last byte of a response is handed over. status: 0: its client left before. since: of
        time.perf_counter."""
        self.in_flight -= 1
        outcome = outcome_of(status) if status else "aborted"
        seconds = time.perf_counter() - since
        REQUEST_SECONDS.labels(protocol, outcome).add(seconds)
        if self.spans is not None:
            self.spans.write(protocol, outcome, status, seconds, trace)

    def refused(self, status: int, since: float) -> None:
        """What came is refused before it was a request."""
        REQUEST_SECONDS.labels(OTHER, outcome_of(status)).add(time.perf_counter() - since if since else 0.0)
