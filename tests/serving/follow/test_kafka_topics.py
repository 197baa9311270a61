"""Topics of Kafka, of librdkafka's mock cluster: forms, partitions, positions, what is gone, brokers that are
away, and a follower that is killed."""

import logging
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from following import ended, following
from string_tables import hashes
from support import until

pytest.importorskip("confluent_kafka", reason="the kafka extra brings it")

from kafka_brokers import PARTITIONS, Brokers

from campaigns.follows import rows_now
from tableside.loader.deltas.apply import position_of
from tableside.loader.errors import ChangeError
from tableside.loader.string_ids import as_bytes
from tableside.loader.versions.versions import Model
from tableside.serving.errors import SourceError
from tableside.serving.follow.loop import open_source
from tableside.serving.follow.source import ChangeSource

DIM = 2


@pytest.fixture(scope="module")
def brokers() -> Brokers:
    return Brokers(3)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "_" for c in request.node.name)


@pytest.fixture
def opened(brokers: Brokers) -> Iterator[Callable[..., ChangeSource]]:
    made: list[ChangeSource] = []

    def open_(topics: str, table: str | None = "user", start: str = "start", **options: str) -> ChangeSource:
        strings = ("named",)  # a table of string ids
        url = brokers.url(topics, **options)
        made.append(open_source(url, None, table, start, lambda: False, strings=strings))
        return made[-1]

    yield open_
    for source in made:
        source.close()


def read(source: ChangeSource, after: str | None = None, rows: int = 1000, most: int | None = None) -> Any:
    """The next batch, for which it waits."""
    while (batch := source.read(after, rows, 0.2, most)) is None:
        pass
    return batch


def taken(batch: Any) -> dict[int, list[float] | None]:
    """id -> vector; None: deleted."""
    rows: dict[int, list[float] | None] = {}
    for c in batch.changes:
        gone = np.zeros(c.rows, bool) if c.deleted is None else c.deleted
        rows |= {int(i): None if g else v.tolist() for i, v, g in zip(c.ids, c.vectors, gone, strict=True)}
    return rows


def place(topic: str, *offsets: int) -> str:
    return " ".join(f"{topic}/{number}:{offset}" for number, offset in enumerate(offsets))


# ---- forms ----


def test_rows_and_deletions(brokers: Brokers, topic: str, opened: Callable[..., ChangeSource]) -> None:
    before = time.time()
    brokers.rows(topic, [1, 2, 3], [[1, 2], [3, 4], [5, 6]])
    brokers.rows(topic, [2], [[0.5, 0.25]], table="user", dtype="fp16")
    brokers.rows(topic, [3], None)
    source, after, found = opened(topic), None, {}
    assert source.name == f"kafka:{topic}"
    while after != place(topic, 3, 0, 0, 0):
        batch = read(source, after)
        assert batch.after == after and before - 1 < batch.made_at < time.time() + 1
        found |= taken(batch)
        after = batch.position
    assert found == {1: [1, 2], 2: [0.5, 0.25], 3: None}
    assert source.read(after, 10, 0) is None


def test_rows_in_json(brokers: Brokers, topic: str, opened: Callable[..., ChangeSource]) -> None:
    brokers.json(topic, {"table": "item", "id": -7, "vector": [0.1, 1]})
    assert taken(read(opened(topic, None, form="json"))) == {-7: [np.float32(0.1), 1]}


def test_rows_of_string_ids(brokers: Brokers, topic: str, opened: Callable[..., ChangeSource]) -> None:
    """In JSON a string, which no integer stands for; in rows the key is strings as BYTES."""
    brokers.json(topic, {"table": "named", "id": "7", "vector": [0.5, 1]})
    brokers.json(topic, {"table": "named", "id": 7, "vector": [0.5, 1]})
    brokers.json(topic, {"table": "item", "id": "7", "vector": [0.5, 1]})
    source = opened(topic, None, form="json")
    first = read(source)
    assert taken(first) == {hashes(["7"])[0]: [0.5, 1]}
    after_two = first.position.replace("/0:1", "/0:2")
    for after, said in ((first.position, "7; expected a string"), (after_two, "'7'; expected an integer")):
        with pytest.raises(ChangeError, match=f"its id is {said}"):
            list(read(source, after).changes)
    other = f"{topic}_rows"
    vectors = np.ones((2, DIM), "<f4").tobytes()
    brokers.send(other, vectors, key=as_bytes([b"", b"a"]), headers={"table": b"named"})
    assert taken(read(opened(other, None))) == {i: [1, 1] for i in hashes(["", "a"])}


