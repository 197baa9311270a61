"""Rows of an older version that a load takes over for ids which the checkpoint lacks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_loads import attached, publish_raw, vectors_of
from support import rows_of

from tableside.loader.errors import CheckpointError, LoaderError, ModelError
from tableside.loader.load.settings import LoadSettings
from tableside.loader.versions.versions import Model
from tableside.quant import BadIds
from tableside.quant.cpu.checked import rows_of as resolve

DIM = 24  # of fp32, whose rows have no room for ids; 26: they have


def generation(
    root: Path, folder: Path, ids: list[int] | None, values: np.ndarray, missing: Any, **more: Any
) -> Any:
    array = None if ids is None else np.array(ids, np.int64)
    publish_raw(folder, root, {"t": (array, values)}, {"t": {"missing": missing, **more}}, row_format="fp32")
    return attached(root)


@pytest.mark.parametrize("dim", [DIM, 26])
@pytest.mark.drawn(1)
def test_three_generations(root: Path, tmp_path: Path, dim: int) -> None:
    """An id has the newest row that there is of it, else what the oldest version yields; those taken over
    are told from the rest, and stay when the older versions go."""
    a, b, c = (rows_of(4, dim, seed) for seed in range(3))
    generation(root, tmp_path, [1, 2, 3, 0], a, [0.5] * dim)
    generation(root, tmp_path, [2, 5, -7, 9], b, "backfill:demo@1")
    table = generation(root, tmp_path, [3, 5, 2**63 - 1, 11], c, "backfill:demo@2")
    model = Model(root, "demo")
    model.remove(1)
    model.remove(2)
    ids = np.array([1, 2, 3, 0, 5, -7, 9, 2**63 - 1, 11, 77])
    expected = [a[0], b[0], c[0], a[3], c[1], b[2], b[3], c[2], c[3], np.full(dim, 0.5)]
    np.testing.assert_array_equal(vectors_of(table, ids), np.array(expected, np.float32))
    _, found, unfound = resolve(table, ids, None)
    assert found is not None and found.tolist() == [True] * 9 + [False]
    assert (unfound.missing, unfound.backfilled) == (1, 5)
    ids_of = model.attach().header.tables[0].ids
    assert ids_of is not None and (ids_of.count, ids_of.backfilled) == (9, 5)


def test_the_policy_of_the_oldest_version_is_an_error(root: Path, tmp_path: Path) -> None:
    """Then an id that neither has is refused."""
    generation(root, tmp_path, [1], rows_of(1, DIM), "error")
    table = generation(root, tmp_path, [2], rows_of(1, DIM, 1), "backfill:demo@1")
    assert len(vectors_of(table, [1, 2])) == 2
    with pytest.raises(BadIds, match="id 3 at position 0 is not among the table's 2 ids"):
        vectors_of(table, [3])


@pytest.mark.parametrize("older_missing", ["error", "zero"])
@pytest.mark.parametrize("dim", [DIM, 26])
@pytest.mark.drawn(2)
def test_raw_ids_from_row_numbers(root: Path, tmp_path: Path, dim: int, older_missing: str) -> None:
    """The older version's rows are those of the ids from 0 on; its default row is no id's."""
    old, new = rows_of(5, dim), rows_of(2, dim, 1)
    generation(root, tmp_path, None, old, older_missing)
    table = generation(root, tmp_path, [3, -1], new, "backfill:demo@1")
    np.testing.assert_array_equal(vectors_of(table, [0, 1, 2, 3, 4, -1]), [*old[:3], new[0], old[4], new[1]])
    assert table.row_map.count == 6 and (table.row_map.find(np.array([5])) == -1).all()


@pytest.mark.parametrize("older_missing", ["error", "zero"])
@pytest.mark.parametrize(("old_rows", "new_rows"), [(7, 3), (3, 7), (5, 5), (12_000, 4096)])
@pytest.mark.drawn(4)
def test_row_numbers_from_row_numbers(
    root: Path, tmp_path: Path, old_rows: int, new_rows: int, older_missing: str
) -> None:
    """Rows behind those of the checkpoint come from the older version, over the end of a chunk too; where
    it has no more of them, none are counted as its."""
    old, new = rows_of(old_rows, DIM), rows_of(new_rows, DIM, 1)
    generation(root, tmp_path, None, old, older_missing)
    table = generation(root, tmp_path, None, new, "backfill:demo@1")
    count = max(old_rows, new_rows)
    np.testing.assert_array_equal(vectors_of(table, np.arange(count)), [*new, *old[new_rows:]])
    _, _, unfound = resolve(table, np.arange(count), None)
    assert unfound.backfilled == max(0, old_rows - new_rows)
    if older_missing == "zero":
        assert not vectors_of(table, [count]).any()
    else:
        with pytest.raises(BadIds):
            vectors_of(table, [count])


@pytest.mark.parametrize("alignments", [(16, 4), (4, 16)])
@pytest.mark.parametrize("is_raw", [True, False], ids=["raw ids", "row numbers"])
@pytest.mark.drawn(2)
def test_rows_of_another_alignment(
    root: Path, tmp_path: Path, alignments: tuple[int, int], is_raw: bool
) -> None:
    """They are padded as the new version's are; the default row as well."""
    old, new = rows_of(5, 27), rows_of(2, 27, 1)  # 108 bytes, or 112, which have no room for an id
    ids = [[7, 8, 9, 10, 11], [8, 1]] if is_raw else [None, None]
    generation(root, tmp_path, ids[0], old, [0.5] * 27, row_alignment=alignments[0])
    table = generation(root, tmp_path, ids[1], new, "backfill:demo@1", row_alignment=alignments[1])
    assert table.row_bytes == {4: 108, 16: 112}[alignments[1]]
    asked = [7, 8, 9, 10, 11, 1, 100] if is_raw else [0, 1, 2, 3, 4, 100]
    expected = [old[0], new[0], *old[2:], new[1]] if is_raw else [*new, *old[2:]]
    np.testing.assert_array_equal(vectors_of(table, asked), [*expected, np.full(27, 0.5, np.float32)])


