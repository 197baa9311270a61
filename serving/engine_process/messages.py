"""Messages between doors and their engine, over SOCK_SEQPACKET. Each is a byte for its kind, then

    ASKS      door → engine    per request an `Ask`; in the door's memory its inputs, description and parts
                               follow each other, each at a multiple of 8
    RELEASED  door → engine    numbers of requests whose answers the door needs no more
    ANSWERS   engine → door    per request: number, place and bytes of its answer in the engine's memory,
                               bytes of a JSON text, and that text: nothing, {"unfound": …} or {"error": …}
    CONTROL   both             a JSON object; the first one brings the memory's file descriptor along
    PART      both             the beginning of a JSON object too long for a message, of MOST_PARTS at most

The kernel says when the other end is gone, however it ended.
"""

import array
import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import orjson

from tableside.serving.errors import ServingError

LARGEST = 60_000  # bytes of a message
MOST_PARTS = 16 << 20  # bytes of a JSON object
LATE_S = 1e-3  # that what nobody waits for may wait for more of its kind
_ROOM = 1 << 17  # bytes for a message that is received
_BACKLOG = 512


class MessageKind(IntEnum):
    ASKS = 1
    RELEASED = 2
    ANSWERS = 3
    CONTROL = 4
    PART = 5


class Ask(NamedTuple):
    """A request as sent. at: its inputs' place in the door's memory; described, parts: bytes of its
    description and of its places on the device. names_version: only that version may answer. deadline:
    of the request, in ns; 0: none."""

    number: int
    at: int
    size: int
    described: int
    parts: int
    names_version: int
    deadline: int = 0


class AnswerMessage(NamedTuple):
    """An answer as sent. at: its place in the engine's memory. told: JSON, or b""."""

    number: int
    at: int
    size: int
    told: bytes = b""


ASK, NUMBER, ANSWER = struct.Struct("<QQQQQQQ"), struct.Struct("<Q"), struct.Struct("<QQQQ")


def places_of(ask: Ask) -> tuple[int, int, int]:
    """Returns the start of a request's description and of its device parts, and its end."""
    begin = (ask.at + ask.size + 7) // 8 * 8
    parts = (begin + ask.described + 7) // 8 * 8
    return begin, parts, parts + ask.parts


