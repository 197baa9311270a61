"""A server over a root on a disk: rows are read as requests ask for them, beside requests that need none."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
from disk_models import DIM, ROWS, SMALL, VALUES, load_floats
from keyed_tables import ids_of
from servers import Server, start_server
from support import end, flip_bit, run_tableside, until

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.hot.hot import hot_path
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.client import Client, ClientError
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.settings import ServerSettings

IDS = ids_of(ROWS, 6)


ON_DEVICE = ("--devices", tables.serve_device(), "--gpu-from-ids", 0)
OPTIONS = {
    "cpu": (),
    "engine": (*ON_DEVICE, "--placement", "stored"),
    "beside": (*ON_DEVICE, "--hbm-budget", "512KiB"),  # which holds small tables
    "cached": (*ON_DEVICE, "--placement", "cached", "--hbm-budget", "1MiB"),  # beside their maps
}
HOW = ["cpu", pytest.param("cached", marks=pytest.mark.gpu)]


@pytest.fixture
def model(disk: Path, tmp_path: Path) -> Model:
    """A table of 2.5 MB, which has a file on the disk, and a small one."""
    load_floats(disk, tmp_path, VALUES)
    return Model(disk, "m")


@pytest.fixture
def serve(model: Model) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def run(*options: object) -> Server:
        started.append(start_server(model.root, *options, models=("m",)))
        return started[-1]

    yield run
    for server in started:
        end(server.process)


def test_readers_know_how_long_the_server_waits(model: Model) -> None:
    """Who waits for far less does not say that the disk hangs."""
    settings = ServerSettings(disk_timeout_s=0.25)
    engine = Engine(model, settings, Placer(settings, choose()))
    engine.begin()
    assert {r.timeout_s for r in engine.served().segment.base.readers.values()} == {0.25}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("said", "expected"), [(0.1, 0.1), (0.5, 0.25)])
def test_a_model_may_say_that_requests_wait_for_less(
    model: Model, tmp_path: Path, said: float, expected: float
) -> None:
    """If the server waits for longer. It stays with what is compacted from the version."""
    load_floats(model.root, tmp_path, VALUES, disk_timeout_s=said)
    settings = ServerSettings(disk_timeout_s=0.25)
    engine = Engine(model, settings, Placer(settings, choose()))
    engine.begin()
    header = engine.served().header
    assert header.disk_timeout_s == said and header.format_version == 9
    changes = [TableChanges("big", np.array([7]), np.full((1, DIM), 2.0, np.float32))]
    apply(model, ChangeBatch(changes), ApplySettings(keep=Retention(2)))
    assert run_tableside("compact", "m", root=model.root).returncode == 0
    assert model.attach(verify="header").header.disk_timeout_s == said
    assert {r.timeout_s for r in engine.served().segment.base.readers.values()} == {expected}


@pytest.mark.gpu
def test_a_budget_is_given_to_one_model(model: Model) -> None:
    """Of two that are attached at the same time, and that it would hold alone: the other one's rows stay on
    their disk."""
    settings = ServerSettings(devices=(tables.serve_device(),), hbm_budget=4 << 20)
    placer, segments = Placer(settings, choose()), [model.attach(), model.attach()]
    placer.open()
    kinds = [placer.kinds(segment) for segment in segments]
    assert kinds[0] == kinds[1] == {"big": "hbm", "small": "hbm"}
    placed = [placer.place(segment) for segment in segments]
    assert [one.placements["big"] for one in placed] == ["hbm", "stored"]
    stays = placer.place(model.attach(), stay=["small"])
    assert stays.placements["small"] == "stored"


def rows_of(client: Client, ids: Any) -> np.ndarray:
    found: np.ndarray = client.lookup("m", {"big": [list(map(int, ids))]})["big"]
    return found.reshape(-1, DIM)


def placements(server: Server) -> list[str]:
    return [t["placement"] for t in server.get("/v1/models").json()["models"][0]["tables"]]


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize(
    ("how", "of_big", "of_small"),
    [
        ("cpu", "stored", "host"),
        pytest.param("engine", "stored", "stored", marks=pytest.mark.gpu),
        pytest.param("beside", "stored", "hbm", marks=pytest.mark.gpu),
        pytest.param("cached", "cached_stored", "cached", marks=pytest.mark.gpu),
    ],
)
def test_rows_are_served_from_a_disk(
    serve: Callable[..., Server], model: Model, how: str, of_big: str, of_small: str
) -> None:
    """Those of a table with a file, changed ones, and those that are in memory beside them; and after another
    start, without a load."""
    options = OPTIONS[how]
    server = serve(*options)
    assert placements(server) == [of_big, of_small]
    ids = np.random.default_rng(5).integers(0, ROWS, 500)
    with Client(server.url, retries=0) as client:
        np.testing.assert_array_equal(rows_of(client, ids), VALUES[ids])
        both = client.lookup("m", {"small": [[3]], "big": [[7]]})
        np.testing.assert_array_equal(both["small"].reshape(-1), SMALL[3])
        np.testing.assert_array_equal(both["big"].reshape(-1), VALUES[7])
        with pytest.raises(ClientError, match=f"id {ROWS} at position 1 is outside the table's rows"):
            rows_of(client, [1, ROWS])
        changes = [TableChanges("big", np.array([7]), np.full((1, DIM), 2.0, np.float32))]
        apply(model, ChangeBatch(changes), ApplySettings(keep=Retention(2)))
        until(lambda: (rows_of(client, [7]) == 2.0).all())
        np.testing.assert_array_equal(rows_of(client, [6, 8]), VALUES[[6, 8]])
    end(server.process)
    with Client(serve(*options).url, retries=0) as client:
        np.testing.assert_array_equal(rows_of(client, [6, 8]), VALUES[[6, 8]])
        assert (rows_of(client, [7]) == 2.0).all()


@pytest.fixture
def raw_model(disk: Path, tmp_path: Path) -> Model:
    """Two tables of raw ids in int8, whose rows have room for the ids; one refuses those that are missing."""
    np.savez(tmp_path / "c.npz", v=VALUES, i=IDS)
    table = {"key": "v", "ids": "raw", "id_key": "i", "row_format": "int8"}
    raw = {
        "name": "m",
        "checkpoint": "c.npz",
        "tables": {"big": {**table, "missing": "zero"}, "strict": {**table, "missing": "error"}},
        "features": {t: {"table": t, "pooling": "none"} for t in ("big", "strict")},
    }
    load(parse_model(raw, tmp_path), disk)
    return Model(disk, "m")


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("how", ["cpu", pytest.param("beside", marks=pytest.mark.gpu)])
def test_raw_ids_are_found_in_rows_on_a_disk(raw_model: Model, disk: Path, how: str) -> None:
    """Also those that are missing, that come, and that go; and the first wrong one is named."""
    server = start_server(disk, *OPTIONS[how], models=("m",))
    try:
        assert placements(server) == ["stored"] * 2
        table = raw_model.attach().tables["big"]
        at = np.random.default_rng(5).integers(0, ROWS, 500)
        expected = choose().lookup(table, IDS[at], pooling=Pooling.NONE)
        assert np.abs(expected - VALUES[at]).max() < 0.05
        with Client(server.url, retries=0) as client:
            np.testing.assert_array_equal(rows_of(client, IDS[at]), expected)
            asked = np.insert(IDS[at], [0, 100, 500], IDS.min() + np.array([1, 2, 3]))
            vectors, found = client.lookup("m", {"big": [asked.tolist()]}, found=True)
            there = np.isin(asked, IDS)
            np.testing.assert_array_equal(found["big"], there)
            np.testing.assert_array_equal(vectors["big"].reshape(-1, DIM)[there], expected)
            assert not vectors["big"].reshape(-1, DIM)[~there].any()
            with pytest.raises(ClientError, match=f"feature 'strict': id {asked[0]} at position 0"):
                client.lookup("m", {"big": [IDS[:3].tolist()], "strict": [asked.tolist()]})
            ids, deleted = np.array([IDS[7], asked[0], IDS[8]]), np.array([False, False, True])
            changes = TableChanges("big", ids, np.full((3, DIM), 2.0, np.float32), deleted)
            apply(raw_model, ChangeBatch([changes]), ApplySettings(keep=Retention(2)))
            until(lambda: (rows_of(client, [IDS[7], asked[0]]) == 2.0).all())
            assert not rows_of(client, [IDS[8]]).any()
            np.testing.assert_array_equal(rows_of(client, IDS[at[at > 8]]), expected[at > 8])
        assert (
            'tableside_ids_without_row_total{model="m",reason="missing",table="big"}'
            in server.get("/metrics").text
        )
    finally:
        end(server.process)


@pytest.mark.thorough
@pytest.mark.parametrize("how", HOW)
def test_a_damaged_block_is_an_error_and_no_row(
    serve: Callable[..., Server], model: Model, tmp_path: Path, how: str
) -> None:
    """Of requests that ask for its rows, until the version before is served; others are answered all the
    time. `verify` names its chunk."""
    load_floats(model.root, tmp_path, np.concatenate([VALUES[:1] + 1, VALUES[1:]]))  # so not the same file
    server = serve("--scrub-hours", 0, *OPTIONS[how])
    table = model.attach().header.tables[0]
    file = model.attach().header.files[0]
    flip_bit(model.folder / "2.1.rows", table.offset - file.offset + 100 * table.row_bytes + 5)
    found = run_tableside("verify", "m", root=model.root)
    assert found.returncode == 1 and "table 'big', rows [0, 8192)" in found.stdout
    asked, others = [100, 5000], [5000, 9000]
    with Client(server.url, retries=0) as client:
        with pytest.raises(ClientError, match="of 2 rows to fetch 0 came too late and 1 were damaged") as e:
            rows_of(client, asked)
        assert e.value.status == 503

        def is_answered() -> bool:
            np.testing.assert_array_equal(rows_of(client, others), VALUES[others])
            try:
                np.testing.assert_array_equal(rows_of(client, asked), VALUES[asked])
            except ClientError as error:
                assert error.status == 503 and "1 were damaged" in str(error)
                return False
            return True

        until(is_answered, what="the version before")
        assert model.damaged_versions() == [2]
        metrics = server.get("/metrics").text
        assert re.search(r'tableside_errors_total\{kind="not_read",model="m"\} [1-9]', metrics)


@pytest.mark.thorough
def test_it_is_counted_where_rows_come_from(serve: Callable[..., Server]) -> None:
    """Each row of a request once; those that are read in place, once for each id."""
    server = serve("--scrub-hours", 0)

    def counted() -> dict[str, float]:
        found = re.findall(
            'tableside_disk_rows_total.*source="([a-z_]+)".* (.+)', server.get("/metrics").text
        )
        return {source: float(rows) for source, rows in found}

    with Client(server.url, retries=0) as client:
        before = counted()
        rows_of(client, [5, 5, 7, 15_000])
        after = counted()
        assert sum(after.values()) - sum(before.values()) in (3, 4)
        for _ in range(50):
            rows_of(client, range(ROWS))
        assert counted()["in_place"] >= ROWS and "late" not in counted()


@pytest.mark.thorough
def test_a_damaged_first_row_stops_no_start(serve: Callable[..., Server], model: Model) -> None:
    """The other rows are served; the log names the table."""
    table, file = model.attach().header.tables[0], model.attach().header.files[0]
    flip_bit(model.folder / "1.1.rows", table.offset - file.offset + 5)
    with Client(serve("--scrub-hours", 0).url, retries=0) as client:
        np.testing.assert_array_equal(rows_of(client, [5000, 9000]), VALUES[[5000, 9000]])
        with pytest.raises(ClientError, match="1 were damaged"):
            rows_of(client, [0])


@pytest.mark.thorough
@pytest.mark.parametrize("how", HOW)
def test_a_file_that_is_cut_ends_no_server(serve: Callable[..., Server], model: Model, how: str) -> None:
    """All that asks for its rows gets an error, as the checksums lay at the end."""
    server = serve("--scrub-hours", 0, *OPTIONS[how])
    path = model.folder / "1.1.rows"
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(4096 + 10_000 * 4 * DIM)
    with Client(server.url, retries=0) as client:
        with pytest.raises(ClientError, match="of 1 rows to fetch 0 came too late and 1 were damaged"):
            rows_of(client, [15_000])
        assert client.lookup("m", {"small": [[3]]})["small"].tobytes() == SMALL[3].tobytes()
    assert server.process.poll() is None and len(server.workers()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("how", HOW)
def test_answers_are_right_beside_updates_and_swaps(
    serve: Callable[..., Server], model: Model, how: str
) -> None:
    """While rows change and a version is compacted, each row is one that it had."""
    # On a busy machine batches of the interpreter take their time
    server, stop, wrong = serve(*OPTIONS[how]), threading.Event(), list[str]()
    allowed = {7: {float(VALUES[7, 0]), *map(float, range(1, 6))}}

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with Client(server.url, retries=2) as client:
            while not stop.is_set():
                ids = np.append(rng.integers(8, ROWS, 50), 7)
                found = rows_of(client, ids)
                if not (found[:-1] == VALUES[ids[:-1]]).all() or float(found[-1, 0]) not in allowed[7]:
                    wrong.append(f"{ids}: {found[:, 0]}")

    asking = [threading.Thread(target=ask, args=(n,)) for n in range(2)]
    for one in asking:
        one.start()
    try:
        for value in range(1, 6):
            changes = [TableChanges("big", np.array([7]), np.full((1, DIM), value, np.float32))]
            apply(model, ChangeBatch(changes), ApplySettings(keep=Retention(2)))
        assert run_tableside("compact", "m", root=model.root).returncode == 0
        with Client(server.url) as client:
            until(lambda: (rows_of(client, [7]) == 5.0).all())
    finally:
        stop.set()
        for one in asking:
            one.join()
    assert not wrong


@pytest.mark.thorough
def test_a_moved_root_is_served(serve: Callable[..., Server], model: Model, root: Path) -> None:
    """From memory: rows are read where they lie."""
    shutil.copytree(model.root, root)
    server = start_server(root, "--placement", "host", models=("m",))
    with Client(server.url, retries=0) as client:
        np.testing.assert_array_equal(rows_of(client, [6, 8]), VALUES[[6, 8]])
    assert placements(server) == ["host", "host"]
    assert end(server.process) == 0


def hot_ids(server: Server) -> dict[str, float]:
    """The sampled ids of table big, by whether the hot segment has their rows."""
    found = re.findall(
        r'tableside_hot_ids_total\{hot="(\w+)",model="m",table="big"\} (\S+)', server.get("/metrics").text
    )
    return {answer: float(count) for answer, count in found}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["cpu", pytest.param("beside", marks=pytest.mark.gpu)])
def test_rows_that_are_asked_for_most_come_to_memory_and_go_with_their_version(
    serve: Callable[..., Server], model: Model, tmp_path: Path, how: str
) -> None:
    hot_settings = ("--host-cache", "64KiB", "--host-cache-s", 0.1, "--scrub-hours", 0.0001)
    server = serve("--workers", 2, *hot_settings, *OPTIONS[how])
    ids = np.random.default_rng(5).permutation(ROWS)[:300]
    others = np.random.default_rng(6)

    def ask() -> None:
        for _ in range(20):
            np.testing.assert_array_equal(rows_of(client, ids), VALUES[ids])
            cold = others.integers(0, ROWS, 50)
            np.testing.assert_array_equal(rows_of(client, cold), VALUES[cold])

    with Client(server.url, retries=0) as client:

        def share() -> float:
            before = hot_ids(server)
            ask()
            after = hot_ids(server)
            new = {answer: after[answer] - before.get(answer, 0.0) for answer in after}
            return new["yes"] / (new["yes"] + new["no"])

        ask()
        until(lambda: share() > 0.8)  # 300 of each 350
        said = json.loads(run_tableside("inspect", "m", "--json", root=model.root).stdout)["disk"]
        assert said["tables"] == ["big"] and said["bytes"] == VALUES.nbytes and said["hot_rows"] >= 300
        (hot,) = hot_path(model.root, "m").glob("*.delta")
        flip_bit(hot, hot.stat().st_size // 2)
        until(lambda: hot.name not in hot_names(model))  # the scrubber read it
        # Until the worker of this connection sees that it is gone. The damaged row may be any of the table.
        until(lambda: np.array_equal(rows_of(client, np.arange(ROWS)), VALUES))
        ask()
        load_floats(model.root, tmp_path, -VALUES)
        until(lambda: (rows_of(client, ids) == -VALUES[ids]).all())
        until(lambda: any(name.startswith("2+") for name in hot_names(model)))
        model.remove(1)
        until(lambda: not any(name.startswith("1") for name in hot_names(model)))
        np.testing.assert_array_equal(rows_of(client, ids), -VALUES[ids])


def hot_names(model: Model) -> list[str]:
    return [path.name for path in hot_path(model.root, "m").iterdir()]
