"""The oracles see what they are there for: each is shown a wrong world and says so."""

import json
from pathlib import Path

import numpy as np
import pytest

from campaigns import raw_cases, raw_http
from campaigns.common import folders, random_of, told, version_told
from campaigns.request_cases import Case, Unclear, answer_of, mutated, right_v1, right_v2
from campaigns.shelf import Shelf

ROW_TABLE = 1


def test_rows_of_two_versions_are_no_versions() -> None:
    ids = np.array([5, 9])
    mixed = np.concatenate([told(ROW_TABLE, 3, ids[:1]), told(ROW_TABLE, 4, ids[1:])])
    assert version_told(told(ROW_TABLE, 3, ids), ids) == 3
    assert version_told(mixed, ids) is None
    assert version_told(told(ROW_TABLE, 3, ids)[::-1], ids) is None


@pytest.fixture
def shelf() -> "Shelf":
    with folders() as (root, files):
        yield Shelf(root, files)


def loaded(shelf: Shelf) -> tuple[int, int]:
    """(value, version) of a load that is left alone."""
    loader = shelf.loader()
    loader.go()
    code = loader.end()
    assert code == 0, loader.said()
    shelf.check({loader.value: code}, "a load")
    return loader.value, shelf.model.current()


def test_a_load_that_is_left_alone_is_right(shelf: Shelf) -> None:
    loaded(shelf)
    loaded(shelf)
    assert not shelf.found, shelf.details


def test_orphan_bytes_are_found(shelf: Shelf) -> None:
    loaded(shelf)
    (shelf.root / "demo" / "left").write_bytes(bytes(100_000))
    shelf.collect("here")
    assert shelf.found["orphan bytes"] >= 100_000


def test_a_number_that_is_given_twice_is_found(shelf: Shelf) -> None:
    value, version = loaded(shelf)
    shelf.told[version] = value + 1
    shelf.check({value: 0}, "here")
    assert shelf.found["a number given twice"] == 1


def test_a_flip_that_was_lost_is_found(shelf: Shelf) -> None:
    """A load that says that it succeeded, and the version from before is still live."""
    loaded(shelf)
    shelf.check({shelf.live_value % 16 + 1: 0}, "here")
    assert shelf.found["wrong live version"] == 1


def test_the_reference_answers_what_is_right_and_nothing_else() -> None:
    """Every request that is made right has an answer; one whose id is outside has none."""
    for number in range(200):
        chance = random_of(0, number)
        assert answer_of((right_v2 if number % 2 else right_v1)(chance))
    bad = Case("/v1/lookup", json.dumps({"model": "demo", "features": {"user": [[2000]]}}).encode())
    with pytest.raises(Unclear):
        answer_of(bad)


def test_mutations_are_the_same_for_the_same_seed() -> None:
    first, second = (mutated(right_v2(random_of(3)), random_of(4)) for _ in range(2))
    assert first == second


def http(status: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def row(number: int) -> bytes:
    return http("200 OK", json.dumps({"outputs": [{"data": [1, number]}]}).encode())


def test_an_answer_too_many_or_out_of_order_is_found() -> None:
    script = raw_cases.Script()
    script.add(b"", 7)
    script.add(b"", raw_cases.REFUSED)

    def is_right(data: bytes) -> bool:
        return raw_http.is_right(script, raw_http.answers(data))

    assert is_right(row(7) + http("400 Bad Request"))
    assert is_right(row(7))  # refused by closing
    assert not is_right(http("400 Bad Request") + row(7))
    assert not is_right(row(7) + http("400 Bad Request") + row(1007))
    assert not is_right(row(8))


def test_generated_scripts_end_with_what_may_be_refused(tmp_path: Path) -> None:
    for number in range(200):
        script = raw_cases.script_of(random_of(0, number))
        assert not any(raw_cases.REFUSED in allowed for allowed in script.expected[:-1])