def test_rows_as_hps_sends_them(brokers: Brokers, topic: str, opened: Callable[..., ChangeSource]) -> None:
    """The table is the last part of the topic's name. A beacon has no rows."""
    name = f"hps_et.{topic}.item"
    brokers.send(name, b"HCTR" + struct.pack("<I", 8))
    brokers.send(name, b"HCTR" + struct.pack("<Iq2fq2f", 8, 5, 1.0, 2.0, -(2**63), 3.0, 4.0))
    source, after, found = opened(name, None, form="hps"), None, {}
    while not found:
        batch = read(source, after)
        assert {c.table for c in batch.changes} <= {"item"}
        found, after = taken(read(source, after)), batch.position
    assert found == {5: [1, 2], -(2**63): [3, 4]} and after == place(name, 2, 0, 0, 0)


@pytest.mark.parametrize(
    ("form", "value", "said"),
    [
        ("rows", b"12345", "its vectors are 5 bytes for 1 ids"),
        ("json", b"[1]", 'expected an object with "id", "vector"'),
        ("json", b"", "not JSON"),
        ("hps", b"HCTR" + struct.pack("<Iq", 8, 5), "begin b'HCTR.*expected HCTR"),
        ("hps", b"nothing like it", "begin b'nothing .*expected HCTR"),
    ],
)
def test_other_messages_are_refused_with_their_place(
    brokers: Brokers, opened: Callable[..., ChangeSource], form: str, value: bytes, said: str
) -> None:
    topic = f"refused_{form}_{len(value)}"
    brokers.send(topic, value, 2, key=bytes(8))
    batch = read(source := opened(topic, form=form))
    assert batch.position == place(topic, 0, 0, 1, 0)
    with pytest.raises(ChangeError, match=f"Kafka topic {topic}: message {topic}/2:0: .*{said}"):
        list(batch.changes)
    assert source.content(batch.position)["message"] == f"{topic}/2:0" or form != "rows"


# ---- positions ----


def test_partitions_are_one_state(brokers: Brokers, topic: str, opened: Callable[..., ChangeSource]) -> None:
    """All partitions of two topics; from any position on exactly what was not read, in each one's order."""
    other = f"{topic}.other"
    sent: dict[tuple[str, int], list[int]] = {}
    for n in range(60):
        where = [topic, other][n % 2], n % PARTITIONS
        brokers.rows(where[0], [n], [[n, 0]], where[1])
        sent.setdefault(where, []).append(n)
    source, after, found, positions = opened(f"{topic},{other}"), None, list[int](), list[Any]()
    while len(found) < 60:
        batch = read(source, after, rows=7)
        positions.append((after, len(found)))
        found += [int(i) for c in batch.changes for i in c.ids]
        after = batch.position
    assert sorted(found) == [*range(60)]
    for where, ids in sent.items():
        assert [i for i in found if (i % 2, i % PARTITIONS) == (ids[0] % 2, where[1])] == ids
    for position, read_before in positions:
        again, rest = opened(f"{topic},{other}"), list[int]()
        while len(rest) < 60 - read_before:
            batch = read(again, position)
            rest += [int(i) for c in batch.changes for i in c.ids]
            position = batch.position
        assert sorted(rest) == sorted(found[read_before:])


def test_what_was_read_is_read_again_from_memory(
    brokers: Brokers, topic: str, opened: Callable[..., ChangeSource]
) -> None:
    """A follower that looks for the refused one of many reads the same messages again, fewer each time, and
    waits for none of them."""
    for n in range(40):
        brokers.rows(topic, [n], [[n, n]], n % 2)
    source = opened(topic)
    all_ = read(source, rows=10**6)
    while len(first := taken(all_)) < 40:
        all_ = read(source, rows=10**6)
    half = source.read(None, 10**6, 0.0, 20)
    assert half is not None and [*taken(half)] == [*first][:20]
    one = source.read(half.position, 10**6, 0.0, 1)
    assert one is not None and [*taken(one)] == [*first][20:21]


def test_where_a_topic_is_begun(brokers: Brokers, topic: str, opened: Callable[..., ChangeSource]) -> None:
    """A topic that is not there yet is waited for. The end is where it was when the source first looked."""
    assert opened(topic).read(None, 10, 0.2) is None
    for n in range(3):
        brokers.rows(topic, [n], [[n, n]])
    source = opened(topic, start="end")
    while source.read(None, 10, 0.2) is None and source._begin is None:  # type: ignore[attr-defined]
        pass
    brokers.rows(topic, [9], [[9, 9]])
    assert taken(read(source)) == {9: [9, 9]}
    assert taken(read(opened(topic, start=place(topic, 2)))) == {2: [2, 2], 9: [9, 9]}


