"""Pages of other sites may neither write through a server on loopback nor read from it under a name of
their own."""

import json
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server

from tableside.serving.errors import ApiError
from tableside.serving.http.origins import Origins, check_type
from tableside.serving.settings import ServerSettings

Head = list[tuple[bytes, bytes]]


def origins(**settings: Any) -> Origins:
    return Origins.of(ServerSettings.model_validate({"models": ("demo",), **settings}))


@pytest.mark.parametrize(
    "host",
    [
        b"localhost",
        b"LocalHost:8000",
        b"127.0.0.1:8000",
        b"[::1]:8000",
        b"[::1]",
        b"10.0.0.7",
        b"127.0.0.2:1",
    ],
)
def test_a_server_on_loopback_has_its_own_names(host: bytes) -> None:
    for address in ("127.0.0.1", "::1", "localhost"):
        assert origins(host=address).refusal(b"POST", [(b"host", host)]) is None


@pytest.mark.parametrize(
    "host",
    [b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"localhost@evil.example", b"",
     b"127.0.0.1.evil.example",
     b"localhost:80:80", b"xlocalhost", "localhost\xe9".encode("latin-1")],
)  # fmt: skip
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_other_names_are_refused_on_loopback(host: bytes, method: bytes) -> None:
    """A page whose name points at this server (DNS rebinding) is of the same site, and is known by its
    name alone."""
    said = origins().refusal(
        method, [(b"host", host), (b"origin", b"http://" + host), (b"sec-fetch-site", b"same-origin")]
    )
    assert said is not None and "--allowed-hosts" in said and "localhost" in said
    assert origins().refusal(method, [(b"host", b"localhost"), (b"host", host)]) is not None


def test_allowed_hosts() -> None:
    """They are named, or any is; elsewhere than on loopback any is without being named."""
    evil: Head = [(b"host", b"evil.example")]
    for settings in (
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"uds": "/tmp/s"},
        {"allowed_hosts": "*"},
        {"host": "tables"},
    ):
        assert origins(**settings).refusal(b"POST", evil) is None
    named = origins(host="0.0.0.0", allowed_hosts="Tables.example,other")
    assert named.refusal(b"POST", evil) is not None
    assert named.refusal(b"POST", [(b"host", b"localhost")]) is not None
    for host in (b"tables.example", b"TABLES.example:80", b"other", b"10.1.2.3:8000"):
        assert named.refusal(b"POST", [(b"host", host)]) is None


@pytest.mark.parametrize(
    ("headers", "is_taken"),
    [
        ([], True),
        ([(b"origin", b"http://localhost:8000")], True),
        ([(b"origin", b"https://LOCALHOST:8000")], True),
        ([(b"origin", b"http://localhost:9000")], False),
        ([(b"origin", b"http://evil.example")], False),
        ([(b"origin", b"null")], False),
        ([(b"origin", b"")], False),
        ([(b"origin", b"http://localhost:8000"), (b"origin", b"http://evil.example")], False),
        ([(b"sec-fetch-site", b"same-origin"), (b"origin", b"https://behind.a.proxy")], True),
        ([(b"sec-fetch-site", b"none")], True),
        ([(b"sec-fetch-site", b"same-site")], False),
        ([(b"sec-fetch-site", b"cross-site")], False),
        ([(b"sec-fetch-site", b"cross-site"), (b"origin", b"http://localhost:8000")], False),
    ],
)
def test_pages_of_other_sites_do_not_write(headers: Head, is_taken: bool) -> None:
    """A GET of theirs is answered: their browser keeps the answer from them."""
    head = [(b"host", b"localhost:8000"), *headers]
    assert (origins().refusal(b"POST", head) is None) is is_taken
    assert (origins().refusal(b"DELETE", head) is None) is is_taken
    assert origins().refusal(b"GET", head) is None and origins().refusal(b"HEAD", head) is None


@pytest.mark.parametrize(
    "kind", [b"text/plain", b"Text/Plain;charset=UTF-8", b"multipart/form-data; boundary=x"]
)
def test_regions_are_not_registered_by_text_of_a_page(kind: bytes) -> None:
    with pytest.raises(ApiError, match="expected application/json") as error:
        check_type(kind)
    assert error.value.status == 415
    check_type(None)  # Triton's client sends none
    check_type(b"application/json")


def ask(
    server: Server, method: str, path: str, body: bytes, *lines: str, host: str = "localhost"
) -> tuple[int, bytes]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
        head = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *lines,
        ]
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        found = connection.makefile("rb").read()
    return int(found.split()[1]), found.partition(b"\r\n\r\n")[2]


@pytest.fixture
def memory() -> Iterator[Path]:
    """What another program of this user has in shared memory."""
    path = Path("/dev/shm") / f"other-{uuid.uuid4().hex[:12]}"
    path.write_bytes(b"\x07" * 4096)
    yield path
    path.unlink()


@pytest.mark.thorough
def test_another_program_s_memory_is_not_written_by_a_page(
    start: Callable[..., Server], memory: Path
) -> None:
    """A page registers what another program of this user has in /dev/shm, and asks for vectors to be
    written there."""
    server = start("--allow-client-shm")
    page = ("Content-Type: text/plain", "Origin: http://evil.example", "Sec-Fetch-Site: cross-site")
    register = json.dumps({"key": memory.name, "offset": 0, "byte_size": 4096}).encode()
    path = "/v2/systemsharedmemory/region/r/register"
    for lines in (page, page[:2], page[::2]):
        status, said = ask(server, "POST", path, register, *lines)
        assert status == 403 and b"another site" in said
    assert ask(server, "POST", path, register, page[0])[0] == 415
    assert ask(server, "GET", "/v2/systemsharedmemory/status", b"") == (200, b"[]")
    assert ask(server, "POST", path, register)[0] == 200
    output = {"name": "user", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4096}}
    entry = {"name": "user", "datatype": "INT64", "shape": [1, 1], "data": [1]}
    infer = json.dumps({"inputs": [entry], "outputs": [output]}).encode()
    before = memory.read_bytes()
    assert ask(server, "POST", "/v2/models/demo/infer", infer, *page)[0] == 403
    assert memory.read_bytes() == before
    assert ask(server, "POST", "/v2/models/demo/infer", infer)[0] == 200
    assert memory.read_bytes() != before


@pytest.mark.thorough
def test_a_name_that_points_here_reads_nothing(start: Callable[..., Server]) -> None:
    """By DNS rebinding: the page's own name is its Host."""
    infer = json.dumps(
        {"inputs": [{"name": "user", "datatype": "INT64", "shape": [1, 1], "data": [1]}]}
    ).encode()
    server = start()
    for method, path, body in (
        ("POST", "/v2/models/demo/infer", infer),
        ("GET", "/v1/models", b""),
        ("GET", "/", b""),
    ):
        assert ask(server, method, path, body, host=f"evil.example:{server.port}")[0] == 403
        assert ask(server, method, path, body)[0] == 200
    named = start("--allowed-hosts", "evil.example")
    assert ask(named, "POST", "/v2/models/demo/infer", infer, host="evil.example")[0] == 200
