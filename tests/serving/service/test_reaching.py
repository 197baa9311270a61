"""Ways to a server: https with an authority and headers, TABLESIDE_URL, a Unix socket; for the client and
for every command."""

import asyncio
import json
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from servers import Server
from support import end, run_tableside
from tls import Proxy, needs_openssl, tls_before

from tableside.serving.client import AsyncClient, Client, ClientError

TOKEN = "Bearer s3cret"


@pytest.fixture(scope="module")
def secured(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, Path]]:
    with tls_before(server.port, tmp_path_factory.mktemp("tls")) as made:
        yield made


@pytest.mark.thorough
@needs_openssl
def test_commands_reach_a_server_behind_tls(secured: tuple[Proxy, Path], tmp_path: Path) -> None:
    """bench, top, list, lookup: certificates are checked against --ca, and headers are in every
    connection's first request."""
    proxy, certificate = secured
    (tmp_path / "headers").write_text("Authorization: Bearer file\n\nX-Team: ads\n")
    reach = ["--url", proxy.url, "--ca", certificate]
    proxy.heads.clear()
    bench = run_tableside(
        "bench", "demo", *reach, "--header", f"Authorization: {TOKEN}", "--seconds", 0.5, "--json"
    )
    assert bench.returncode == 0, bench.stderr
    assert all(form["failed"] == 0 and form["requests"] > 0 for form in json.loads(bench.stdout)["forms"])
    assert len(proxy.heads) > 16 and all(
        f"Authorization: {TOKEN}\r\n".encode() in head for head in proxy.heads
    )
    proxy.heads.clear()
    listed = run_tableside("list", *reach, "--header", f"@{tmp_path / 'headers'}")
    assert listed.returncode == 0 and "demo" in listed.stdout, listed.stderr
    assert b"Authorization: Bearer file\r\nX-Team: ads\r\n" in proxy.heads[0]
    for command in (["top", "--once", "--seconds", 0.1], ["lookup", "demo", "user=1"]):
        found = run_tableside(*command, *reach)
        assert found.returncode == 0, found.stderr
    refused = run_tableside("list", "--url", proxy.url)
    assert refused.returncode == 1 and "CERTIFICATE_VERIFY_FAILED" in refused.stderr


@needs_openssl
@pytest.mark.drawn(0.5)
def test_clients_trust_an_authority_of_their_own(secured: tuple[Proxy, Path]) -> None:
    """Both clients send the headers with every request, and refuse a certificate that `ca` did not sign."""
    proxy, certificate = secured

    async def ask() -> list[str]:
        async with AsyncClient(proxy.url, headers={"Authorization": TOKEN}, ca=certificate) as client:
            return [m["name"] for m in await client.models()]

    proxy.heads.clear()
    with Client(proxy.url, headers={"Authorization": TOKEN}, ca=certificate) as client:
        vectors = client.lookup("demo", {"user": np.zeros((2000, 8), np.int64)})[
            "user"
        ]  # more than one TLS record, both ways
        assert vectors.shape == (2000, 64)
    assert asyncio.run(ask()) == ["demo"]
    assert all(TOKEN.encode() in head for head in proxy.heads) and len(proxy.heads) == 2
    with (
        Client(proxy.url, retries=0) as client,
        pytest.raises(ClientError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.models()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headers": {"X": "a\r\nY: b"}}, "header 'X' cannot be sent"),
        ({"headers": {"a b": "c"}}, "header 'a b' cannot be sent"),
        ({"headers": {"Content-Length": "3"}}, "header 'Content-Length' is the client's own to write"),
        ({"ca": "/nowhere.pem"}, "authorities are for https"),
        ({"base_url": "https://h", "ca": "/nowhere.pem"}, "holds no certificates that can be read"),
        ({"base_url": "http://me:x@h", "headers": {"authorization": "y"}}, "expected one of the two"),
        ({"base_url": "unix:"}, "expected http://HOST:PORT, https://HOST:PORT or unix:PATH"),
    ],
)
def test_what_cannot_be_sent_is_refused_at_once(options: dict[str, object], message: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=message):
            kind(**{"base_url": "http://h", **options})  # type: ignore[arg-type]


