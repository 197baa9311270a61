"""A server that is a script on a socket, for tests of the client's connections."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson

OK = b"HTTP/1.1 200 OK\r\n"


class Script:
    """A server whose connections are handled by `handle(script, connection)`, each in a thread. heads: of
    the requests read."""

    def __init__(self, handle: Callable[["Script", socket.socket], None]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.heads: list[bytes] = []
        self.connections: list[socket.socket] = []
        self._handle = handle
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            try:
                self._handle(self, connection)
            finally:  # before `fileno` says that it is closed: the client's end sees what tests see
                connection.shutdown(socket.SHUT_WR)

    def read(self, connection: socket.socket) -> bytes:
        """A request's path. OSError: the client has closed."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += received(connection)
        head, _, body = data.partition(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ") for line in head.split(b"\r\n")[1:])
        while len(body) < int(lines.get(b"content-length", 0)):
            body += received(connection)
        self.heads.append(head)
        return head.split(b" ")[1]

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(300)


def received(connection: socket.socket) -> bytes:
    if not (data := connection.recv(1 << 16)):
        raise ConnectionResetError
    return data


def answer(value: Any, more: bytes = b"") -> bytes:
    body = orjson.dumps(value)
    return OK + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


MODELS = answer({"models": []})


@contextmanager
def scripted(handle: Callable[[Script, socket.socket], None]) -> Iterator[Script]:
    script = Script(handle)
    try:
        yield script
    finally:
        script.close()
