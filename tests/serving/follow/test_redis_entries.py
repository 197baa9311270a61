"""Entries of a Redis stream: the three forms become changes in their order, and a bad one is refused with
its id."""

import json
from typing import Any

import numpy as np
import pytest
from string_tables import hashes

from tableside.loader.deltas.changes import RowRules
from tableside.loader.errors import ChangeError
from tableside.loader.string_ids import as_bytes
from tableside.serving.follow.redis_entries import Entries


def entries(*found: dict[str, Any], table: str | None = None) -> Entries:
    """Entries whose ids are 1-0, 2-0 and so on."""
    all_ = Entries(RowRules("Redis stream 'k'", "entry", table))
    for number, fields in enumerate(found, 1):
        flat = [
            part if isinstance(part, bytes) else str(part).encode()
            for pair in fields.items()
            for part in pair
        ]
        all_.add(f"{number}-0", flat)
    return all_


def rows(ids: list[int], values: np.ndarray, **more: Any) -> dict[str, Any]:
    return {"table": "user", "ids": np.array(ids, "<i8").tobytes(), "vectors": values.tobytes(), **more}


def row(id_: int, vector: Any, table: str = "user") -> dict[str, Any]:
    return {"table": table, "id": id_, "vector": json.dumps(vector)}


def read(found: Entries) -> list[tuple[str, list[int], list[list[float] | None]]]:
    out = []
    for c in found.changes():
        gone = np.zeros(c.rows, bool) if c.deleted is None else c.deleted
        out.append(
            (
                c.table,
                c.ids.tolist(),
                [None if g else v.tolist() for g, v in zip(gone, c.vectors, strict=True)],
            )
        )
    return out


def test_forms_of_one_table_are_joined_in_order() -> None:
    ones = np.ones((2, 3), np.float32)
    found = entries(
        row(5, [1, 2.5, -3e-2]),
        row(-(2**63), None),
        rows([5, 7], ones),
        {"table": "user", "ids": np.array([7], "<i8").tobytes(), "deleted": 1},
        row(9, [0, 0, 1], "item"),
        row(7, [4, 4, 4]),
    )
    assert found.rows == 7
    third = float(np.float32(-3e-2))
    assert read(found) == [
        ("user", [5, -(2**63), 5, 7, 7, 7], [[1, 2.5, third], None, [1, 1, 1], [1, 1, 1], None, [4, 4, 4]]),
        ("item", [9], [[0, 0, 1]]),
    ]


def test_widths_are_not_mixed() -> None:
    """fp16 stays fp16, in changes of its own between those of fp32."""
    found = entries(
        rows([1], np.ones((1, 2), "<f4"), dtype="fp32"),
        rows([1], np.full((1, 2), 2, "<f2"), dtype="fp16"),
        row(1, [3, 3]),
    )
    assert [(c.vectors.dtype.name, c.vectors.tolist()) for c in found.changes()] == [
        ("float32", [[1, 1]]),
        ("float16", [[2, 2]]),
        ("float32", [[3, 3]]),
    ]


def test_deletions_alone_and_a_table_that_is_known() -> None:
    found = entries(
        {"ids": np.array([1, 2], "<i8").tobytes(), "deleted": 1}, {"id": 3, "vector": "null"}, table="user"
    )
    assert read(found) == [("user", [1, 2, 3], [None, None, None])]


