"""`tableside apply` and `tableside follow`, as processes: what they apply, what they say, and what a kill
leaves behind."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from following import ended, following
from json_keys import documented_keys, keys_of
from raw_loads import vectors_of
from redis_servers import needs_redis, redis_server
from string_tables import hashes, publish_strings
from support import run_tableside

from campaigns.follows import rows_now
from tableside.loader.deltas.apply import position_of
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.string_ids import as_bytes
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model

ROWS, DIM = 200, 4
START = np.zeros((ROWS, DIM), np.float32)


def told(number: int, ids: list[int]) -> list[list[float]]:
    """Vectors that say which file or entry they came with, and whose they are."""
    return [[float(number), float(i), 0.0, -1.0] for i in ids]


def put(folder: Path, number: int, ids: list[int]) -> Path:
    """A file of changes, renamed into a folder."""
    partial = folder / "x.partial"
    rows = zip(ids, told(number, ids), strict=True)
    partial.write_text("".join(json.dumps({"table": "user", "id": i, "vector": v}) + "\n" for i, v in rows))
    return partial.rename(folder / f"{number}.jsonl")


@pytest.fixture
def model(publish: Callable[..., Any], root: Path) -> Model:
    publish({"user": START, "item": START}, formats={"user": "fp32", "item": "fp32"})
    return Model(root, "demo")


def values(model: Model) -> np.ndarray:
    """The rows of the table `user` as they are now, fp32 [rows, dim]; those of ids that are deleted are
    zeros."""
    return rows_now(model, "user")


# ---- apply ----


@pytest.mark.thorough
def test_a_file_is_applied_once_for_its_number(model: Model, tmp_path: Path, root: Path) -> None:
    """Again: nothing happens. A number that is left out: an error that names both."""
    first, second = put(tmp_path, 1, [5, 6]), put(tmp_path, 2, [6, 7])
    found = run_tableside("apply", "demo", first, "--number", 1, root=root)
    assert found.returncode == 0, found.stderr
    assert "demo 1+1: 2 changes" in found.stdout
    again = run_tableside("apply", "demo", first, "--number", 1, root=root)
    assert (again.returncode, again.stdout) == (
        0,
        "number 1 was applied before, as the last one is 1; nothing was done\n",
    )
    gap = run_tableside("apply", "demo", second, "--number", 3, root=root)
    assert gap.returncode == 1
    assert "--number 3 from 'apply': number 1 was applied last, so expected 2" in gap.stderr
    found = run_tableside("apply", "demo", second, "--number", 2, "--json", root=root)
    said = json.loads(found.stdout)
    assert keys_of(said) == documented_keys("apply") - {"last_number"}
    assert (said["sequence"], said["tables"]) == (2, [{"name": "user", "rows": 2, "deleted": 0}])
    again = json.loads(run_tableside("apply", "demo", first, "--number", 1, "--json", root=root).stdout)
    assert again == {"model": "demo", "applied": False, "number": 1, "last_number": 2} and set(
        again
    ) <= documented_keys("apply")
    expected = START.copy()
    expected[[5, 6, 7]] = told(1, [5]) + told(2, [6, 7])
    np.testing.assert_array_equal(values(model), expected)


@pytest.mark.thorough
def test_where_a_count_begins(model: Model, tmp_path: Path, root: Path) -> None:
    """With 1, or with the number that is said to be the first; each source for itself."""
    file = put(tmp_path, 7, [1])
    found = run_tableside("apply", "demo", file, "--number", 7, root=root)
    assert found.returncode == 1
    assert (
        "nothing was applied yet, so expected 1; apply what lies between first, or give --first"
        in found.stderr
    )
    assert run_tableside("apply", "demo", file, "--number", 7, "--first", root=root).returncode == 0
    assert run_tableside("apply", "demo", file, "--number", 9, "--first", root=root).returncode == 1
    assert run_tableside("apply", "demo", file, "--number", 1, "--source", "other", root=root).returncode == 0
    assert (position_of(model, "apply"), position_of(model, "other")) == ("7", "1")


@pytest.mark.drawn(0.5)
def test_a_bad_file_changes_nothing(model: Model, tmp_path: Path, root: Path) -> None:
    file = put(tmp_path, 1, [1, 2])
    file.write_text(file.read_text() + '{"table": "user", "id": 3, "vector": [1]}\n')
    found = run_tableside("apply", "demo", file, root=root)
    assert (
        found.returncode == 1
        and f"{file}: line 3: a vector of table 'user' with 1 values; expected 4" in found.stderr
    )
    np.testing.assert_array_equal(values(model), START)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("suffix", ["jsonl", "npz", "parquet"])
def test_deletions_alone(suffix: str, tmp_path: Path, root: Path) -> None:
    """A file of them need not say how many values a vector has. The ids become what the table says of
    missing ones."""
    np.savez(tmp_path / "rows.npz", user=np.ones((ROWS, DIM), np.float32))
    table = {"key": "user", "row_format": "fp32", "missing": "zero"}
    load(parse_model({"name": "demo", "checkpoint": "rows.npz", "tables": {"user": table}}, tmp_path), root)
    file = tmp_path / f"gone.{suffix}"
    if suffix == "jsonl":
        file.write_text('{"id": 3, "vector": null}\n{"id": 5, "vector": null}\n')
    elif suffix == "npz":
        np.savez(file, ids=[3, 5], deleted=[True, True])
    else:
        pa = pytest.importorskip("pyarrow", reason="the eval extra brings pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(
            pa.table({"id": [3, 5], "vector": pa.array([None, None], pa.list_(pa.float32()))}), file
        )
    found = run_tableside("apply", "demo", file, "--json", root=root)
    assert json.loads(found.stdout)["tables"] == [{"name": "user", "rows": 2, "deleted": 2}], found.stderr
    assert np.flatnonzero(values(Model(root, "demo"))[:, 0] == 0).tolist() == [3, 5]


@pytest.mark.thorough
def test_a_table_that_was_exported_is_a_file_of_changes(model: Model, tmp_path: Path, root: Path) -> None:
    pytest.importorskip("pyarrow", reason="the eval extra brings pyarrow")
    written = tmp_path / "user.parquet"
    assert run_tableside("export", "demo", "user", "--to", written, root=root).returncode == 0
    assert run_tableside("apply", "demo", put(tmp_path, 1, [5, 6]), root=root).returncode == 0
    assert run_tableside("apply", "demo", written, root=root).returncode == 1, "it names no table"
    found = run_tableside("apply", "demo", written, "--table", "user", root=root)
    assert f"{ROWS} changes" in found.stdout, found.stderr
    np.testing.assert_array_equal(values(model), START)


# ---- follow ----


def until_applied(model: Model, source: str, position: str) -> None:
    deadline = time.monotonic() + 300
    while position_of(model, source) != position:
        assert time.monotonic() < deadline, f"{position} was not applied"
        time.sleep(0.02)


@pytest.mark.drawn(0.5)
def test_a_folder_is_followed_until_a_signal(model: Model, tmp_path: Path, root: Path) -> None:
    """The batch under way is finished; a line of JSON says each batch."""
    name = f"folder:{tmp_path}"
    put(tmp_path, 1, [1])
    bad = tmp_path / "left-out"
    with following(root, str(tmp_path), "--every-s", 0.1, "--json", "--skip-bad", bad) as process:
        until_applied(model, name, "1")
        put(tmp_path, 2, [ROWS])  # there is no such row
        until_applied(model, name, "2")
        put(tmp_path, 3, [2])
        until_applied(model, name, "3")
        process.send_signal(signal.SIGTERM)
        out, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    steps = [json.loads(line) for line in out.splitlines()]
    assert [(s["sequence"], s["rows"], s["position"]) for s in steps] == [
        (1, 1, "1"),
        (2, 0, "2"),
        (3, 1, "3"),
    ]
    assert [s["skipped"] for s in steps] == [0, 1, 1] and json.loads(bad.read_text())["file"] == str(
        tmp_path / "2.jsonl"
    )
    assert keys_of(steps) == documented_keys("follow") and all(s["lag_s"] > 0 for s in steps if s["rows"])
    assert f"demo follows {name}, from start" in said and "no longer" in said


@pytest.mark.parametrize(("options", "more"), [((), 10), (("--nice", 0), 0)], ids=["default", "none"])
@pytest.mark.drawn(0.5)
def test_servers_come_first(
    model: Model, tmp_path: Path, root: Path, options: tuple[Any, ...], more: int
) -> None:
    """A follower gives way to other processes; threads that it starts do as it does."""
    put(tmp_path, 1, [5])
    with following(root, str(tmp_path), "--every-s", 0.1, "--json", *options) as process:
        assert process.stdout is not None and process.stdout.readline(), ended(process, 0)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.nice(0) + more)


@pytest.mark.parametrize("keep", [(), ("--keep-states", "1h")])
@pytest.mark.thorough
def test_changes_are_compacted_where_they_add_up(
    model: Model, tmp_path: Path, root: Path, keep: tuple[str, ...]
) -> None:
    """In a process beside the follower, which goes on with the new version. One version stays beside the live
    one, and those of states that are to be kept."""
    name, number = f"folder:{tmp_path}", 0
    with following(root, str(tmp_path), "--every-s", 0.1, "--compact-at", "1e-9", *keep) as process:
        while model.record().current < 3 or number < 4:
            number += 1
            put(tmp_path, number, [number % 50])
            until_applied(model, name, str(number))
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    assert position_of(model, name) == str(number)
    assert "changes take more than 1e-09 of version 1; compacting" in said and "demo version 2" in said
    current = model.record().current
    assert model.versions() == [*range(1 if keep else current - 1, current + 1)]


@pytest.mark.thorough
def test_a_gap_ends_a_follower_and_reset_goes_past_it(model: Model, tmp_path: Path, root: Path) -> None:
    """What came before the gap is applied."""
    for number in (1, 2, 4):
        put(tmp_path, number, [number])
    with following(root, str(tmp_path), "--every-s", 0.1, "--name", "files") as process:
        said = ended(process, 1)
    assert "the file after number 2 is number 4; expected 3" in said
    assert "rows in" in said and "up to 2; at most" in said, "the log says what was applied before"
    assert position_of(model, "files") == "2"
    with following(root, str(tmp_path), "--every-s", 0.1, "--name", "files", "--reset", "--from", 3):
        until_applied(model, "files", "4")
    assert values(model)[[1, 2, 3, 4], 0].tolist() == [1, 2, 0, 4]


@pytest.mark.drawn(0.25)
def test_a_bad_batch_ends_a_follower_and_changes_nothing(model: Model, tmp_path: Path, root: Path) -> None:
    put(tmp_path, 1, [1])
    bad = put(tmp_path, 2, [2, 3])
    bad.write_text(bad.read_text() + "{")
    with following(root, str(tmp_path), "--every-s", 0.1, "--name", "files") as process:
        assert f"{bad}: line 3: not JSON" in ended(process, 1)
    assert position_of(model, "files") == "1" and values(model)[:4, 0].tolist() == [0, 1, 0, 0]


@pytest.mark.thorough
def test_two_followers_of_one_stream(model: Model, tmp_path: Path, root: Path) -> None:
    """One of them ends and says so; every file is applied once all the same."""
    options, expected, number = ("--every-s", 0.05, "--name", "files"), START.copy(), 0
    deadline = time.monotonic() + 300
    with following(root, str(tmp_path), *options) as one, following(root, str(tmp_path), *options) as two:
        while one.poll() is None and two.poll() is None:
            assert time.monotonic() < deadline, "both go on"
            number += 1
            expected[number % ROWS] = told(number, [number % ROWS])[0]
            put(tmp_path, number, [number % ROWS])
            time.sleep(0.05)
        until_applied(model, "files", str(number))
        first, other = (one, two) if one.poll() is not None else (two, one)
        assert "another" in ended(first, 1) and other.poll() is None
    np.testing.assert_array_equal(values(model), expected)


@pytest.mark.thorough
@needs_redis
def test_a_follower_that_is_killed_goes_on_where_it_was(model: Model, tmp_path: Path, root: Path) -> None:
    """With Redis killed and started again in between: at the end each entry is applied, once, and in
    order."""
    pytest.importorskip("hiredis", reason="the redis extra brings it")
    rng, number, seen = np.random.default_rng(4), 0, [0]
    expected = START.copy()
    with redis_server(tmp_path) as server:
        client = server.client()
        for round_ in range(4):
            with following(root, server.url("rows"), "--every-s", 0.05, "--rows", 20) as process:
                for _ in range(60):
                    number += 1
                    ids = rng.choice(ROWS, 5, replace=False)
                    expected[ids] = told(number, ids.tolist())
                    fields = {"table": "user", "ids": ids.tobytes(), "vectors": expected[ids].tobytes()}
                    last = client.xadd("rows", fields, id=f"{number}-1").decode()
                    seen.append(int((position_of(model, "redis:rows") or "0").split("-")[0]))
                if round_ == 1:
                    server.end(signal.SIGKILL)
                    server.start()
                time.sleep(rng.uniform(0.4, 1.2))  # a follower takes some of that to start
                process.kill()
            assert_is_prefix(model, expected, number)
        with following(root, server.url("rows"), "--every-s", 0.05):
            until_applied(model, "redis:rows", last)
        client.close()
    np.testing.assert_array_equal(values(model), expected)
    assert seen == sorted(seen), "the position never goes back"


def assert_is_prefix(model: Model, expected: np.ndarray, number: int) -> None:
    """Rows of entries up to the position, and none behind it."""
    at = int((position_of(model, "redis:rows") or "0").split("-")[0])
    found = values(model)
    assert found[:, 0].max() <= at <= number
    np.testing.assert_array_equal(found[expected[:, 0] <= at], expected[expected[:, 0] <= at])


@needs_redis
def test_rows_of_string_ids(root: Path, tmp_path: Path) -> None:
    """The follower knows from the model which texts are strings and which are numbers."""
    pytest.importorskip("hiredis", reason="the redis extra brings it")
    fp32 = {"row_format": "fp32", "missing": "zero"}
    tables = {"named": (["7", "é"], START[:2]), "user": (np.arange(2), START[:2])}
    publish_strings(tmp_path, root, tables, of={"named": fp32, "user": fp32})
    with redis_server(tmp_path) as server:
        client = server.client()
        client.xadd("rows", {"table": "named", "id": "7", "vector": "[1, 2, 3, 4]"})
        vectors = np.full((2, DIM), 5, "<f4").tobytes()
        client.xadd("rows", {"table": "named", "ids": as_bytes([b"new", "é".encode()]), "vectors": vectors})
        last = client.xadd("rows", {"table": "user", "id": "1", "vector": "[9, 9, 9, 9]"}).decode()
        with following(root, server.url("rows"), "--every-s", 0.05):
            until_applied(Model(root, "demo"), "redis:rows", last)
        client.close()
    found = attach_state(Model(root, "demo"), None, "full").tables
    named = vectors_of(found["named"], hashes(["7", "new", "é", "1"]))
    assert named[:, 0].tolist() == [1, 5, 5, 0]
    assert vectors_of(found["user"], [0, 1])[:, 0].tolist() == [0, 9]
