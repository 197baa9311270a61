"""The errors of `serving`. A request's error becomes {"error": "..."} with a status, and a kind in the
metrics."""

from enum import StrEnum
from typing import Any

from tableside.loader.errors import LoaderError
from tableside.quant.errors import QuantError


class ErrorKind(StrEnum):
    """Values of the label `kind` of `tableside_errors_total`: fixed, so that requests cannot grow the
    metrics."""

    BAD_REQUEST = "bad_request"
    BAD_ID = "bad_id"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    INTERNAL = "internal"
    OVERLOADED = "overloaded"
    SWAP = "swap"
    DAMAGED = "damaged"
    NOT_READ = "not_read"
    SCORER = "scorer"
    SCORER_TIMEOUT = "scorer_timeout"
    DENIED = "denied"


INTERNAL_ERROR = "internal error; the server's log has the details"


def short(value: Any) -> str:
    """The repr of a value that a client sent, cut to 60 characters, to be named in an error."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class ServingError(Exception):
    """Base of the errors that a user or an operator can cause."""


# what says that a version cannot be served here
UNUSABLE = (LoaderError, QuantError, ServingError, OSError)


class SourceError(ServingError):
    """A stream of changes is invalid, incomplete or out of order."""


class ApiError(ServingError):
    """A refused request. status: HTTP's; message: for the client. lacking: the table without a row for an id,
    if that is why. headers: more of the response."""

    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __init__(
        self,
        status: int,
        kind: ErrorKind,
        message: str,
        lacking: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(status, kind, message, lacking, headers)
        self.headers = headers
        self.status, self.kind, self.message, self.lacking = status, kind, message, lacking

    def __str__(self) -> str:
        return self.message


class DeviceLost(ApiError):
    """503: the process that had the GPU lost it, and is being replaced."""

    def __init__(self) -> None:
        super().__init__(
            503, ErrorKind.INTERNAL, "the engine process lost its GPU and is being replaced; try again"
        )
        self.args = ()  # what it is made of anew behind a pickle


def bad_request(message: str, kind: ErrorKind = ErrorKind.BAD_REQUEST) -> ApiError:
    """Makes a 400. `message` names the field, the value and the expectation."""
    return ApiError(400, kind, message)


def wrong_method(method: str, path: str, *allowed: str) -> ApiError:
    """405: the path is there, and takes the methods `allowed` alone. GET brings HEAD with it."""
    methods = [m for a in allowed if a != "HEAD" for m in ((a, "HEAD") if a == "GET" else (a,))]
    what = f"{method} {short(path)}: expected {' or '.join(methods)}"
    return ApiError(405, ErrorKind.BAD_REQUEST, what, headers=((b"allow", ", ".join(methods).encode()),))


def not_found(message: str) -> ApiError:
    """404: no such model, version or path."""
    return ApiError(404, ErrorKind.NOT_FOUND, message)
