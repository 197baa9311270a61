"""A root on a disk: large tables have checksums of their blocks, and their rows are read by their numbers."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keyed_tables import ids_of
from support import files_of, flip_bit, rows_of
from table_files import CHANGED, DIM, PAGE, ROWS, TABLES, check, put, rewrite_header

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import SegmentError
from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment.huge_pages import is_on_disk
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import attach_state, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.quant.rows.fetched import RowReader

pytestmark = pytest.mark.usefixtures("every_table_is_large")
Publish = Callable[..., Model]


@pytest.fixture
def on_disk(disk: Path, tmp_path: Path) -> Publish:
    """on_disk(TABLES, only=...) -> the model on a disk, with a new version of fp32 tables."""

    def run(tables: dict[str, np.ndarray], only: tuple[str, ...] = ()) -> Model:
        np.savez(tmp_path / "demo.npz", **tables)
        raw = {
            "name": "demo",
            "checkpoint": "demo.npz",
            "tables": {t: {"key": t, "row_format": "fp32"} for t in tables},
            "features": {t: {"table": t} for t in tables},
        }
        load(parse_model(raw, tmp_path), disk, LoadSettings(threads=2, only=only))
        return Model(disk, "demo")

    return run


def fetched(segment: Segment, name: str) -> np.ndarray:
    """All rows of a table, read by their numbers."""
    t = segment.tables[name]
    table = t.fetched_by(RowReader(segment.base.readers[name]))
    return choose().lookup(table, np.arange(ROWS), pooling=Pooling.NONE)


def check_fetched(model: Model, *changed: str) -> None:
    segment = model.attach()
    for name in TABLES:
        np.testing.assert_array_equal(fetched(segment, name), (CHANGED if name in changed else TABLES)[name])


def test_a_version_on_a_disk(on_disk: Publish) -> None:
    """Its rows are those of the checkpoint, mapped and read; a segment in memory has no such checksums."""
    model = on_disk(TABLES)
    assert is_on_disk(model.folder) and not is_on_disk(Path("/dev/shm"))
    assert files_of(model.folder) == {"1.segment", "1.1.rows", "1.2.rows", "1.3.rows"}
    header = model.attach().header
    assert header.format_version == 8 and all(file.seed for file in header.files)
    used = sum(t.bytes for t in header.tables)
    assert sum((model.folder / name).stat().st_size for name in files_of(model.folder)) <= 1.01 * used
    check(model)
    check_fetched(model)
    model.remove_all()
    assert files_of(model.folder) == set()


def test_versions_share_the_files_of_tables_that_did_not_change(on_disk: Publish) -> None:
    """With their block checksums, which the next header names, too."""
    on_disk(TABLES)
    model = on_disk(CHANGED, only=("b",))
    first, second = model.attach(1), model.attach(2)
    links = [f.status.st_nlink for f in second.files[1:]]
    assert links == [2, 1, 2]
    assert [a.sums == b.sums for a, b in zip(first.header.files, second.header.files, strict=True)] == [
        *(True, False, True)
    ]
    check_fetched(model, "b")


def test_deltas_lie_above_it_and_are_compacted(on_disk: Publish) -> None:
    model = on_disk(TABLES)
    changes = [TableChanges("a", np.array([5, 7]), np.full((2, DIM), 9.0, np.float32))]
    apply(model, ChangeBatch(changes))
    wanted = TABLES["a"].copy()
    wanted[[5, 7]] = 9.0
    np.testing.assert_array_equal(fetched(attach_state(model, state_of(model.record())), "a"), wanted)
    compact(model)
    assert model.current() == 2 and model.attach().header.files[0].sums_at
    np.testing.assert_array_equal(fetched(model.attach(), "a"), wanted)
    np.testing.assert_array_equal(fetched(model.attach(), "b"), TABLES["b"])


def test_block_checksums_that_changed_are_refused(on_disk: Publish) -> None:
    model = on_disk(TABLES)
    (file, *_) = model.attach().header.files
    flip_bit(model.folder / "1.1.rows", file.sums_at - file.offset + 40)
    with pytest.raises(SegmentError, match=r"1\.1\.rows: the block checksums of table 'a' changed"):
        model.attach(verify="header")


@pytest.mark.parametrize("by", [4096, -8192, 8], ids=["beyond", "in the rows", "not a page"])
def test_block_checksums_elsewhere_are_refused(on_disk: Publish, by: int) -> None:
    model = on_disk(TABLES)
    rewrite_header(model.folder / "1.segment", put(lambda at: at + by, "files", 0, "sums_at"))
    with pytest.raises(SegmentError, match="the block checksums of table 'a' lie at bytes"):
        model.attach(verify="header")


def test_another_versions_file_is_refused_by_name(on_disk: Publish) -> None:
    on_disk(TABLES)
    model = on_disk(CHANGED)
    os.replace(model.folder / "1.1.rows", model.folder / "2.1.rows")
    with pytest.raises(SegmentError, match=r"2\.1\.rows: this is not the file of table 'a'"):
        model.attach(verify="header")


def test_a_file_without_block_checksums_is_not_linked(
    on_disk: Publish, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a root that came from memory: this one has as many bytes as one with checksums, and is written
    anew."""
    tables = {"a": rows_of((PAGE - 8192) // 64, 16), "b": rows_of(30_000, 16, 1)}
    with monkeypatch.context() as before:
        before.setattr("tableside.loader.segment.writer.is_on_disk", lambda where: False)
        on_disk(tables)
    first = Model(disk, "demo").attach(verify="header")
    model = on_disk(tables, only=("b",))
    segment = model.attach()
    assert not first.readers and segment.readers.keys() == tables.keys()
    assert [f.status.st_size for f in first.files[1:2]] == [f.status.st_size for f in segment.files[1:2]]


def test_a_root_is_moved_between_a_disk_and_memory(on_disk: Publish, root: Path) -> None:
    """Its files say all that they need."""
    model = on_disk(TABLES)
    shutil.copytree(model.root, root)
    check_fetched(Model(root, "demo"))


def test_raw_ids_on_a_disk(disk: Path, tmp_path: Path) -> None:
    """Are looked up where their index is mapped."""
    keys = ids_of(5000)
    values = np.random.default_rng(0).standard_normal((5000, DIM)).astype(np.float32)
    np.savez(tmp_path / "raw.npz", ids=keys, rows=values)
    raw = {
        "name": "raw",
        "checkpoint": "raw.npz",
        "tables": {"t": {"key": "rows", "id_key": "ids", "ids": "raw", "row_format": "fp32"}},
        "features": {"t": {"table": "t"}},
    }
    load(parse_model(raw, tmp_path), disk)
    segment = Model(disk, "raw").attach()
    assert segment.header.files[0].sums_at
    np.testing.assert_array_equal(choose().lookup(segment.tables["t"], keys, pooling=Pooling.NONE), values)


def test_blocks_of_an_older_release_are_read_where_they_are_mapped(
    on_disk: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    """Their checksums are of other blocks. The log says what to do; a next version has the others, and shares
    no file with it."""
    model = on_disk(TABLES)

    def without_seeds(header: dict[str, Any]) -> None:
        for file in header["files"]:
            del file["seed"]

    rewrite_header(model.folder / "1.segment", without_seeds)
    segment = model.attach()
    assert segment.header.format_version == 5 and not segment.readers
    assert sum("an older release wrote it" in text for text in caplog.messages) == 3
    check(model)
    on_disk(CHANGED, only=("b",))
    assert [f.status.st_nlink for f in model.attach(2).files[1:]] == [1, 1, 1]
    check_fetched(model, "b")


@pytest.mark.parametrize("lie", [("seed", 1 << 63), ("sums_at", 0)])
def test_a_seed_that_cannot_be_is_refused(on_disk: Publish, lie: tuple[str, int]) -> None:
    model = on_disk(TABLES)
    rewrite_header(model.folder / "1.segment", put(lie[1], "files", 0, lie[0]))
    with pytest.raises(SegmentError, match="the file of table 'a' has a seed of no block checksums"):
        model.attach(verify="header")
