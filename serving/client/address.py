"""A server's base URL, the headers of every request, and the trusted authorities.

http://HOST:PORT/PREFIX     TCP; https: TLS, its certificate checked
http://USER:SECRET@HOST     with an Authorization header
unix:PATH                   a Unix socket on this host (`tableside serve --uds PATH`)
"""

import os
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from tableside.serving import VERSION
from tableside.serving.client.messages import HttpRequest

URL_VARIABLE = "TABLESIDE_URL"
_DEFAULT_URL = "http://127.0.0.1:8000"
_EXPECTED = "expected http://HOST:PORT, https://HOST:PORT or unix:PATH"
_BINARY = b"Content-Type: application/octet-stream\r\n\r\n"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_VALUE = re.compile(r"[\t -~]*")
# What the client writes itself: a second one would change where a request ends, or what its body is.
_OURS = {"connection", "content-encoding", "content-length", "content-type", "host", "transfer-encoding"}
_OURS |= {"inference-header-content-length"}


def default_url() -> str:
    """Returns TABLESIDE_URL of the environment, or port 8000 of this host."""
    return os.environ.get(URL_VARIABLE) or _DEFAULT_URL


@dataclass(frozen=True)
class Address:
    """The address of a server. authority: the URL's host and port. path: of a Unix socket, or None. tls:
    None: no TLS. lines: the head of each request after its first line. headers: the caller's."""

    base_url: str
    host: str
    port: int
    authority: str
    prefix: str
    lines: bytes
    path: str | None = None
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls, base_url: str | None, headers: Mapping[str, str] | None = None, ca: str | Path | None = None
    ) -> "Address":
        """Parses base_url (None: `default_url`) with headers for every request and `ca`, a PEM file for
        https. ValueError: the URL, a header or the file is invalid."""
        base_url = base_url if base_url is not None else default_url()
        sent = {name: _checked(name, value) for name, value in (headers or {}).items()}
        url = urlsplit(base_url)
        path = base_url.removeprefix("unix://").removeprefix("unix:") if url.scheme == "unix" else None
        if not path and (url.scheme not in ("http", "https") or not url.hostname):
            raise ValueError(f"base_url is {base_url!r}; {_EXPECTED}")
        if ca is not None and url.scheme != "https":
            raise ValueError(f"ca is given and base_url is {base_url!r}; authorities are for https")
        if url.username is not None:
            if any(name.lower() == "authorization" for name in sent):
                raise ValueError(
                    "base_url has a user, and headers have Authorization; expected one of the two"
                )
            secret = b64encode(f"{unquote(url.username)}:{unquote(url.password or '')}".encode()).decode()
            sent["Authorization"] = f"Basic {secret}"
        authority = "localhost" if path else url.netloc.rpartition("@")[2]
        prefix = "" if path else quote(url.path.rstrip("/"), safe="/%")
        tls = _tls(ca) if url.scheme == "https" else None
        port = 0 if path else url.port or (443 if tls else 80)
        host = url.hostname or authority
        return cls(base_url, host, port, authority, prefix, _lines(authority, sent), path, tls, sent)

    def with_headers(self, headers: Mapping[str, str]) -> "Address":
        """Returns the address with these headers besides its own, or in their place. ValueError: one is
        invalid."""
        given = {name: _checked(name, value) for name, value in headers.items()}
        names = {name.lower() for name in given}
        sent = {name: value for name, value in self.headers.items() if name.lower() not in names} | given
        return replace(self, headers=sent, lines=_lines(self.authority, sent))

    @property
    def is_tls(self) -> bool:
        return self.tls is not None

    @property
    def http_url(self) -> str:
        """The base URL for request lines: without a user; http://localhost for a Unix socket."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.prefix}"

    def head(self, request: HttpRequest) -> bytes:
        """The head of a request, up to its body."""
        first = f"{request.method} {self.prefix}{request.path} HTTP/1.1\r\n".encode("ascii")
        if not request.parts:
            return first + self.lines + b"\r\n"
        numbers = request.json_bytes or 0, sum(map(len, request.parts))
        sizes = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n" % numbers
        return first + self.lines + sizes + _BINARY

    def connect(self, timeout_s: float) -> socket.socket:
        """A connection, its TLS handshake done. OSError: there is none."""
        if self.path is not None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            made = socket.create_connection((self.host, self.port), timeout_s)
        try:
            if self.path is not None:
                made.settimeout(timeout_s)
                made.connect(self.path)
                return made
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self.tls.wrap_socket(made, server_hostname=self.host) if self.tls is not None else made
        except BaseException:
            made.close()
            raise


def _lines(authority: str, headers: Mapping[str, str]) -> bytes:
    """The head of each request after its first line."""
    sent = {"Host": authority, "User-Agent": f"tableside/{VERSION}", **headers}
    return "".join(f"{name}: {value}\r\n" for name, value in sent.items()).encode("ascii")


def _checked(name: str, value: str) -> str:
    if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise ValueError(
            f"header {name!r} cannot be sent; expected a name of letters, digits and -, and a value of ASCII "
            "in one line"
        )
    if name.lower() in _OURS:
        raise ValueError(f"header {name!r} is the client's own to write; leave it out")
    return value.strip()


def _tls(ca: str | Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:
        raise ValueError(
            f"ca {ca} holds no certificates that can be read ({error}); expected a PEM file"
        ) from error