@pytest.mark.thorough
def test_the_commands_refuse_headers_without_a_name(tmp_path: Path) -> None:
    """With what a header looks like; a file of headers is named."""
    assert "expected Name: value" in run_tableside("list", "--url", "http://h", "--header", "x").stderr
    (tmp_path / "h").write_text("nothing\n")
    assert (
        f"a line of {tmp_path}/h without a colon" in run_tableside("top", "--header", f"@{tmp_path}/h").stderr
    )
    assert "cannot be read" in run_tableside("top", "--header", f"@{tmp_path}/nosuch").stderr
    bad = run_tableside("top", "--header", "Host: elsewhere")
    assert bad.returncode == 1 and "the client's own to write" in bad.stderr


@pytest.mark.thorough
def test_the_environment_names_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """TABLESIDE_URL is where clients and commands ask when nothing else is named; `list` alone still shows
    shared memory."""
    monkeypatch.setenv("TABLESIDE_URL", server.url)
    with Client() as client:
        assert client.is_ready()
    assert run_tableside("lookup", "demo", "user=1").stdout.startswith("user float32 [1, 64]")
    assert "demo" in run_tableside("list", "--url").stdout
    assert "of shared memory free" in run_tableside("list", root=server.root).stdout
    monkeypatch.setenv("TABLESIDE_URL", "tcp://x")
    assert "expected an address such as" in run_tableside("top").stderr


@pytest.fixture
def path() -> Iterator[Path]:
    """Of a Unix socket; short, as it may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        yield Path(folder) / "s"


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.mark.drawn(0.25)
def test_a_unix_socket_takes_the_place_of_a_port(server: Server, path: Path, start_on: Start) -> None:
    """Client, load generator and curl's way; user and group alone may connect; the path goes when the
    server ends."""
    process = start_on(server.root, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    url = f"unix:{path}"

    async def ask() -> np.ndarray:
        async with AsyncClient(url) as client:
            return np.asarray((await client.lookup("demo", {"user": [[7]]}))["user"])

    with Client(url) as client, Client(server.url) as beside:
        expected = beside.lookup("demo", {"user": [[7]]})["user"]
        np.testing.assert_array_equal(client.lookup("demo", {"user": [[7]]})["user"], expected)
    np.testing.assert_array_equal(asyncio.run(ask()), expected)
    bench = run_tableside("bench", "demo", "--url", url, "--seconds", 0.3, "--json")
    assert bench.returncode == 0 and json.loads(bench.stdout)["forms"][0]["requests"] > 0, bench.stderr
    assert end(process) == 0
    assert not path.exists()


@pytest.mark.thorough
def test_a_socket_that_is_taken_is_refused_and_a_dead_one_replaced(
    server: Server, path: Path, start_on: Start
) -> None:
    """A server that listens there keeps its socket; one that a killed server left, and nobody hears, goes;
    a file stays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        taken = run_tableside("serve", "demo", "--uds", path, root=server.root)
        assert taken.returncode == 1 and f"cannot listen on {path}: Address already in use" in taken.stderr
    process = start_on(server.root, path)  # `other` is closed, its path is still there
    with Client(f"unix:{path}") as client:
        assert client.is_ready()
    assert end(process) == 0
    path.write_text("kept")
    taken = run_tableside("serve", "demo", "--uds", path, root=server.root)
    assert taken.returncode == 1 and path.read_text() == "kept"


@pytest.fixture
def start_on() -> Iterator[Start]:
    """start_on(root, path) -> a server of the demo model on a Unix socket, once it says that it serves."""
    started: list[subprocess.Popen[str]] = []

    def run(root: Path, path: Path) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "tableside",
            "serve",
            "demo",
            "--root",
            str(root),
            "--uds",
            str(path),
            "--drain-s",
            "0",
        ]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
        stdout = started[-1].stdout
        assert stdout is not None and f" on unix:{path} " in stdout.readline()
        return started[-1]

    yield run
    for process in started:
        end(process)
