"""What a request can do wrong. Every error becomes {"error": "..."} with a status and a kind for the metrics."""

from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Kinds of errors: the label of `tableside_errors_total`. A fixed set, so that no request can grow the metrics."""

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
    """A value that a client sent, for an error: its repr, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class ServingError(Exception):
    """Base of what this room raises for a user's or an operator's fault."""


class ApiError(ServingError):
    """A request that cannot be answered."""

    def __init__(self, status: int, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


def bad_request(message: str, kind: Kind = Kind.BAD_REQUEST) -> ApiError:
    """400: the request says something wrong; `message` names field, value and bound."""
    return ApiError(400, kind, message)


def not_found(message: str) -> ApiError:
    """404: no such model, version or path."""
    return ApiError(404, Kind.NOT_FOUND, message)
