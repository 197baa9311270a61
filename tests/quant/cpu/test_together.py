"""Rows that others have, given by a function here: vectors, masks, counts and errors are those of a table."""

from collections.abc import Sequence

import numpy as np
import pytest

from tableside.quant import (
    BadIds,
    CpuBackend,
    LookupKind,
    Place,
    Pooling,
    Precision,
    RowFormat,
    Source,
    Table,
    choose,
)
from tableside.quant.contract import MASK_LATE
from tableside.quant.errors import RowsNotRead
from tableside.quant.rows.fetched import AskedTable, RowOwners, RowsAsked, RowState
from tableside.quant.rows.ids import RowMap

pytestmark = pytest.mark.quick
ROWS, DIM = 50, 8


class Rows:
    """Gives the rows of a table, but for those that are late."""

    def __init__(self, backend: CpuBackend, has_default: bool, late_is_default: bool = True) -> None:
        values = np.random.default_rng(0).standard_normal((ROWS + has_default, DIM)).astype(np.float32)
        packed = np.empty((len(values), RowFormat.INT8.row_bytes(DIM, 4)), np.uint8)
        backend.quantize(values, Source.FP32, RowFormat.INT8, packed)
        row_map = RowMap(ROWS, ROWS) if has_default else None
        self.table = Table(packed, RowFormat.INT8, DIM, row_map)
        self.late = np.empty(0, np.int64)
        default = packed[ROWS] if has_default else None
        shape = ROWS, packed.shape[1], RowFormat.INT8, DIM
        owners = RowOwners(np.array([20, 20, ROWS]))
        self.asked = AskedTable("t", *shape, owners, self.give, 1.0, default, late_is_default)

    def give(self, asked: RowsAsked, deadline: float | None) -> None:
        assert asked.tables == ["t"] and np.unique(asked.ids).size == asked.ids.size
        for owner, (ids, rows) in enumerate(asked.blocks(0)):
            there = asked.ids[ids]
            assert owner != 1 or not there.size
            if owner == 3:
                asked.state[ids] = RowState.MISSING
                continue
            assert ((there < 20) == (owner == 0)).all()
            rows[:] = self.table.packed[there]
            asked.state[ids][np.isin(there, self.late)] = RowState.LATE


def run(
    backend: CpuBackend, table: object, ids: Sequence[int], lengths: Sequence[int], other: Table
) -> object:
    """The bytes of an unpooled lookup with a mask, of one in a table in memory, and of a pooled one; and the
    counts; or the error."""
    kinds = [
        LookupKind(table, Pooling.NONE, Precision.FP32),  # type: ignore[arg-type]
        LookupKind(other, Pooling.NONE, Precision.FP32),
        LookupKind(table, Pooling.SUM, Precision.FP32),  # type: ignore[arg-type]
    ]
    given = np.array(ids, np.int64).tobytes()
    inputs = given + np.array(lengths, np.int32).tobytes()
    n, vector, bags = len(ids), 4 * DIM, len(lengths)
    places = np.array(
        [
            Place(0, 0, n, -1, 0, 0, -1, 0, 0, (2 * n + bags) * vector),
            Place(1, 0, n, -1, 0, 0, -1, n * vector),
            Place(2, 0, n, 8 * n, 0, bags, -1, 2 * n * vector),
        ],
        np.int64,
    )
    out = np.zeros((2 * n + bags) * vector + n, np.uint8)
    try:
        unfound = backend.planner(kinds).plan(places.tobytes()).run(inputs, out)
    except BadIds as error:
        return error.args
    return out.tobytes(), [tuple(one) for one in unfound or ()]


@pytest.mark.parametrize("name", ["native", "fbgemm"])
@pytest.mark.parametrize("has_default", [False, True])
@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([1, 49, 1, 20], [2, 0, 2]),
        ([], [0]),
        ([3, 50, 19, -1], [4]),
        ([3, 4], [1]),
        ([50], [1, 1]),
        ([2**62, -(2**63)], [1, 1]),
    ],
)
def test_it_is_as_a_table_in_memory(name: str, has_default: bool, ids: list[int], lengths: list[int]) -> None:
    backend = choose(name)
    rows = Rows(backend, has_default)
    other = Table(rows.table.packed, RowFormat.INT8, DIM, RowMap(ROWS, ROWS - 1))
    assert run(backend, rows.asked, ids, lengths, other) == run(backend, rows.table, ids, lengths, other)


def test_an_error_of_a_table_in_memory_comes_after_those_before_it() -> None:
    """And before those behind it."""
    backend = choose()
    rows, strict = Rows(backend, True), Rows(backend, False)
    got = run(backend, rows.asked, [3, 60], [2], strict.table)
    assert got == run(backend, rows.table, [3, 60], [2], strict.table) == ("id", 1, 1, 60, ROWS)
    assert run(backend, strict.asked, [3, 60], [2], strict.table) == ("id", 0, 1, 60, ROWS)


@pytest.mark.parametrize(("has_default", "late_is_default"), [(False, True), (True, False)])
def test_late_rows_without_a_default_are_an_error(has_default: bool, late_is_default: bool) -> None:
    rows = Rows(choose(), has_default, late_is_default)
    rows.late = np.array([4])
    with pytest.raises(RowsNotRead, match="of 3 rows to fetch 1 came too late"):
        run(choose(), rows.asked, [4, 5, 4, 6], [4], rows.table)


LATE_MASK = bytes([MASK_LATE, 1, 0, MASK_LATE])


def test_the_default_row_stands_for_late_rows() -> None:
    """They are told apart from missing ones, in masks as well."""
    rows = Rows(choose(), True)
    rows.late = np.array([4])
    out, unfound = run(choose(), rows.asked, [4, 5, 60, 4], [4], rows.table)  # type: ignore[misc]
    expected, _ = run(choose(), rows.table, [60, 5, 60, 60], [4], rows.table)  # type: ignore[misc]
    vectors = 4 * 4 * DIM
    masks, of_missing = out[2 * vectors :], expected[2 * vectors :]
    assert out[:vectors] == expected[:vectors] and masks == of_missing.replace(bytes([0, 1, 0, 0]), LATE_MASK)
    assert LATE_MASK in masks
    assert unfound == [(1, 0, 2), (1, 0, 0), (1, 0, 2)]
