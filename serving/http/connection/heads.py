"""Heads of earlier infer requests and their meaning: clients repeat them, and parsing costs 20 us. A head is
learned after the parser read one whole request alone. The same bytes with as long a body end at the same
place."""

from typing import NamedTuple

from tableside.serving.http.traffic import Trace
from tableside.serving.http.v2.infer import InferTarget

MOST = 1024
_LONGEST = 1024  # bytes
_END = b"\r\n\r\n"


class KnownHead(NamedTuple):
    """The meaning of a head. body_bytes: length of the body behind it."""

    asked: InferTarget
    trace: Trace
    body_bytes: int


def head_of(data: "bytes | memoryview") -> bytes:
    """Returns the head of a request with its empty line; b"" if it is incomplete or too long."""
    begin = bytes(data[:_LONGEST])
    end = begin.find(_END)
    return begin[: end + len(_END)] if end > 0 else b""


class Heads:
    """A worker's known heads. The oldest goes first."""

    def __init__(self) -> None:
        self._known: dict[bytes, KnownHead] = {}

    def get(self, head: bytes) -> KnownHead | None:
        return self._known.get(head)

    def learn(self, head: bytes, known: KnownHead) -> None:
        if len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[head] = known
