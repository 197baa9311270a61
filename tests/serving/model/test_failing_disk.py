"""A server over a disk that hangs, refuses to read, or gives other bytes: a real file system that does so."""

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tables
from fuse_disk import Disk, can_mount, disk_of
from keyed_tables import ids_of
from servers import Server, start_server
from support import end, flip_bit, until

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.client import Client, ClientError

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not can_mount(), reason="file systems are mounted by root, with /dev/fuse"),
]
ROWS, DIM = 120_000, 32
IDS = ids_of(ROWS, 6)
SEEN, UNSEEN = IDS[: ROWS // 3], IDS[ROWS // 3 :]
WAIT_S = 0.4


class Served(NamedTuple):
    server: Server
    model: Model
    disk: Disk


@pytest.fixture
def served(disk: Path, tmp_path: Path) -> Iterator[Served]:
    """A model of a table with a file on the disk that fails, and one in memory."""
    with serving(disk, tmp_path, {"ids": "raw", "id_key": "i", "missing": "zero"}) as served:
        yield served


@contextmanager
def serving(disk: Path, tmp_path: Path, ids: dict[str, str], *options: object) -> Iterator[Served]:
    values = np.random.default_rng(3).standard_normal((ROWS, DIM)).astype(np.float32)
    np.savez(tmp_path / "c.npz", v=values, i=IDS, small=values[:10])
    raw = {
        "name": "m",
        "checkpoint": "c.npz",
        "tables": {"big": {"key": "v", "row_format": "int8", **ids}, "small": {"key": "small"}},
        "features": {t: {"table": t, "pooling": "none"} for t in ("big", "small")},
    }
    load(parse_model(raw, tmp_path), disk)
    model = Model(disk, "m")
    file = tmp_path / "copy"
    file.write_bytes((model.folder / "1.1.rows").read_bytes())
    with disk_of(file, tmp_path / "mounted") as failing:
        failing.stand_for(model.folder / "1.1.rows")
        server = start_server(disk, "--disk-timeout-s", WAIT_S, *options, models=("m",))
        try:
            yield Served(server, model, failing)
        finally:
            end(server.process)


def look_up(client: Client, ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Vectors, and how many of them are the default row of a late one."""
    found = client.lookup("m", {"big": [ids.tolist()]})["big"].reshape(-1, DIM)
    return found, client.late_rows().get("big", 0)


def expected(model: Model, ids: np.ndarray) -> np.ndarray:
    """By another process than the server."""
    return choose().lookup(model.attach(verify="header").tables["big"], ids, pooling=Pooling.NONE)


def counted(server: Server, source: str) -> float:
    found = re.search(f'disk_rows_total.*source="{source}".* (.+)', server.get("/metrics").text)
    return float(found[1]) if found else 0.0


def spread(ids: np.ndarray, part: int) -> np.ndarray:
    """Ids whose rows lie in many blocks, others for each part."""
    return ids[part::97][:200].copy()


def test_a_disk_that_hangs(served: Served) -> None:
    """Every request is answered, however many ask; what is in memory is right, what is not is late and said
    to be. Once the disk goes on rows are right again, and a server over one that hangs ends when told to."""
    server, model, failing = served
    with Client(server.url, retries=0) as client:
        for part in range(5):
            vectors, late = look_up(client, spread(SEEN, part))
            assert not late and vectors.any(1).all()
        failing.hang()

        def ask(part: int) -> None:
            with Client(server.url, retries=0) as one:
                vectors, late = look_up(one, spread(UNSEEN, part))
                assert late == np.count_nonzero(~vectors.any(1)) > 0

        with ThreadPoolExecutor(24) as threads:
            list(threads.map(ask, range(96)))
        assert client.lookup("m", {"small": [[3]]})["small"].any()
        vectors, late = look_up(client, spread(SEEN, 0))
        assert not late and vectors.any(1).all()
        assert counted(server, "late") > 0
        failing.go_on()
        until(lambda: look_up(client, spread(UNSEEN, 96))[1] == 0, what="rows to come again")
        ids = np.concatenate([spread(UNSEEN, 3), spread(SEEN, 1)])
        np.testing.assert_array_equal(look_up(client, ids)[0], expected(model, ids))
    failing.hang()
    with Client(server.url, retries=0) as client:
        look_up(client, UNSEEN[-40_000::331])
    assert end(server.process) in (0, -signal.SIGKILL)


@pytest.mark.gpu
def test_a_disk_that_hangs_under_a_cache_on_a_device(disk: Path, tmp_path: Path) -> None:
    """What the cache has is answered, in batches without other rows; who asks for those is refused."""
    on_device = ("--devices", tables.serve_device(), "--gpu-from-ids", 0)
    options = (*on_device, "--placement", "cached", "--hbm-budget", "1MiB")
    with serving(disk, tmp_path, {}, *options) as served, Client(served.server.url, retries=0) as client:
        cached, rows = spread(np.arange(ROWS // 3), 1), np.arange(ROWS // 3, ROWS)
        right = expected(served.model, cached)
        np.testing.assert_array_equal(look_up(client, cached)[0], right)
        served.disk.hang()

        def ask(part: int) -> None:
            message = "of 200 rows to fetch 200 came too late and 0 were damaged"
            with Client(served.server.url, retries=0) as one, pytest.raises(ClientError, match=message) as e:
                look_up(one, spread(rows, part))
            assert e.value.status == 503

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(24)))
        np.testing.assert_array_equal(look_up(client, cached)[0], right)
        served.disk.go_on()

        def comes() -> bool:
            try:
                return bool(look_up(client, rows[:200])[0].any())
            except ClientError:
                return False

        until(comes, what="rows to come again")
        found = look_up(client, np.concatenate([rows[200:400], cached]))[0]
        np.testing.assert_array_equal(found, expected(served.model, np.concatenate([rows[200:400], cached])))


def test_a_disk_that_refuses_to_read(served: Served) -> None:
    """Its rows are late and not damaged, and a counter says why."""
    server, model, failing = served
    with Client(server.url, retries=0) as client:
        failing.refuse(True)
        vectors, late = look_up(client, spread(UNSEEN, 0))
        assert late == np.count_nonzero(~vectors.any(1)) > 0
        until(lambda: look_up(client, spread(UNSEEN, 1))[1] > 0 and counted(server, "failed") > 0)
        failing.refuse(False)
        until(lambda: look_up(client, spread(UNSEEN, 2))[1] == 0, what="rows to come again")
        np.testing.assert_array_equal(look_up(client, UNSEEN[:500])[0], expected(model, UNSEEN[:500]))
    assert not model.damaged_versions()


@pytest.mark.parametrize("placement", [None, "stored", "cached"])
def test_damage_that_a_request_finds_marks_the_version(
    disk: Path, tmp_path: Path, placement: str | None
) -> None:
    """Also where nothing is scrubbed for hours, and by an engine process."""
    device: tuple[object, ...] = ()
    if placement is not None:
        pytest.importorskip("triton")
        device = ("--devices", tables.serve_device(), "--placement", placement, "--gpu-from-ids", 0)
        device += ("--hbm-budget", "1MiB") if placement == "cached" else ()
    with serving(disk, tmp_path, {}, *device) as served:
        _find_damage(served, tmp_path)


def _find_damage(served: Served, tmp_path: Path) -> None:
    server, model, _ = served
    header = model.attach(verify="header").header
    table, file = header.tables[0], header.files[0]
    flip_bit(tmp_path / "copy", table.offset - file.offset + table.bytes // 2)
    with Client(server.url, retries=0) as client, pytest.raises(ClientError, match="were damaged") as error:
        for part in range(97):
            look_up(client, np.arange(ROWS)[part::97])
    assert error.value.status == 503
    until(lambda: model.damaged_versions() == [1], what="the version to be marked")
    assert 'tableside_errors_total{kind="damaged",model="m"} 1.0' in server.get("/metrics").text
