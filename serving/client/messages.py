"""Requests, responses and errors of a call."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]
Bytes = bytes | memoryview


class ClientError(Exception):
    """The server refused a request, or failed, or was not reached. status: of the HTTP response; 0: there was
    none. The kinds below say which it was."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message

    def __str__(self) -> str:
        return self.message if self.status == 0 else f"{self.status}: {self.message}"


class BadRequest(ClientError):
    """The request is wrong, or too large: sent again it is refused again."""


class NotFound(ClientError):
    """The server has no such model, version or path."""


class Denied(ClientError):
    """The request lacks a right."""


class Overloaded(ClientError):
    """The server does not take the request now. retry_after: seconds after which to send it again; None: the
    server says nothing of it."""

    retry_after: float | None = None


class TimedOut(ClientError):
    """No answer came in time."""


class Unreachable(ClientError):
    """There is no connection to the server, or it broke."""


BUSY = 429, 503  # statuses of a server that does not take a request now
_KINDS: dict[int, type[ClientError]] = {
    401: Denied,
    403: Denied,
    404: NotFound,
    **dict.fromkeys(BUSY, Overloaded),
}


class FeatureError(ValueError):
    """A feature's ids, lengths or weights, or a dense tensor, cannot be sent as they were given."""


class HttpRequest(NamedTuple):
    """path: below the base URL. parts: the body, as byte buffers. json_bytes: size of the JSON before binary
    tensors. may_wait: until the server takes it."""

    method: str
    path: str
    parts: tuple[Bytes, ...] = ()
    json_bytes: int | None = None
    may_wait: bool = True


class HttpResponse(NamedTuple):
    """content: the body. json_bytes: size of its JSON; tensors begin 16-byte aligned. is_last: the connection
    closes. retry_after: seconds after which to send the request again; None: it says none."""

    status: int
    content: memoryview
    json_bytes: int | None
    is_last: bool
    retry_after: float | None = None

    @property
    def text(self) -> str:
        return bytes(self.content).decode("utf-8", "replace")

    def json(self) -> Any:
        return orjson.loads(self.content)


# A call yields requests, is sent their responses, or is thrown a ClientError where there is none, and returns
# what its caller gets.
Call = Generator[HttpRequest, HttpResponse, T]


def check_status(response: HttpResponse) -> HttpResponse:
    """The response itself. ClientError: the server refused."""
    if response.status < 300:
        return response
    try:
        message = str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = response.text or _PHRASES.get(response.status, "no reason was given")
    kind = _KINDS.get(response.status, BadRequest if response.status < 500 else ClientError)
    refused = kind(response.status, message)
    if isinstance(refused, Overloaded):
        refused.retry_after = response.retry_after
    raise refused


# ---- the response of an infer request: JSON that names the tensors, then their bytes ----

DTYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"), "FP16": np.dtype("<f2"), "INT64": np.dtype("<i8"), "BOOL": np.dtype(np.bool_)
}  # fmt: skip
_PHRASES = {int(s): s.phrase for s in HTTPStatus}
FOUND = ".found"  # behind a feature's name: the output that says which ids its table has


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Output tensors that follow each other and have one type and one shape."""

    names: list[str]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    at: int

    def view(self, content: memoryview) -> Array:
        """The tensors over a response's bytes: [tensors, *shape]."""
        return np.ndarray((len(self.names), *self.shape), self.dtype, content, self.at)


def read_outputs(head: bytes) -> tuple[TensorRun, ...]:
    """The tensors that follow a response's JSON. ClientError: it describes none."""
    runs: list[TensorRun] = []
    at = len(head)
    try:
        for output in orjson.loads(head)["outputs"]:
            dtype, shape, size = (
                DTYPES[output["datatype"]],
                tuple(output["shape"]),
                output["parameters"]["binary_data_size"],
            )
            last = runs[-1] if runs else None
            if last is not None and last.dtype == dtype and last.shape == shape:
                last.names.append(output["name"])
            else:
                runs.append(TensorRun([output["name"]], dtype, shape, at))
            at += size
    except (ValueError, KeyError, TypeError) as error:
        raise ClientError(
            200, f"the response describes no binary tensors ({error!r}); does Tableside answer here?"
        ) from error
    return tuple(runs)


class Outputs:
    """Reads the responses to requests of one form; JSON equal to the last one's is not parsed again."""

    def __init__(self) -> None:
        self._known: tuple[bytes, tuple[TensorRun, ...]] = (b"", ())

    def read(self, response: HttpResponse) -> list[tuple[list[str], Array]]:
        """Returns the outputs in runs of one type and shape: names, and an array [outputs, *shape]."""
        head = bytes(response.content[: response.json_bytes])
        known, runs = self._known
        if known != head:
            runs = read_outputs(head)
            self._known = head, runs
        return [(run.names, run.view(response.content)) for run in runs]


def quoted(name: str) -> bytes:
    return orjson.dumps(name)


def request_tail(outputs: Sequence[str] | None, parameters: bytes = b"") -> bytes:
    """How an infer request's JSON ends, after its inputs. parameters: more of them, each after a comma."""
    asked = (
        b""
        if outputs is None
        else b',"outputs":[' + b",".join(b'{"name":%b}' % quoted(o) for o in outputs) + b"]"
    )
    return b'],"parameters":{"binary_data_output":true' + parameters + b"}" + asked + b"}"


def padded(head: bytes) -> bytes:
    """Pads JSON with blanks to a multiple of 8 bytes, so that the tensors are read faster."""
    return head.ljust(-(-len(head) // 8) * 8)
