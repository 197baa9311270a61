"""Heads of infer requests that came before, byte for byte, and what they mean: clients repeat them, and
parsing costs 20 us.

A head is learned when the parser has read a whole request that began with it, alone. The same head with as
many bytes behind it is then such a request again: where it ends was the parser's decision, made from the same
bytes.
"""

from typing import NamedTuple

from tableside.serving.http.door import InferTarget
from tableside.serving.http.traffic import Trace

MOST = 1024
_LONGEST = 1024  # bytes
_END = b"\r\n\r\n"


class KnownHead(NamedTuple):
    """What a head means. body_bytes: that follow it."""

    asked: InferTarget
    trace: Trace
    body_bytes: int


def head_of(data: "bytes | memoryview") -> bytes:
    """The head that a request begins with, its empty line included; b"" where it is long, or not whole."""
    begin = bytes(data[:_LONGEST])
    end = begin.find(_END)
    return begin[: end + len(_END)] if end > 0 else b""


class Heads:
    """Heads by their bytes, of a worker. The oldest goes where there are too many."""

    def __init__(self) -> None:
        self._known: dict[bytes, KnownHead] = {}

    def get(self, head: bytes) -> KnownHead | None:
        """What a head means that was learned, or None."""
        return self._known.get(head)

    def learn(self, head: bytes, known: KnownHead) -> None:
        if len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[head] = known
