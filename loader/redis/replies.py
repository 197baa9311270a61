"""Replies of a Redis server to commands that ask for records."""

import time
from typing import Any

import hiredis
import numpy as np
from numpy.typing import NDArray

from tableside.loader.redis import _records
from tableside.loader.redis.blocks import RedisBlocks
from tableside.quant.contract import Bytes, Ids
from tableside.quant.rows.turns import waiting

_BUFFER_BYTES = 1 << 18
_GRACE_S, _LEAST_S = 0.005, 0.001


def limit(sock: Any, deadline: float) -> None:
    """Has the next call of a socket end at a deadline. TimeoutError: it is over, and the moment, too, for
    which what is there may be taken."""
    if (left_s := deadline - time.monotonic()) < -_GRACE_S:
        raise TimeoutError("the deadline is over")
    sock.settimeout(max(_LEAST_S, left_s))


class Replies:
    """Reads what waits on a connection's socket. before: what comes before each record. From the first reply
    on that is no record, hiredis reads. OSError: they do not come by the deadline. hiredis.ProtocolError:
    these are no replies."""

    def __init__(self, sock: Any, deadline: float, before: bytes) -> None:
        self._socket, self._deadline, self._before = sock, deadline, before
        self._data, self._at, self._end = np.empty(0, np.uint8), 0, 0
        self._reader: Any = None  # hiredis.Reader

    def take(
        self, blocks: RedisBlocks, rows: Ids, to: Ids, out: Bytes, state: NDArray[np.uint8]
    ) -> dict[int, Any]:
        """Reads the records of rows [n] to places `to` [n] of `out`, and HERE or CORRUPT to `state`; returns
        what came in place of a record, by the place in `rows`."""
        head = self._before + b"$%d\r\n" % blocks.record_bytes
        done, others = 0, {}
        while done < rows.size:
            place = rows[done:], to[done:], blocks.words, out, state
            if self._reader is None:
                got, self._at, is_other = _records.take(self._data[: self._end], self._at, head, *place)
                done += got
                if is_other:
                    self._reader = hiredis.Reader()
                    self._reader.feed(self._data[self._at : self._end].tobytes())
                elif done < rows.size:
                    self._receive(len(head) + blocks.record_bytes)
                continue
            if self._before:
                self._next()
            reply = self._next()
            if isinstance(reply, bytes) and len(reply) == blocks.record_bytes:
                _records.take(head + reply + b"\r\n", 0, head, *place)
            else:
                others[done] = reply
            done += 1
        return others

    def _receive(self, reply_bytes: int) -> None:
        """Reads some more, behind what begins a reply."""
        kept = self._data[self._at : self._end]
        if self._data.size < reply_bytes + _BUFFER_BYTES:
            self._data = np.empty(reply_bytes + _BUFFER_BYTES, np.uint8)
        self._data[: kept.size] = kept
        self._at, self._end = 0, kept.size + self._receive_into(self._data[kept.size :])

    def _next(self) -> Any:
        while (reply := self._reader.gets()) is False:
            data = np.empty(_BUFFER_BYTES, np.uint8)
            self._reader.feed(data[: self._receive_into(data)].tobytes())
        return reply

    def _receive_into(self, to: NDArray[np.uint8]) -> int:
        limit(self._socket, self._deadline)
        with waiting():
            got: int = self._socket.recv_into(to.data)
        if not got:
            raise ConnectionResetError("it closed the connection")
        return got
