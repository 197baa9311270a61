"""Bytes that a connection read but does not parse yet: pipelined requests, or too much for one turn. Parsing
thousands of them at once would block the event loop and hold their memory. Meanwhile the connection reads
nothing more; held-back bytes count in max_in_flight_bytes."""

from uvicorn.protocols.http.flow_control import FlowControl

from tableside.serving.executors.admission import Bytes, Hold
from tableside.serving.http.connection.heads import head_of

TURN_S = 1e-3  # of parsing, between two turns of the event loop
# of a head, and of a body in chunks, that the parser gets at once
_PIECE_BYTES, _CHUNKED_BYTES = (512, 16 << 10)


class HoldingFlow(FlowControl):
    """uvicorn's flow control; reads only if nothing is held back and nobody paused it."""

    _is_holding = _is_paused = False

    def pause_reading(self) -> None:
        self._is_paused = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._settle()

    def hold(self, is_holding: bool) -> None:
        self._is_holding = is_holding
        self._settle()

    def _settle(self) -> None:
        if self._is_holding:
            super().pause_reading()
        elif not self._is_paused:
            super().resume_reading()


class HeldBack:
    def __init__(self, flow: HoldingFlow, in_flight: Bytes) -> None:
        self._flow, self._in_flight, self._data, self._hold = flow, in_flight, b"", Hold(in_flight)

    def __bool__(self) -> bool:
        return bool(self._data)

    def put(self, data: "bytes | memoryview") -> None:
        """Holds bytes back and pauses reading. ApiError 503: requests hold too many already."""
        self._hold.grow(len(data))
        self._data += bytes(data)
        self._flow.hold(True)

    def take(self) -> bytes:
        data = self._data
        self.drop()
        self._hold = Hold(self._in_flight)
        self._flow.hold(False)
        return data

    def drop(self) -> None:
        """Forgets held-back bytes for good; the connection is gone."""
        self._data = b""
        self._hold.release()


def next_piece(data: "bytes | memoryview", is_between: bool, in_headers: bool, left_of_body: int) -> int:
    """Returns how many bytes to parse at once, so that they hold few requests or chunks. is_between: no byte
    of the next request was parsed. left_of_body: 0 if the body is chunked."""
    if is_between:
        return len(head_of(data)) or _PIECE_BYTES
    if in_headers:
        return _PIECE_BYTES
    return left_of_body or _CHUNKED_BYTES
