"""Columns of a data set as ids."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from string_tables import hashes

from tableside.serving.evaluation.data import DataError, Rows, ids_of


@pytest.mark.parametrize(
    ("column", "ids", "lengths"),
    [
        (pa.array([3, 1, 2]), [3, 1, 2], None),
        (pa.array([3, None, 2], pa.int32()), [3, 2], [1, 0, 1]),
        (pa.array([[3, 1], [], [2]]), [3, 1, 2], [2, 0, 1]),
        (pa.array([[3, 1], None, [2]]), [3, 1, 2], [2, 0, 1]),
        (pa.array([None, None]), [], [0, 0]),
        (pa.array([[], []]), [], [0, 0]),
    ],
    ids=["an id a row", "rows without", "lists", "lists that are null", "null alone", "empty lists"],
)
def test_ids_of_a_column(column: Any, ids: list[int], lengths: list[int] | None) -> None:
    found, counts = ids_of(Rows("a.parquet", 0, {"user": column}), "user")
    assert found.dtype == np.int64 and found.tolist() == ids
    assert (None if counts is None else counts.tolist()) == lengths
    assert counts is None or counts.dtype == np.int32


@pytest.mark.parametrize("column", [pa.array([1.5]), pa.array([[1, None]]), pa.array(["1"])])
def test_what_is_no_id(column: Any) -> None:
    with pytest.raises(DataError, match=r"a.parquet, row 7: column 'user' holds .*; expected ids \(int64\)"):
        ids_of(Rows("a.parquet", 7, {"user": column}), "user")


@pytest.mark.parametrize(
    ("column", "strings", "lengths"),
    [
        (pa.array(["b", "", "é"]), ["b", "", "é"], None),
        (pa.array(["b", None]).dictionary_encode(), ["b"], [1, 0]),
        (pa.array([["b", "a"], None, []], pa.list_(pa.large_string())), ["b", "a"], [2, 0, 0]),
        (pa.array([[b"\xff"]], pa.large_list(pa.binary())), [b"\xff"], [1]),
        (pa.array([None, None]), [], [0, 0]),
        (pa.array([[], []]), [], [0, 0]),
    ],
)
def test_strings_of_a_column(column: Any, strings: list[Any], lengths: list[int] | None) -> None:
    """Are the ids that they hash to."""
    found, counts = ids_of(Rows("a.parquet", 0, {"user": column}), "user", strings=True)
    assert found.dtype == np.int64 and found.tolist() == hashes(strings).tolist()
    assert (None if counts is None else counts.tolist()) == lengths


@pytest.mark.parametrize("column", [pa.array([1]), pa.array([["a", None]]), pa.array([[1], []])])
def test_what_is_no_string(column: Any) -> None:
    with pytest.raises(DataError, match=r"row 7: column 'user' holds .*; expected ids \(strings\)"):
        ids_of(Rows("a.parquet", 7, {"user": column}), "user", strings=True)
