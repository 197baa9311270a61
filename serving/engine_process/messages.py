"""What doors and their engine send each other over a socket that keeps messages apart (SOCK_SEQPACKET).

A message is one byte that says its kind, then

    ASKS      door → engine    for each request: its number, where its inputs begin in the door's memory, their bytes, the bytes
                               of its description, which lies behind them at a multiple of 8, and the bytes
                               that say which tensors lie on the device, behind that at a multiple of 8
    RELEASED  door → engine    numbers of requests whose answers the door needs no more
    ANSWERS   engine → door    for each request: its number, where its answer begins in the engine's memory, its bytes, the bytes
                               of a JSON text and that text: nothing, {"unfound": …} or {"error": …}
    CONTROL   both             a JSON object; the first one brings the memory's file descriptor along
    PART      both             the beginning of a JSON object that one message does not hold, of MOST_PARTS at most

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
    """The first byte of a message."""

    ASKS = 1
    RELEASED = 2
    ANSWERS = 3
    CONTROL = 4
    PART = 5


class Ask(NamedTuple):
    """A request as it is sent. at: of its inputs in the door's memory; described: bytes of its
    description; parts: bytes that say which of its tensors lie on the device. names_version: only the
    version that it was laid out for may answer it."""

    number: int
    at: int
    size: int
    described: int
    parts: int
    names_version: int


class AnswerMessage(NamedTuple):
    """An answer as it is sent. at: in the engine's memory. told: JSON, or b""."""

    number: int
    at: int
    size: int
    told: bytes = b""


ASK, NUMBER, ANSWER = struct.Struct("<QQQQQQ"), struct.Struct("<Q"), struct.Struct("<QQQQ")


def places_of(ask: Ask) -> tuple[int, int, int]:
    """Where a request's description and its parts on the device begin, and where its part of the memory
    ends."""
    begin = (ask.at + ask.size + 7) // 8 * 8
    parts = (begin + ask.described + 7) // 8 * 8
    return begin, parts, parts + ask.parts


def read_asks(message: bytes) -> list[Ask]:
    return [Ask(*fields) for fields in ASK.iter_unpack(memoryview(message)[1:])]


def read_numbers(message: bytes) -> list[int]:
    return [number for (number,) in NUMBER.iter_unpack(memoryview(message)[1:])]


def write_answer(answer: AnswerMessage) -> bytes:
    return ANSWER.pack(answer.number, answer.at, answer.size, len(answer.told)) + answer.told


def read_answers(message: bytes) -> list[AnswerMessage]:
    found, at = [], 1
    while at < len(message):
        number, start, size, told = ANSWER.unpack_from(message, at)
        at += ANSWER.size
        found.append(AnswerMessage(number, start, size, message[at : at + told]))
        at += told
    return found


def listen() -> socket.socket:
    """A socket for an engine process, whose address the kernel chooses. It is kept when its engine ends,
    for the next one."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind("")  # an abstract address: nothing is left in a file system
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    """The address of a listening socket, in hexadecimal digits."""
    return bytes(listening.getsockname()).hex()


def connect(address: str) -> socket.socket:
    """A connection to the engine at an address; it may not have been accepted yet. OSError: nobody listens
    there."""
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
    """The next connection. ServingError: it is another user's; BlockingIOError: there is none."""
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
        raise ServingError(
            f"the other end of an engine's socket belongs to user {uid}; expected {os.geteuid()}, this "
            "server's"
        )


class Connection:
    """One end of a connection on an event loop; any thread may call `send_now`.

    on_message: gets each message and the descriptors that came with it. on_end: is called once, when the
    other end is gone or sends what is no message.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[bytes, list[int]], None], on_end: Callable[[], None]
    ) -> None:
        self._sock, self._on_message, self._on_end = sock, on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._outbox: dict[MessageKind, list[bytes]] = {}
        self._late: dict[MessageKind, list[bytes]] = {}
        self._parts = bytearray()
        self._room = memoryview(bytearray(_ROOM))
        self._is_open, self._is_blocked = True, False
        self._closing = threading.Lock()  # held while the socket is closed, and used by another thread
        self._loop.add_reader(sock.fileno(), self._read)

    @property
    def is_open(self) -> bool:
        """Whether neither end has gone."""
        return self._is_open

    def control(self, told: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends a JSON object, behind what waits to be sent."""
        self.flush()
        text = orjson.dumps(told)
        while len(text) > LARGEST:
            self._send(bytes([MessageKind.PART]) + text[:LARGEST], [])
            text = text[LARGEST:]
        self._send(bytes([MessageKind.CONTROL]) + text, list(descriptors))

    def post(self, kind: MessageKind, record: bytes) -> None:
        """Sends a record soon, with others of its kind."""
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.setdefault(kind, []).append(record)

    def post_late(self, kind: MessageKind, record: bytes) -> None:
        """As `post`, but within LATE_S, with what else comes meanwhile: for what nobody waits for."""
        if not self._late:
            self._loop.call_later(LATE_S, self._post_late)
        self._late.setdefault(kind, []).append(record)

    def _post_late(self) -> None:
        late, self._late = self._late, {}
        for kind, records in late.items():
            self._send_all(kind, records)

    def close(self) -> None:
        """Ends the connection; `on_end` is not called."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            with self._closing:
                self._sock.close()

    def flush(self) -> None:
        """Sends what `post` was given."""
        outbox, self._outbox = self._outbox, {}
        for kind, records in outbox.items():
            self._send_all(kind, records)

    def send_now(self, kind: MessageKind, records: Sequence[bytes]) -> None:
        """Sends records at once, whatever waits to be sent; what the other end has no room for is left to
        the event loop."""
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

    def _send_all(self, kind: MessageKind, records: Sequence[bytes]) -> None:
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
        """Takes one message. The loop calls again while there are more, after others' turn."""
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
    """The messages that records of a kind make."""
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
    """A message and its descriptors; b"" at the end of the connection. room: that it is received in."""
    descriptors = array.array("i")
    size, ancillary, _, _ = sock.recvmsg_into(
        [room], socket.CMSG_SPACE(4 * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return bytes(room[:size]), list(descriptors)


def close_all(descriptors: Sequence[int]) -> None:
    """Closes descriptors that nobody wants."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