ONE = np.ones((1, 2), np.float32)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (row(1, [1, 2, 3]), "a vector of table 'user' with 3 values; expected 2, as before it"),
        (row(1, []), "a vector of table 'user' with 0 values; expected 2"),
        (row(1, [1, True]), "its vector holds 'True'; expected numbers"),
        (row(1, [1, "2"]), "its vector holds '2'; expected numbers"),
        (row(1, [[1, 2]]), r"a vector of table 'user' with 1 values"),
        (row(1, [1, 1e39]), "a value of its vector is too large for float32"),
        (row(1, 7), "its vector is a JSON int; expected a list of numbers, or null"),
        ({"table": "user", "id": 1, "vector": "[1, 2"}, r"its vector is not JSON"),
        ({"table": "user", "id": 1, "vector": "[1, 2], [3, 4]"}, r"its vector is not JSON"),
        (
            {"table": "user", "id": "1_0", "vector": "null"},
            "its id is '1_0'; expected an integer that int64 holds",
        ),
        (
            {"table": "user", "id": 2**63, "vector": "null"},
            "its id is '9223372036854775808'; expected an integer",
        ),
        ({"table": "user", "id": "x", "vector": "null"}, "its id is 'x'"),
        ({"id": 1, "vector": "null"}, "it names no table"),
        (
            {"table": "user", "id": 1},
            r"found the fields id \(and table\); expected the fields table and ids, vectors",
        ),
        ({"table": "user", "id": 1, "vector": "null", "x": 1}, r"found the fields id, vector, x"),
        (rows([1], ONE, dtype="fp64"), "its dtype is 'fp64'; expected fp32 or fp16"),
        (rows([1, 2, 3], ONE), "its vectors are 8 bytes for 3 ids; expected a multiple of 12, as fp32"),
        ({"table": "user", "ids": b"1234", "vectors": b""}, "its ids are 4 bytes; expected 8 for each"),
        ({"table": "user", "ids": b"12345678", "deleted": "yes"}, "its field deleted is 'yes'; expected 1"),
        (rows([1], np.ones((1, 3), "<f4")), "a vector of table 'user' with 3 values; expected 2"),
        (rows([1], np.ones((1, 0), "<f4")), "a vector of table 'user' with 0 values; expected 2"),
    ],
)
def test_an_entry_that_is_refused(fields: dict[str, Any], fault: str) -> None:
    """With its id, wherever it stands among good ones."""
    good = row(1, [1, 2])
    with pytest.raises(ChangeError, match=rf"Redis stream 'k': entry 3-0: {fault}"):
        entries(good, good, fields, good).changes()


def test_another_table_than_the_one_that_is_known() -> None:
    with pytest.raises(ChangeError, match="entry 1-0: its table is 'item'; expected 'user'"):
        entries(row(1, [1], "item"), table="user")


# ---- of string ids ----


def of_strings(*fields: list[bytes]) -> Entries:
    found = Entries(RowRules("Redis stream 'k'", "entry", "user", {"user"}))
    for number, each in enumerate(fields, 1):
        found.add(f"{number}-0", each)
    return found


def test_forms_of_string_ids() -> None:
    """The text of one id, also where it is a number, and BYTES of several; in their order."""
    ones = np.ones((2, 2), np.float32).tobytes()
    found = of_strings(
        [b"id", b"7", b"vector", b"[1, 2]"],
        [b"ids", as_bytes([b"", b"\xc3\xa9"]), b"vectors", ones],
        [b"ids", as_bytes([b"7"]), b"deleted", b"1"],
        [b"id", b"u", b"vector", b"null"],
    )
    (change,) = found.changes()
    assert change.strings and change.ids.tolist() == hashes(["7", "", "é", "7", "u"]).tolist()
    assert change.deleted is not None and change.deleted.tolist() == [False, False, False, True, True]
    assert change.vectors[:3].tolist() == [[1, 2], [1, 1], [1, 1]]


def test_bytes_that_are_no_strings_are_refused() -> None:
    with pytest.raises(ChangeError, match=r"entry 1-0: its ids are 8 bytes; expected strings, before each"):
        of_strings([b"ids", np.array([7], "<i8").tobytes(), b"deleted", b"1"])
    with pytest.raises(ChangeError, match=r"entry 2-0: its vector holds"):
        of_strings([b"id", b"a", b"vector", b"[1]"], [b"id", b"b", b"vector", b'["x"]']).changes()
