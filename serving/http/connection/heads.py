"""Heads of earlier requests for the door and their meaning: clients repeat them, and parsing costs 20 us. A
head is learned after the parser read one whole request alone. The same bytes but for the digits of its one
Content-Length end where those say."""

import re
from typing import NamedTuple

from tableside.serving.http.door import Target
from tableside.serving.http.traffic import Trace

MOST = 1024
_LONGEST = 1024  # bytes
_END = b"\r\n\r\n"
_BODY_BYTES = re.compile(rb"\r\ncontent-length: ([0-9]{1,15})\r\n", re.IGNORECASE)


class KnownHead(NamedTuple):
    """The meaning of a head, but for the length of the body behind it."""

    asked: Target
    trace: Trace


def head_of(data: "bytes | memoryview") -> bytes:
    """Returns the head of a request with its empty line; b"" if it is incomplete or too long."""
    begin = bytes(data[:_LONGEST])
    end = begin.find(_END)
    return begin[: end + len(_END)] if end > 0 else b""


def body_bytes_of(head: bytes) -> tuple[bytes, int]:
    """Returns a head without the digits of its Content-Length, and what they say; 0: they are not there."""
    found = _BODY_BYTES.search(head)
    return (head, 0) if found is None else (head[: found.start(1)] + head[found.end(1) :], int(found[1]))


class Heads:
    """A worker's known heads, without their Content-Length. The oldest goes first."""

    def __init__(self) -> None:
        self._known: dict[bytes, KnownHead] = {}

    def get(self, head: bytes) -> KnownHead | None:
        return self._known.get(head)

    def learn(self, head: bytes, known: KnownHead) -> None:
        if head not in self._known and len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[head] = known