@pytest.mark.parametrize("duplicates", ["first", "last", "error"])
@pytest.mark.drawn(1)
def test_an_id_of_both_has_the_checkpoints_row(root: Path, tmp_path: Path, duplicates: str) -> None:
    """Whatever `duplicates` says, which is of the checkpoint alone; there it still holds."""
    old, new = rows_of(3, DIM), rows_of(3, DIM, 1)
    generation(root, tmp_path, [1, 2, 3], old, "zero")
    if duplicates == "error":
        table = generation(root, tmp_path, [2, 3, 4], new, "backfill:demo@1")
        np.testing.assert_array_equal(vectors_of(table, [1, 2, 3, 4]), [old[0], *new])
        with pytest.raises(CheckpointError, match="id 2 comes twice"):
            generation(root, tmp_path, [2, 3, 2], new, "backfill:demo@1")
    else:
        table = generation(root, tmp_path, [2, 3, 2], new, "backfill:demo@1", duplicates=duplicates)
        np.testing.assert_array_equal(
            vectors_of(table, [1, 2, 3]), [old[0], new[0 if duplicates == "first" else 2], new[1]]
        )


def test_the_mean_of_an_older_version_stays(root: Path, tmp_path: Path) -> None:
    """A missing id yields what that version yielded, not a new mean."""
    old = rows_of(4, DIM)
    older = generation(root, tmp_path, [1, 2, 3, 4], old, "mean")
    table = generation(root, tmp_path, [9], rows_of(1, DIM, 1), "backfill:demo@1")
    np.testing.assert_array_equal(vectors_of(table, [77]), vectors_of(older, [77]))


def test_an_older_version_that_covers_everything_adds_nothing(root: Path, tmp_path: Path) -> None:
    """All of its ids come again: no row is marked as taken over."""
    generation(root, tmp_path, [1, 2], rows_of(2, DIM), "zero")
    table = generation(root, tmp_path, [2, 1, 3], rows_of(3, DIM, 1), "backfill:demo@1")
    assert table.row_map.index.backfilled is None and table.row_map.count == 3


def test_a_dense_table_keeps_its_policy_where_nothing_is_taken_over(root: Path, tmp_path: Path) -> None:
    """An older version without rows beyond the checkpoint's: `load --only` finds the policy that
    model.toml has."""
    values = rows_of(5, DIM)
    tables = {"t": (None, values), "u": (None, values)}
    publish_raw(tmp_path, root, tables)
    of = {"t": {"missing": "backfill:demo@1"}}
    publish_raw(tmp_path, root, tables, of)
    stored = Model(root, "demo").attach().header.tables[0].ids
    assert stored is not None and (stored.missing, stored.backfilled, stored.default_row) == (
        "backfill:demo@1",
        0,
        None,
    )
    again = publish_raw(tmp_path, root, tables, of, settings=LoadSettings(only=("u",)))
    assert again.header.source["reused"]["tables"] == {"t": 2}
    np.testing.assert_array_equal(vectors_of(attached(root), [4, 0]), vectors_of(attached(root, "u"), [4, 0]))
    with pytest.raises(BadIds):
        vectors_of(attached(root), [5])


@pytest.mark.parametrize(
    ("older", "change", "message"),
    [
        (
            [1],
            {"row_format": "fp16"},
            "its rows are fp32 of dim 24, these are fp16 of dim 24; rows are taken over as they are",
        ),
        ([1], {"dim": 8}, "its rows are fp32 of dim 24, these are fp32 of dim 8"),
        ([1], {"ids": None}, 'its ids are raw, and those of this table are row numbers; set ids = "raw"'),
        ([1], {"missing": "backfill:demo@7"}, "that version is not published"),
        ([1], {"missing": "backfill:nothing@1"}, "nothing"),
        ([1], {"table": "u"}, "that version has no table 'u'; it has: t"),
    ],
)
@pytest.mark.drawn(3)
def test_an_older_version_that_does_not_fit_is_refused(
    root: Path, tmp_path: Path, older: list[int], change: dict[str, Any], message: str
) -> None:
    """Of another row format, dim or sort of ids, or not there: nothing is published."""
    generation(root, tmp_path, older, rows_of(1, DIM), "zero")
    ids = None if "ids" in change else np.array([2])
    tables = {change.get("table", "t"): (ids, rows_of(1, change.get("dim", DIM)))}
    of = {name: {"missing": change.get("missing", "backfill:demo@1")} for name in tables}
    with pytest.raises((ModelError, LoaderError), match=message):
        publish_raw(tmp_path, root, tables, of, row_format=change.get("row_format", "fp32"))
    assert Model(root, "demo").versions() == [1]
