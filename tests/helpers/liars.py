"""A TCP proxy that changes answers."""

import contextlib
import socket
import threading
from collections.abc import Callable

import numpy as np


class Liar:
    """A server that gives each request on to an owner, and changes the answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.change: Callable[[bytes], bytes] = lambda answer: answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self._open: list[socket.socket] = []

    def _accept(self) -> None:
        try:
            while True:
                one, _ = self._listener.accept()
                self._open.append(one)
                self._threads.append(threading.Thread(target=self._give_on, args=(one,)))
                self._threads[-1].start()
        except OSError:  # closed
            return

    def _give_on(self, one: socket.socket) -> None:
        with one, socket.create_connection(("127.0.0.1", self._port)) as other:
            self._open.append(other)
            back = threading.Thread(target=self._give_back, args=(other, one))
            back.start()
            with contextlib.suppress(OSError):  # closed
                while data := one.recv(1 << 16):
                    other.sendall(data)
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
            back.join()

    def _give_back(self, other: socket.socket, one: socket.socket) -> None:
        try:
            while data := other.recv(1 << 20):
                one.sendall(self.change(data))
        except OSError:  # closed
            return

    def close(self) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):  # it is not connected
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()


class Cut:
    """Ends the connections of a liar, at one answer or from one on."""

    def __init__(self, liar: Liar, at: int, is_always: bool) -> None:
        self._liar, self._at, self._is_always, self.answers = liar, at, is_always, 0

    def __call__(self, answer: bytes) -> bytes:
        if answer.startswith(b"HTTP/1.1 200") and b"octet-stream" in answer:
            self.answers += 1
            if self.answers == self._at or (self._is_always and self.answers > self._at):
                for one in self._liar._open:
                    with contextlib.suppress(OSError):  # it is closed
                        one.shutdown(socket.SHUT_RDWR)
        return answer


class Flip:
    """Changes a bit of what a liar gives of files, in one of the pieces in which it comes."""

    def __init__(self, at: int) -> None:
        self._at, self._draw, self._is_file, self.pieces = at, np.random.default_rng(at), False, 0

    def __call__(self, piece: bytes) -> bytes:
        head = piece.find(b"\r\n\r\n") + 4 if piece.startswith(b"HTTP/1.1") else 0
        self._is_file = b"octet-stream" in piece[:head] if head else self._is_file
        if not self._is_file or len(piece) == head:
            return piece
        self.pieces += 1
        if self.pieces != self._at:
            return piece
        where = int(self._draw.integers(head, len(piece)))
        return piece[:where] + bytes([piece[where] ^ 16]) + piece[where + 1 :]