def test_a_position_of_something_else(
    brokers: Brokers, topic: str, opened: Callable[..., ChangeSource]
) -> None:
    for start in ("7", "other/0:1", f"{topic}/0:-1", f"{topic}/x:1", f"{topic}:1"):
        with pytest.raises(SourceError, match=f"'{start}' is no position; expected the next offset"):
            opened(topic, start=start)
    brokers.rows(topic, [1], [[1, 1]])
    with pytest.raises(SourceError, match=f"partition 7 of {topic} is gone"):
        read(opened(topic), f"{topic}/7:3")


def test_a_url_that_is_none(opened: Callable[..., ChangeSource], brokers: Brokers) -> None:
    with pytest.raises(SourceError, match=r"with form=avro; expected kafka://.*rows, json, hps"):
        opened("k", form="avro")
    with pytest.raises(SourceError, match="kafka:///k with form=rows"):
        open_source("kafka:///k", None, None, "start", lambda: False)
    with pytest.raises(SourceError, match=r"No such configuration property: .nosuch\.setting"):
        opened("k", **{"nosuch.setting": "1"})
    with pytest.raises(SourceError, match="partitions have none"):
        open_source(brokers.url("k"), None, None, "start", lambda: False, group_s=1.0)


# ---- what is gone, and who is away ----


def test_what_was_trimmed_ends_the_follower(
    brokers: Brokers, topic: str, opened: Callable[..., ChangeSource]
) -> None:
    """The mock cluster keeps 5 MB of a partition: a follower that was overtaken says from where on."""
    for n in range(9):
        brokers.rows(topic, [n], np.zeros((1, 200_000)))
    with pytest.raises(SourceError, match=f"the changes from {topic}/0:1 on are gone.*--reset --from"):
        read(opened(topic), place(topic, 1, 0, 0, 0))
    with pytest.raises(SourceError, match=f"the changes from {topic}/0:99 on are gone"):
        read(opened(topic), place(topic, 99, 0, 0, 0))


def test_brokers_that_are_away_are_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said once, and nothing is an error."""
    away = "kafka://127.0.0.1:9/k?reconnect.backoff.max.ms=100"
    source = open_source(away, None, "user", "start", lambda: False)
    with caplog.at_level(logging.WARNING, "tableside.follow"):
        until(lambda: source.read(None, 10, 0.2) is not None or "no broker answers" in caplog.text)
        assert source.read(None, 10, 0.2) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    source.close()


# ---- followers ----


@pytest.fixture
def model(publish: Callable[..., Any], root: Path) -> Model:
    publish({"user": np.zeros((200, DIM), np.float32)}, formats={"user": "fp32"})
    return Model(root, "demo")


def applied(model: Model, name: str) -> int:
    """How many messages the state has."""
    position = position_of(model, f"kafka:{name}") or ""
    return sum(int(part.rpartition(":")[2]) for part in position.split())


def wait_for(model: Model, name: str, count: int) -> None:
    until(lambda: applied(model, name) >= count)


@pytest.mark.thorough
def test_a_killed_follower_goes_on_where_it_was(
    brokers: Brokers, topic: str, model: Model, root: Path
) -> None:
    """Each message is applied once, whatever was killed. An id's changes are of one partition."""
    rng, number = np.random.default_rng(5), 0
    expected = np.zeros((200, DIM), np.float32)
    for round_ in range(5):
        options = "--every-s", 0.05, "--rows", 20
        with following(root, brokers.url(topic), *options) as process:
            for _ in range(60):
                number += 1
                partition = number % PARTITIONS
                ids = rng.choice(50, 5, replace=False) * 4 + partition
                expected[ids] = np.stack([np.full(5, number), ids], 1)
                brokers.rows(topic, ids.tolist(), expected[ids], partition)
            wait_for(model, topic, number if round_ == 4 else number - 59)
            process.kill()
        assert applied(model, topic) <= number
    np.testing.assert_array_equal(rows_now(model, "user"), expected)


def test_a_follower_applies_topics_until_a_signal(
    brokers: Brokers, topic: str, model: Model, root: Path
) -> None:
    brokers.rows(topic, [3, 4], [[3, 3], [4, 4]])
    with following(root, brokers.url(topic), "--every-s", 0.1) as process:
        wait_for(model, topic, 1)
        brokers.rows(topic, [3], [[5, 5]], 1)
        wait_for(model, topic, 2)
        process.send_signal(signal.SIGTERM)
        said = ended(process, 0)
    assert f"demo follows kafka:{topic}, from start" in said and "no longer follows" in said
    assert rows_now(model, "user")[[3, 4]].tolist() == [[5, 5], [4, 4]]
    assert position_of(model, f"kafka:{topic}") == place(topic, 1, 1, 0, 0)
