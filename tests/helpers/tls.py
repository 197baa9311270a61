"""A proxy that ends TLS before a server, as an ingress does: real certificates, sockets and bytes."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


def make_certificate(folder: Path) -> Path:
    """Writes key.pem and cert.pem, which signs itself, for localhost. Returns the certificate's path."""
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(
        [*made, *files, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True
    )
    return folder / "cert.pem"


def server_context(certificate: Path) -> ssl.SSLContext:
    """Of a server with that certificate, whose key lies beside it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    return context


class Proxy:
    """Takes TLS and gives the bytes on to a port of this machine. heads: the first bytes of each
    connection."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._port, self._context = port, context
        self.heads: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://localhost:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(plain,)))
                self._threads[-1].start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError):
            client = self._context.wrap_socket(plain, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._port))
            self._open += [client, server]
            back = threading.Thread(target=self._carry, args=(server, client))
            back.start()
            self._carry(client, server, is_request=True)
            back.join()

    def _carry(self, source: socket.socket, sink: socket.socket, is_request: bool = False) -> None:
        is_first = is_request
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_first:
                    self.heads.append(data)
                    is_first = False
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends all connections, and waits for their threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(300)
        for one in self._open:
            one.close()


@contextlib.contextmanager
def tls_before(port: int, folder: Path) -> Iterator[tuple[Proxy, Path]]:
    """A proxy before a port, and the certificate that its clients have to trust, made in `folder`."""
    certificate = make_certificate(folder)
    proxy = Proxy(port, server_context(certificate))
    try:
        yield proxy, certificate
    finally:
        proxy.close()
