"""OpenTelemetry traces: a span per request, child of its `traceparent` (W3C Trace Context), with the HTTP
conventions' attributes and ours: protocol, outcome, request_id. It is made after the request and sent by the
SDK's thread. Needs `tableside[otel]`."""

import time
from importlib.metadata import EntryPoint, entry_points

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tableside.serving.errors import ServingError
from tableside.serving.http.traffic import V1, V2, Trace

_GROUP = "opentelemetry_traces_exporter"
_INFER = "/v2/models/{model}/infer"


def exporter_named(name: str) -> EntryPoint:
    """Returns the entry point of an exporter. ServingError: none has that name."""
    known = {entry.name: entry for entry in entry_points(group=_GROUP)}
    if name not in known:
        raise ServingError(
            f"traces: no OpenTelemetry exporter is called {name!r}; this environment has: "
            f"{', '.join(sorted(known)) or 'none'}; "
            "install its package, or tableside[otel] for otlp_proto_http"
        )
    return known[name]


class SpanWriter:
    """Writes a worker's spans. Belongs to one event loop."""

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource({"service.name": "tableside"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tableside")
        self._context = TraceContextTextMapPropagator()

    @classmethod
    def named(cls, name: str) -> "SpanWriter":
        """Makes one for an exporter by name. ServingError: none has that name."""
        return cls(exporter_named(name).load()())

    def write(self, protocol: str, outcome: str, status: int, seconds: float, trace: Trace) -> None:
        """Writes the span of a request that ended now after `seconds`."""
        ended = time.time_ns()
        method, path = trace.method.decode("latin-1"), trace.url.partition(b"?")[0].decode("latin-1")
        route = {V1: path, V2: _INFER}.get(protocol)
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.path": path,
            "tableside.protocol": protocol,
            "tableside.outcome": outcome,
        }
        if status:
            attributes["http.response.status_code"] = status
        if route is not None:
            attributes["http.route"] = route
        if trace.request_id is not None:
            attributes["tableside.request_id"] = trace.request_id.decode()
        span = self._tracer.start_span(
            f"{method} {route}" if route else method,
            self._context.extract(
                {} if trace.parent is None else {"traceparent": trace.parent.decode("latin-1")}
            ),
            SpanKind.SERVER,
            attributes,
            start_time=ended - round(seconds * 1e9),
        )
        if outcome in ("failed", "unavailable"):
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    def close(self) -> None:
        self._provider.shutdown()
