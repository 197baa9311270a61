"""Who may read rows in Redis: passwords, users, TLS."""

from pathlib import Path

import pytest
from hosts import served
from redis_models import LATE, load_both, look_up, node_of, right, spec_of, taken_by, tier
from redis_servers import RedisServer, free_port, needs_redis, redis_server
from tls import Proxy, make_certificate, needs_openssl, server_context

from tableside.loader.errors import RedisError
from tableside.loader.load.load import load
from tableside.loader.model.tiers import PASSWORD, USERNAME
from tableside.loader.redis.servers import close_servers
from tableside.loader.versions.versions import Model

pytestmark = needs_redis


@pytest.mark.drawn(0.25)
def test_a_password_comes_from_the_environment(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And is in no file, and no line of the log."""
    with redis_server(tmp_path, False, port=free_port(), password="a secret word") as server:
        with pytest.raises(RedisError, match="Authentication required"):
            load(spec_of(tmp_path, tier(server)), roots[0])
        monkeypatch.setenv(PASSWORD, "a wrong one")
        with pytest.raises(RedisError, match="invalid username-password pair") as refused:
            load(spec_of(tmp_path, tier(server)), roots[0])
        monkeypatch.setenv(PASSWORD, server.password)
        load_both(tmp_path, roots[0], tier(server))
        assert look_up(served(roots[0], "ads")) == right(roots[0])
        written = [file.read_bytes() for file in (roots[0] / "ads").iterdir()]
        assert not any(server.password.encode() in data for data in written)
        assert "a wrong one" not in str(refused.value)
        node_of(server).close()
        monkeypatch.setenv(PASSWORD, "a wrong one")
        version, taken = served(roots[0], "ads", 0.2), taken_by(monkeypatch)
        assert look_up(version)[1] == LATE
        assert len(taken) <= 1, "a server may lock who says a wrong password often"
        assert "invalid username-password pair" in caplog.text and "a wrong one" not in caplog.text


def test_a_user_needs_few_commands(
    roots: list[Path], tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that docs/redis.md names, for keys of this product alone; a server needs no right to write."""
    redis.end()
    redis.keeps = True
    redis.start()
    rights = {"loads": "+set +getrange +unlink +cluster|slots", "serves": "+getrange +cluster|slots"}
    for user, commands in rights.items():
        redis.client().execute_command(
            "ACL", "SETUSER", user, "on", ">word", "~tableside:*", *commands.split()
        )
    redis.client().execute_command("ACL", "SETUSER", "default", "off")
    monkeypatch.setenv(PASSWORD, "word")
    monkeypatch.setenv(USERNAME, "loads")
    load_both(tmp_path, roots[0], tier(redis))
    monkeypatch.setenv(USERNAME, "serves")
    assert look_up(served(roots[0], "ads")) == right(roots[0])
    with pytest.raises(RedisError, match="expected a server that this user may write to"):
        load(spec_of(tmp_path, tier(redis)), roots[0])
    assert Model(roots[0], "ads").versions() == [1]


@pytest.mark.drawn(0.25)
@needs_openssl
def test_rows_come_over_tls(
    roots: list[Path], tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a server whose certificate is trusted, and from no other one."""
    certificate = make_certificate(tmp_path)
    proxy = Proxy(redis.port, server_context(certificate))
    try:
        place = proxy.url.removeprefix("https://")
        with pytest.raises(RedisError, match="certificate"):
            load(spec_of(tmp_path, f"rediss://{place}"), roots[0])
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        load_both(tmp_path, roots[0], f"rediss://{place}")
        assert look_up(served(roots[0], "ads")) == right(roots[0])
    finally:
        close_servers()
        proxy.close()
