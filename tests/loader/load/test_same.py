"""A load links the files of tables that are the same in a checkpoint. Answers are those of the checkpoint."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keyed_tables import ids_of
from raw_loads import Tables, publish_raw, vectors_of
from support import flip_bit, rows_of, run_tableside

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import CheckpointError
from tableside.loader.load.load import Loaded
from tableside.loader.load.settings import LoadSettings
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model

pytestmark = pytest.mark.usefixtures("every_table_is_large")
ROWS, DIM = 30_000, 16
DENSE, MORE, IDS, RAW = rows_of(ROWS, DIM, 1), rows_of(ROWS, DIM, 2), ids_of(ROWS, 1), rows_of(ROWS, DIM, 3)
TABLES: Tables = {"dense": (None, DENSE), "more": (None, MORE), "raw": (IDS, RAW)}
OF: dict[str, dict[str, Any]] = {"more": {"missing": "zero"}, "raw": {"missing": "zero", "buckets": 4}}
Publish = Callable[..., Loaded]


@pytest.fixture
def again(root: Path, tmp_path: Path) -> Publish:
    """again(tables that changed, of=...) -> the next version, in fp32."""

    def run(changed: Tables, of: dict[str, dict[str, Any]] = OF, **more: Any) -> Loaded:
        return publish_raw(tmp_path, root, TABLES | changed, of, row_format="fp32", **more)

    return run


def linked(loaded: Loaded) -> set[str]:
    """Tables whose files more than one version has, in the model's folder."""
    found = {f.table for f in Model(loaded.path.parent.parent, "demo").attach().files if f.table}
    assert len(found) == 3
    files = Model(loaded.path.parent.parent, "demo").attach(loaded.version).files
    return {f.table for f in files if f.table and f.path.stat().st_nlink > 1}


def check(root: Path, changed: Tables) -> None:
    """Every row of the live version is that of its checkpoint, and every byte is what was written."""
    segment = Model(root, "demo").attach(None, "always")
    for name, (ids, values) in (TABLES | changed).items():
        table = segment.tables[name]
        asked = np.arange(len(values)) if ids is None else ids
        np.testing.assert_array_equal(vectors_of(table, asked), values)
    if "'mean'" in str(segment.header.tables[1].ids):
        mean = (TABLES | changed)["more"][1].astype(np.float64).mean(0).astype(np.float32)
        np.testing.assert_array_equal(vectors_of(segment.tables["more"], [ROWS + 5])[0], mean)


def one_changed(values: np.ndarray, row: int) -> np.ndarray:
    values = values.copy()
    values[row, 3] += 1
    return values


