"""Bytes of a connection that were read and wait to be parsed: what is pipelined behind a request, or too much
for one turn.

A read brings thousands of pipelined requests or chunks. Parsed at once they would keep the event loop, and
each would hold memory until those before it are answered. So the parser gets a request when the one before it
is answered, and the loop has its turn in between. Nothing more is read meanwhile, and what waits counts among
the bytes that requests hold.
"""

from uvicorn.protocols.http.flow_control import FlowControl

from tableside.serving.executors.admission import Bytes, Hold
from tableside.serving.http.connection.heads import head_of

TURN_S = 1e-3  # of parsing, between two turns of the event loop
_PIECE_BYTES, _CHUNKED_BYTES = (
    512,
    16 << 10,
)  # of a head, and of a body in chunks, that the parser gets at once


class HoldingFlow(FlowControl):
    """uvicorn's, which reads where nothing is held back and nobody else has paused it."""

    _is_holding = _is_paused = False

    def pause_reading(self) -> None:
        self._is_paused = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._settle()

    def hold(self, is_holding: bool) -> None:
        """Something is held back from now on, or nothing any more."""
        self._is_holding = is_holding
        self._settle()

    def _settle(self) -> None:
        if self._is_holding:
            super().pause_reading()
        elif not self._is_paused:
            super().resume_reading()


class HeldBack:
    """What one connection holds back."""

    def __init__(self, flow: HoldingFlow, in_flight: Bytes) -> None:
        self._flow, self._in_flight, self._data, self._hold = flow, in_flight, b"", Hold(in_flight)

    def __bool__(self) -> bool:
        return bool(self._data)

    def put(self, data: "bytes | memoryview") -> None:
        """Holds bytes back, and reads no more. ApiError 503: requests hold too many already."""
        self._hold.grow(len(data))
        self._data += bytes(data)
        self._flow.hold(True)

    def take(self) -> bytes:
        """What was held back; nothing is any more."""
        data = self._data
        self.drop()
        self._hold = Hold(self._in_flight)
        self._flow.hold(False)
        return data

    def drop(self) -> None:
        """Lets go of what was held back, for good, as the connection is gone."""
        self._data = b""
        self._hold.release()


def next_piece(data: "bytes | memoryview", is_between: bool, in_headers: bool, left_of_body: int) -> int:
    """How many bytes the parser gets at once, so that it meets no more than a few requests or chunks in them.

    is_between: nothing of the next request was parsed. left_of_body: bytes that are to come; 0: it comes in
    chunks.
    """
    if is_between:
        return len(head_of(data)) or _PIECE_BYTES
    if in_headers:
        return _PIECE_BYTES
    return left_of_body or _CHUNKED_BYTES
