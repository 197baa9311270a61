"""The watch over versions, and the scrubber: what becomes of files that lie, and of rows that change after
they were attached."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from servers import publish_demo
from support import until

from tableside.loader.segment.header import PRELUDE, checksum
from tableside.loader.versions.versions import Model
from tableside.serving.client import Client, ClientError

pytestmark = pytest.mark.quick

Start = Callable[..., Any]


def publish_constant(root: Path, folder: Path, value: float) -> None:
    """A version whose rows all hold `value`, and whose clients can so tell which one answers."""
    publish_demo(root, folder, {"user": np.full((1000, 64), value, np.float32)})


def answer(url: str) -> float:
    with Client(url) as client:
        return float(client.lookup("demo", {"user": [[1]]})["user"][0, 0])


def rewritten(path: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A copy of a segment whose header says something else, with the right checksum."""
    data = path.read_bytes()
    magic, version, size, total, _ = PRELUDE.unpack(data[:64])
    header = json.loads(data[64 : 64 + size])
    sums = data[64 + size : 64 + size + 8 * sum(-(-t["rows"] // t["chunk_rows"]) for t in header["tables"])]
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)[:size]
    target.write_bytes(
        PRELUDE.pack(magic, version, size, total, checksum(text + sums)) + text + data[64 + size :]
    )
    target.chmod(0o400)


def flip(root: Path, version: int) -> None:
    record = {"current": version, "latest": version}
    new = root / "demo" / "flip"
    new.write_text(json.dumps(record))
    new.rename(root / "demo" / "current")


LIES = {
    "row format": lambda h: h["tables"][0].update(row_format="int9"),
    "row bytes": lambda h: h["tables"][0].update(row_bytes=16),
    "rows": lambda h: h["tables"][0].update(rows="many"),
    "no table": lambda h: h["features"][0].update(table="none"),
    "pooling": lambda h: h["features"][0].update(pooling="max"),
    "feature": lambda h: h["features"][0].update(name=7),
    "model": lambda h: h.update(model="other"),
    "number": lambda h: h.update(version=1),
    "load": lambda h: h.update(load=[]),
    "list": lambda h: h.update(tables=[1]),
}


@pytest.mark.thorough
def test_lying_versions_are_refused_once_and_the_next_good_one_is_taken(
    start: Start, root: Path, tmp_path: Path
) -> None:
    """Each lie has a right checksum. The server answers from what it has, tries none twice, and the watch
    goes on."""
    publish_constant(root, tmp_path, 1.0)
    server = start("--workers", 1)
    for number, (lie, change) in enumerate(LIES.items(), 2):
        rewritten(Model(root, "demo").path(1), root / "demo" / f"{number}.segment", change)
        flip(root, number)
        refused = f'tableside_errors_total{{kind="swap",model="demo"}} {number - 1}.0'
        until(
            lambda refused=refused: refused in server.get("/metrics").text,
            what=f"the lie about {lie} to be refused",
        )
        assert answer(server.url) == 1.0
    for _ in range(6):  # looks of the watch
        server.get("/health")
    assert f'tableside_errors_total{{kind="swap",model="demo"}} {len(LIES)}.0' in server.get("/metrics").text
    publish_constant(root, tmp_path, 2.0)
    until(lambda: answer(server.url) == 2.0, what="the good version")


def damage(root: Path, version: int) -> None:
    """Changes a byte of a row where it lies, under all who have it mapped."""
    path = Model(root, "demo").path(version)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(8192 + 33)
        byte = file.read(1)[0]
        file.seek(8192 + 33)
        file.write(bytes([byte ^ 0x40]))
    path.chmod(0o400)


@pytest.mark.thorough
def test_damage_after_attach_is_found_and_the_last_good_version_served(
    start: Start, root: Path, tmp_path: Path
) -> None:
    """One worker finds it; both go back; one that is started later does as well; a new version is taken as
    ever."""
    publish_constant(root, tmp_path, 1.0)
    publish_constant(root, tmp_path, 2.0)
    server = start("--workers", 2, "--scrub-hours", 0.0003)
    until(
        lambda: 'tableside_scrubs_total{model="demo",outcome="whole"}' in server.get("/metrics").text,
        what="a scrub",
    )
    assert answer(server.url) == 2.0
    damage(root, 2)
    until(
        lambda: all(answer(server.url) == 1.0 for _ in range(20)),
        what="both workers to serve the last good version",
    )
    text = server.get("/metrics").text
    assert 'tableside_scrubs_total{model="demo",outcome="damaged"} 1.0' in text
    assert 'tableside_errors_total{kind="damaged",model="demo"} 1.0' in text
    assert Model(root, "demo").damaged_versions() == [2]
    before = server.workers()
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len(server.workers()) == 2 and before[0] not in server.workers(), what="a replacement")
    assert all(answer(server.url) == 1.0 for _ in range(20))
    publish_constant(root, tmp_path, 3.0)
    until(lambda: all(answer(server.url) == 3.0 for _ in range(20)), what="the new version")


@pytest.mark.thorough
def test_damage_without_another_version(start: Start, root: Path, tmp_path: Path) -> None:
    """Damaged rows are not served: 503 and not ready, until another version is loaded. Metrics go on."""
    publish_constant(root, tmp_path, 1.0)
    server = start("--workers", 1, "--scrub-hours", 0.0003, "--verify", "header")
    assert answer(server.url) == 1.0
    damage(root, 1)
    until(lambda: server.get("/v2/health/ready").status_code == 503, what="the server to be not ready")
    with pytest.raises(
        ClientError,
        match="503: rows of demo were found damaged, and there is no other version; load it again",
    ):
        answer(server.url)
    for path in ("/metrics", "/v1/models", "/v2/models/stats"):
        assert server.get(path).status_code == 200
    assert server.get("/health").json() == {"status": "draining", "models": {"demo": 1}}
    publish_constant(root, tmp_path, 2.0)
    until(lambda: server.get("/v2/health/ready").status_code == 200, what="the server to be ready")
    assert answer(server.url) == 2.0


@pytest.mark.drawn(0.5)
def test_not_found_names_no_path(start: Start, root: Path, tmp_path: Path) -> None:
    """What a client learns of versions is their numbers; long names come back cut."""
    publish_constant(root, tmp_path, 1.0)
    server = start("--workers", 1)
    shutil.copy(root / "demo" / "1.segment", root / "demo" / "7.segment")  # which says it is version 1
    asked = {
        "/v2/models/demo/versions/9": "version 9 of model 'demo' is not published; versions there: 1, 7",
        "/v2/models/demo/versions/7": "version 7 of model 'demo' cannot be served; the server's log has "
        "the reason",
        f"/v2/models/{'x' * 5000}": "is not served here",
        f"/v2/{'y' * 5000}": "is not a path of this server",
        f"/{'z' * 5000}": "Not Found",
    }
    for path, expected in asked.items():
        found = httpx.get(server.url + path)
        assert found.status_code == 404
        assert expected in found.json()["error"]
        assert str(root) not in found.text and len(found.text) < 300
    long = {"model": "demo", "features": {"f" * 5000: [[1]]}}
    assert len(httpx.post(server.url + "/v1/lookup", json=long).text) < 300
    inputs = [{"name": "n" * 5000, "datatype": "INT64", "shape": [1, 1], "data": [1]}]
    assert len(httpx.post(server.url + "/v2/models/demo/infer", json={"inputs": inputs}).text) < 300