@pytest.mark.drawn(4)
@pytest.mark.parametrize("row", [0, ROWS // 2, ROWS - 1])
@pytest.mark.parametrize("name", list(TABLES))
def test_tables_that_are_the_same_are_linked(again: Publish, root: Path, name: str, row: int) -> None:
    """All but the one in which one value of one row differs."""
    again({})
    ids, values = TABLES[name]
    changed: Tables = {name: (ids, one_changed(values, row))}
    loaded = again(changed)
    assert linked(loaded) == set(TABLES) - {name}
    check(root, changed)
    assert loaded.header.source["same"] == {"version": 1, "tables": sorted(set(TABLES) - {name})}
    assert "reused" not in loaded.header.source and set(loaded.header.source["verified"]) == set(TABLES)


def test_a_checkpoint_that_is_the_same(again: Publish, root: Path) -> None:
    """Its raw ids come in another order. Progress counts every row twice: compared, then taken over."""
    again({})
    order, seen = np.random.default_rng(0).permutation(ROWS), []
    loaded = again({"raw": (IDS[order], RAW[order])}, progress=lambda done, total: seen.append((done, total)))
    assert linked(loaded) == set(TABLES)
    check(root, {})
    rows = sum(t.rows for t in loaded.header.tables)
    assert seen[-1] == (rows, rows)
    assert {total for done, total in seen if done == total} == {rows}
    assert all(a <= b for (a, _), (b, _) in pairwise(seen[: seen.index((rows, rows))]))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("raw", "of"),
    [
        ((IDS[:-1], RAW[:-1]), {}),
        ((np.append(IDS, IDS.min() + 1), np.append(RAW, RAW[:1], 0)), {}),
        ((np.append(IDS[:-1], IDS[:1]), np.append(RAW[:-1], RAW[:1], 0)), {"duplicates": "last"}),
        ((IDS, RAW), {"buckets": 8}),
        ((IDS, RAW), {"missing": "error"}),
        ((IDS, RAW), {"row_format": "fp16"}),
        ((IDS, RAW), {"row_alignment": 16, "row_format": "int8"}),
    ],
    ids=["fewer", "more", "twice", "buckets", "missing", "format", "alignment"],
)
def test_a_table_of_raw_ids_that_changed(
    again: Publish, root: Path, raw: tuple[np.ndarray, np.ndarray], of: dict[str, Any]
) -> None:
    again({})
    loaded = again({"raw": raw}, OF | {"raw": OF["raw"] | of})
    assert linked(loaded) == {"dense", "more"}
    if "row_format" not in of:
        check(root, {"raw": (raw[0][1:], raw[1][1:])})


@pytest.mark.drawn(0.5)
def test_other_values_of_row_numbers(again: Publish) -> None:
    """More rows, fewer rows, another default row."""
    again({})
    assert linked(again({"dense": (None, np.append(DENSE, DENSE[:1], 0))})) == {"more", "raw"}
    assert linked(again({"dense": (None, DENSE)})) == {"more", "raw"}
    assert linked(again({}, OF | {"more": {"missing": "error"}})) == {"dense", "raw"}


def test_a_mean_of_all_rows_is_taken_anew(again: Publish, root: Path) -> None:
    """It is that of the checkpoint's values, which rows do not have; a compaction keeps the old one."""
    of = OF | {"more": {"missing": "mean"}}
    again({}, of)
    changed = MORE.copy()
    changed[: ROWS // 2] += 100
    batch = ChangeBatch((TableChanges("more", np.arange(ROWS // 2), changed[: ROWS // 2]),))
    apply(Model(root, "demo"), batch)
    compact(Model(root, "demo"))
    assert linked(again({"more": (None, changed)}, of)) == {"dense", "raw"}
    check(root, {"more": (None, changed)})


def test_a_version_that_is_made_live_meanwhile_is_not_compared(
    again: Publish, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is taken over from the version from which `--only` takes the tables that it does not name."""
    again({})
    again({"dense": (None, 2 * DENSE)})
    model = Model(root, "demo")
    model.activate(1)
    verify_file = Segment.verify_file

    left = [2]

    def activate(segment: Segment, *given: Any) -> None:
        if left:
            model.activate(left.pop())
        verify_file(segment, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Segment, "verify_file", activate)
        loaded = again({"dense": (None, 2 * DENSE)}, settings=LoadSettings(only=("dense",)))
    assert loaded.header.source["reused"]["version"] == 1 and "same" not in loaded.header.source
    check(root, {"dense": (None, 2 * DENSE)})


def test_what_changed_since_is_not_in_it(again: Publish, root: Path) -> None:
    """The version is compared, and not its deltas, which end with it."""
    again({})
    batch = ChangeBatch((TableChanges("dense", np.array([1]), 2 * DENSE[1:2], np.array([False])),))
    apply(Model(root, "demo"), batch)
    assert linked(again({})) == set(TABLES)
    check(root, {})
    changed: Tables = {"dense": (None, one_changed(DENSE, 1))}
    assert linked(again(changed)) == {"more", "raw"}
    check(root, changed)


@pytest.mark.parametrize(("where", "left"), [("rows", {"dense", "more"}), ("index", set())])
@pytest.mark.drawn(1)
def test_a_damaged_file_is_not_linked(again: Publish, root: Path, where: str, left: set[str]) -> None:
    """With a damaged index the version cannot be attached, so nothing of it is compared."""
    again({})
    segment = Model(root, "demo").attach()
    table = next(t for t in segment.header.tables if t.name == "raw")
    assert table.ids is not None and table.ids.index is not None
    file = next(f for f in segment.files if f.table == "raw")
    stored = table if where == "rows" else table.ids.index
    file.path.chmod(0o600)
    flip_bit(file.path, stored.offset - file.offset + 1)
    file.path.chmod(0o400)
    assert linked(again({})) == left
    check(root, {})


def test_a_damaged_checkpoint_is_refused(again: Publish, root: Path, tmp_path: Path) -> None:
    """As a load refuses it, though every row is as in the version: the archive's checksum is wrong."""
    again({})
    path = tmp_path / "c.npz"
    data, name = bytearray(path.read_bytes()), b"more.weight.npy"
    for at in (data.index(name) - 16, data.rindex(name) - 30):  # the CRC-32 in both headers of the member
        data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="CRC"):
        publish_raw(tmp_path, root, TABLES, OF, row_format="fp32", saver="c.npz")
    assert Model(root, "demo").versions() == [1]


@pytest.mark.drawn(0.5)
def test_a_model_that_is_named_in_part(again: Publish, root: Path) -> None:
    """`--only` names tables of which one is the same; `inspect` tells."""
    again({})
    loaded = again({"dense": (None, 2 * DENSE)}, settings=LoadSettings(only=("dense", "more")))
    assert linked(loaded) == {"more", "raw"}
    check(root, {"dense": (None, 2 * DENSE)})
    assert loaded.header.source["same"] == {"version": 1, "tables": ["more"]}
    assert loaded.header.source["reused"]["tables"] == {"raw": 1}
    shown = run_tableside("inspect", "demo", root=root).stdout
    assert "the same as in version 1, whose files it shares: more" in shown