def bytes_of(inputs: Any, description: bytes, parts: bytes = b"") -> int:
    return -(-len(inputs) // 8) * 8 + -(-len(description) // 8) * 8 + len(parts)


def read_asks(message: bytes) -> list[Ask]:
    return [*map(Ask._make, ASK.iter_unpack(memoryview(message)[1:]))]


def read_numbers(message: bytes) -> list[int]:
    return [number for (number,) in NUMBER.iter_unpack(memoryview(message)[1:])]


def read_answers(message: bytes) -> list[AnswerMessage]:
    found, at = [], 1
    while at < len(message):
        number, start, size, told = ANSWER.unpack_from(message, at)
        at += ANSWER.size
        found.append(AnswerMessage(number, start, size, message[at : at + told]))
        at += told
    return found


def listen() -> socket.socket:
    """Opens an engine's socket at an address of the kernel's choice; it outlives its engine."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind("")  # an abstract address: nothing is left in a file system
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    """Returns a listening socket's address in hexadecimal."""
    return bytes(listening.getsockname()).hex()


def connect(address: str) -> socket.socket:
    """Connects to an engine's address; it may not have accepted yet. OSError: nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(bytes.fromhex(address))
        _check_peer(connection)
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return connection


def accept(listening: socket.socket) -> socket.socket:
    """Accepts a connection. ServingError: another user's. BlockingIOError: none waits."""
    connection, _ = listening.accept()
    try:
        _check_peer(connection)
    except ServingError:
        connection.close()
        raise
    connection.setblocking(False)
    return connection


def _check_peer(connection: socket.socket) -> None:
    _, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    if uid != os.geteuid():
        what = f"the other end of an engine's socket belongs to user {uid}"
        raise ServingError(f"{what}; expected {os.geteuid()}, this server's")


class Connection:
    """One end of a connection on an event loop; any thread may call `send_now`. on_message: gets each message
    with its descriptors. on_end: called once, when the other end is gone or sends nonsense."""

    def __init__(
        self, sock: socket.socket, on_message: Callable[[bytes, list[int]], None], on_end: Callable[[], None]
    ) -> None:
        self._sock, self._on_message, self._on_end = sock, on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._outbox: dict[MessageKind, list[bytes]] = {}
        self._parts = bytearray()
        self._room = memoryview(bytearray(_ROOM))
        self._is_open, self._is_blocked = True, False
        self._closing = threading.Lock()  # held while the socket is closed, and used by another thread
        self._loop.add_reader(sock.fileno(), self._read)

    @property
    def is_open(self) -> bool:
        return self._is_open

    def control(self, told: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends a JSON object behind waiting records."""
        self.flush()
        text = orjson.dumps(told)
        while len(text) > LARGEST:
            self._send(bytes([MessageKind.PART]) + text[:LARGEST], [])
            text = text[LARGEST:]
        self._send(bytes([MessageKind.CONTROL]) + text, list(descriptors))

    def post(self, kind: MessageKind, record: bytes, wait_s: float = 0.0) -> None:
        """Sends a record with others of its kind: in the next round of the loop, or within `wait_s`."""
        if kind not in self._outbox:
            self._loop.call_later(wait_s, self._send_all, kind)
        self._outbox.setdefault(kind, []).append(record)

    def release(self, number: int) -> None:
        """Gives an answer's memory back, on whatever thread its last array goes."""
        if not self._is_open:
            return
        record = NUMBER.pack(number)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.post, MessageKind.RELEASED, record, LATE_S)
            return
        self.post(MessageKind.RELEASED, record, LATE_S)

    def close(self) -> None:
        """Closes the connection without `on_end`."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            with self._closing:
                self._sock.close()

    def flush(self) -> None:
        for kind in [*self._outbox]:
            self._send_all(kind)

    def send_now(self, kind: MessageKind, records: Sequence[bytes]) -> None:
        """Sends records at once, ahead of waiting ones; the loop sends what does not fit."""
        for message in _joined(kind, records):
            with self._closing:
                if not self._is_open:
                    return
                try:
                    self._sock.send(message)
                    continue
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the reader learns that the other end is gone
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._send, message, [])

    def _send_all(self, kind: MessageKind) -> None:
        if records := self._outbox.pop(kind, None):
            for message in _joined(kind, records):
                self._send(message, [])

    def _send(self, message: bytes, descriptors: list[int]) -> None:
        if not self._is_open:
            return
        self._unsent.append((message, descriptors))
        if len(self._unsent) == 1:
            self._write()

    def _write(self) -> None:
        while self._unsent:
            message, descriptors = self._unsent[0]
            try:
                if descriptors:
                    socket.send_fds(self._sock, [message], descriptors)
                else:
                    self._sock.send(message)
            except BlockingIOError:
                self._is_blocked = True
                self._loop.add_writer(self._sock.fileno(), self._write)
                return
            except OSError:
                self._unsent.clear()  # the reader learns that the other end is gone
                return
            self._unsent.popleft()
        if self._is_blocked:
            self._is_blocked = False
            self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        """Reads one message; the loop calls again for more."""
        if not self._is_open:
            return
        try:
            message, descriptors = _receive(self._sock, self._room)
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = b"", []
        if not message or (message[0] == MessageKind.PART and len(self._parts) + len(message) > MOST_PARTS):
            close_all(descriptors)
            self.close()
            self._on_end()
            return
        if message[0] == MessageKind.PART:
            close_all(descriptors)  # they come with the last part
            self._parts += message[1:]
            return
        if message[0] == MessageKind.CONTROL:
            message, self._parts = message[:1] + self._parts + message[1:], bytearray()
        self._on_message(message, descriptors)


def _joined(kind: MessageKind, records: Sequence[bytes]) -> Iterator[bytes]:
    message = [bytes([kind])]
    size = 1
    for record in records:
        if size + len(record) > LARGEST and len(message) > 1:
            yield b"".join(message)
            message, size = [bytes([kind])], 1
        message.append(record)
        size += len(record)
    yield b"".join(message)


def _receive(sock: socket.socket, room: memoryview) -> tuple[bytes, list[int]]:
    """Receives a message into `room`, and descriptors; b"" at the end."""
    descriptors = array.array("i")
    size, ancillary, _, _ = sock.recvmsg_into(
        [room], socket.CMSG_SPACE(4 * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return bytes(room[:size]), list(descriptors)


def close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
