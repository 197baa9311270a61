"""A change that the model refuses takes no other with it: those before it are applied, and it is named by
its own place."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kafka_brokers import Brokers
from redis_servers import needs_redis, redis_server

from campaigns.follows import rows_now
from tableside.loader.deltas.apply import position_of
from tableside.loader.versions.versions import Model
from tableside.serving.errors import SourceError
from tableside.serving.follow.folder import FolderSource
from tableside.serving.follow.loop import BadChangeFile, Step, follow, open_source
from tableside.serving.follow.source import ChangeSource

DIM, GOOD_BEFORE, GOOD_AFTER = 4, 20, 9
PLACES = GOOD_BEFORE + 1 + GOOD_AFTER
PLACE = rf"what lies at (changes/0:)?{GOOD_BEFORE + 1}(-0| changes/1:0 changes/2:0 changes/3:0)?"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dim": ({"table": "user", "id": 21, "vector": [1.0] * 7}, r"7|\[1, 4\]"),
    "value": ({"table": "user", "id": 21, "vector": [1e39, 0, 0, 0]}, "too large"),
    "table": ({"table": "nobody", "id": 21, "vector": [0.0] * DIM}, "no table 'nobody'"),
    "id": ({"table": "user", "id": 10**6, "vector": [0.0] * DIM}, "id 1000000 is outside"),
    "type of the id": ({"table": "user", "id": "x", "vector": [0.0] * DIM}, "its id is|the ids are strings"),
    "type of the vector": ({"table": "user", "id": 21, "vector": ["a"] * DIM}, "numbers|holds"),
}


@pytest.fixture
def model(publish: Callable[..., Any], root: Path) -> Model:
    publish(
        {"user": np.zeros((100, DIM), np.float32), "item": np.zeros((100, DIM), np.float32)},
        formats={"user": "fp32"},
    )
    return Model(root, "demo")


@pytest.fixture(params=["folder", pytest.param("redis", marks=needs_redis), "kafka"])
def send(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[dict[str, Any]], ChangeSource]]:
    """send(change) -> 20 good changes, this one, 9 good ones as a source; good change n sets row n of
    `user` to n."""

    def changes(bad: dict[str, Any]) -> list[dict[str, Any]]:
        good = [{"table": "user", "id": n, "vector": [float(n)] * DIM} for n in range(1, PLACES + 1)]
        return [*good[:GOOD_BEFORE], bad, *good[GOOD_BEFORE + 1 :]]

    def in_folder(bad: dict[str, Any]) -> ChangeSource:
        folder = tmp_path / "changes"
        folder.mkdir(exist_ok=True)
        for number, change in enumerate(changes(bad), 1):
            (folder / f"{number}.jsonl").write_text(json.dumps(change) + "\n")
        return FolderSource(folder, "folder", None, "start", lambda: False)

    if request.param == "folder":
        yield in_folder
        return
    if request.param == "kafka":
        brokers = Brokers()

        def in_topic(bad: dict[str, Any]) -> ChangeSource:
            for change in changes(bad):
                brokers.json("changes", change)
            return open_source(brokers.url("changes", form="json"), "kafka", None, "start", lambda: False)

        yield in_topic
        return
    with redis_server(tmp_path) as server:
        client = server.client()

        def in_stream(bad: dict[str, Any]) -> ChangeSource:
            for number, change in enumerate(changes(bad), 1):
                fields = {k: v if k != "vector" else json.dumps(v) for k, v in change.items()}
                client.xadd("changes", fields, id=f"{number}-0")
            return open_source(server.url("changes"), "redis", None, "start", lambda: False)

        yield in_stream
        client.close()


def run(model: Model, source: ChangeSource, until: int, **options: Any) -> list[Step]:
    """Follows until the position `until` is applied."""
    steps: list[Step] = []

    def is_done() -> bool:
        return bool(steps) and number_of(steps[-1].position) == until

    try:
        follow(model, source, 1000, 0.2, is_done, steps.append, **options)
    finally:
        source.close()
    return steps


def number_of(position: str | None) -> int:
    """The number of the last change up to a position: of a file, of an entry, or messages of partition 0."""
    found = re.match(r"(?:changes/0:)?(\d+)", position or "")
    assert found
    return int(found[1])


def applied(model: Model) -> list[int]:
    """The rows of `user` that were changed; each has to hold its number."""
    values = rows_now(model, "user")
    changed = np.flatnonzero(values.any(1))
    assert (values[changed] == changed[:, None]).all()
    return changed.tolist()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.drawn(6)
def test_what_comes_before_a_bad_change_is_applied(
    model: Model, send: Callable[..., ChangeSource], bad: str
) -> None:
    """The follower ends with the place and the reason; one that is started again says the same, and
    nothing is lost."""
    change, reason = BAD[bad]
    with pytest.raises(SourceError, match=f"{PLACE} was refused: .*({reason})"):
        run(model, send(change), PLACES)
    assert applied(model) == [*range(1, GOOD_BEFORE + 1)]


def test_a_follower_that_is_started_again_says_it_again(
    model: Model, send: Callable[..., ChangeSource]
) -> None:
    source = send(BAD["dim"][0])
    with pytest.raises(SourceError, match="was refused"):
        follow(model, source, 1000, 0.2, lambda: False, lambda step: None)
    position = position_of(model, source.name)
    with pytest.raises(SourceError, match=f"{PLACE} was refused"):
        run(model, source, PLACES)
    assert position_of(model, source.name) == position
    assert number_of(position) == GOOD_BEFORE


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.drawn(3)
def test_bad_changes_are_left_out_and_written_aside(
    model: Model, send: Callable[..., ChangeSource], bad: str, tmp_path: Path
) -> None:
    """All others are applied; the file says what was left out, where it lay, and why."""
    change, reason = BAD[bad]
    source = send(change)
    with BadChangeFile(source, tmp_path / "bad.jsonl") as skipped:
        steps = run(model, source, PLACES, skip=skipped)
    assert applied(model) == [n for n in range(1, PLACES + 1) if n != GOOD_BEFORE + 1]
    (line,) = map(json.loads, (tmp_path / "bad.jsonl").read_text().splitlines())
    assert skipped.count == 1 and line["source"] == source.name
    assert number_of(line["position"]) == GOOD_BEFORE + 1 and re.search(reason, line["error"])
    assert line.get("file", "").endswith(f"{GOOD_BEFORE + 1}.jsonl") or "id" in line
    assert sum(step.applied.rows for step in steps) == PLACES - 1


def test_nothing_but_bad_changes(model: Model, tmp_path: Path) -> None:
    """The place behind them is kept, though no row changed."""
    folder = tmp_path / "changes"
    folder.mkdir()
    for number in range(1, 6):
        (folder / f"{number}.npz").write_bytes(b"no archive")
    source = FolderSource(folder, "folder", None, "start", lambda: False)
    with BadChangeFile(source, tmp_path / "bad.jsonl") as skipped:
        run(model, source, 5, skip=skipped)
    assert (skipped.count, position_of(model, "folder"), applied(model)) == (5, "5", [])
