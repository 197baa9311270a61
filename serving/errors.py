"""The errors of this room. One that a request causes becomes {"error": "..."} with a status, and a kind for the metrics."""

from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The values of the label `kind` of `tableside_errors_total`. They are fixed, so that no request can grow the metrics."""

    BAD_REQUEST = "bad_request"
    BAD_ID = "bad_id"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    INTERNAL = "internal"
    OVERLOADED = "overloaded"
    SWAP = "swap"
    DAMAGED = "damaged"
    SCORER = "scorer"
    SCORER_TIMEOUT = "scorer_timeout"


INTERNAL_ERROR = "internal error; the server's log has the details"


def short(value: Any) -> str:
    """The repr of a value that a client sent, cut to 60 characters, to be named in an error."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class ServingError(Exception):
    """Base of the errors that a user or an operator can cause."""


class ApiError(ServingError):
    """A request that is refused. status: of the HTTP response; message: for the client.

    lacking: the table that has no row for an id, where that is why.
    """

    def __init__(self, status: int, kind: Kind, message: str, lacking: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.lacking = status, kind, message, lacking


class DeviceLost(ApiError):
    """503: the process that had the GPU lost it, and is being replaced."""

    def __init__(self) -> None:
        super().__init__(503, Kind.INTERNAL, "the engine process lost its GPU and is being replaced; try again")


def bad_request(message: str, kind: Kind = Kind.BAD_REQUEST) -> ApiError:
    """400: the request is wrong. `message` names the field, the value and what was expected."""
    return ApiError(400, kind, message)


def not_found(message: str) -> ApiError:
    """404: no such model, version or path."""
    return ApiError(404, Kind.NOT_FOUND, message)
