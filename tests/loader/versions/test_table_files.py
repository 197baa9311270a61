"""Large tables lie in files of their own, which versions share where a table did not change."""

import grp
import itertools
import os
import pickle
import resource
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keyed_tables import ids_of
from killing import What, run_until
from support import files_of, flip_bit, rows_of
from table_files import CHANGED, DIM, PAGE, ROWS, TABLES, check, put, rewrite_header

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import NoSpace, SegmentError
from tableside.loader.load.load import Loaded, load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment import layout
from tableside.loader.segment.memory import available_bytes
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.service.scrub import damage_of

Publish = Callable[..., Loaded]
pytestmark = pytest.mark.usefixtures("every_table_is_large")


def test_each_large_table_has_a_file(model: Model) -> None:
    """It is read-only and whole pages; the segment holds the rest. `remove_all` leaves none."""
    check(model)
    segment = model.attach()
    names = ["1.1.rows", "1.2.rows", "1.3.rows"]
    assert files_of(model.folder) == {"1.segment", *names} and segment.header.format_version == 4
    assert [f.path.name for f in segment.files] == ["1.segment", *names]
    sizes = [(model.folder / name).stat() for name in ("1.segment", *names)]
    assert {stat.S_IMODE(s.st_mode) for s in sizes} == {0o400}
    assert [s.st_size for s in sizes] == [PAGE, PAGE, PAGE, PAGE] and segment.size == 4 * PAGE
    assert (model.folder / "1.1.rows").read_bytes()[4096 : 4096 + TABLES["a"].nbytes] == TABLES["a"].tobytes()
    model.remove_all()
    assert files_of(model.folder) == set()


def test_small_tables_share_the_segment(
    publish: Publish, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table gets a file from LARGE_PAGES pages on, so that less than a hundredth is lost."""
    monkeypatch.setattr(layout, "LARGE_PAGES", 1)
    tables = {"small": rows_of(100, 8), "large": rows_of(PAGE // 32 + 1, 8)}
    publish(tables, formats=dict.fromkeys(tables, "fp32"))
    segment = Model(root, "demo").attach()
    assert [f.table for f in segment.header.files] == ["large"]
    np.testing.assert_array_equal(segment.tables["large"].packed.view(np.float32), tables["large"])


def test_unchanged_tables_are_linked(model: Model, again: Callable[..., Loaded], root: Path) -> None:
    """They take no room, nobody reads them again, and they outlive the version that they came with."""
    model.attach()  # verified, and noted
    before = {f.table: f.status for f in model.attach().files}
    loaded = again("b")
    after = {f.table: os.stat(f.path) for f in model.attach(verify="header").files}
    assert [after[t].st_ino == before[t].st_ino for t in "abc"] == [True, False, True]
    assert all(after[t].st_nlink == 2 for t in "ac") and after["b"].st_nlink == 1
    notes = {n.name for n in model.folder.iterdir() if n.name.startswith("2.") and "verified" in n.name}
    assert notes == {"2.1.rows.verified", "2.3.rows.verified"}
    check(model, 2, "b")
    check(model, 1)
    model.remove(1)
    assert files_of(model.folder) == {"2.segment", "2.1.rows", "2.2.rows", "2.3.rows"}
    check(model, 2, "b")
    assert loaded.header.files[0].checksum == model.attach().header.files[0].checksum


def test_a_load_of_one_table_needs_room_for_it_alone(
    again: Callable[..., Loaded], model: Model, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the segment and one file is enough; with less, nothing is left."""
    room = 2 * PAGE
    monkeypatch.setattr("tableside.loader.segment.memory.available_bytes", lambda where: room)
    again("c")
    check(model, 2, "c")
    room -= 1
    with pytest.raises(NoSpace, match="the segment needs 4,194,304"):
        again("a")
    assert files_of(model.folder) == {f"{v}.{n}" for v in (1, 2) for n in ("segment", *NAMES)}


NAMES = ("1.rows", "2.rows", "3.rows")


def test_compaction_links_what_no_change_touched(model: Model) -> None:
    """And writes the table that changed."""
    changes = [TableChanges("b", np.arange(10), CHANGED["b"][:10])]
    apply(model, ChangeBatch(iter(changes)))
    before = {f.table: f.status.st_ino for f in model.attach().files}
    compact(model)
    segment = model.attach(None, "always")
    assert segment.header.version == 2
    assert [before[f.table] == f.status.st_ino for f in segment.files[1:]] == [True, False, True]
    expected = np.concatenate([CHANGED["b"][:10], TABLES["b"][10:]])
    np.testing.assert_array_equal(segment.tables["b"].packed.view(np.float32), expected)


def test_deleted_row_numbers_leave_their_table_shared(root: Path, tmp_path: Path) -> None:
    """They stay deleted by a delta over each compacted version, which has their rows still."""
    np.savez(tmp_path / "c.npz", **TABLES)  # type: ignore[arg-type]
    tables = {"a": {"key": "a", "missing": "zero", "row_format": "fp32"}, "b": {"key": "b"}}
    load(parse_model({"name": "demo", "checkpoint": "c.npz", "tables": tables}, tmp_path), root)
    model = Model(root, "demo")
    gone = np.arange(2)
    apply(model, ChangeBatch(iter([TableChanges("a", gone, TABLES["a"][:2], np.ones(2, np.bool_))])))
    found = {(model.attach(1).files[1].status.st_ino, 1)}
    for _ in range(2):
        apply(model, ChangeBatch(iter([TableChanges("b", gone, CHANGED["b"][:2])])))
        compact(model)
        state = attach_state(model, None, "always")
        found.add((state.files[1].status.st_ino, len(state.deltas)))
        vectors = choose().lookup(state.tables["a"], np.arange(4), pooling=Pooling.NONE)
        np.testing.assert_array_equal(vectors, [*np.zeros((2, DIM)), *TABLES["a"][2:4]])
    assert len(found) == 1


@pytest.mark.parametrize("large", [(0, 1 << 30), (1 << 30, 0)], ids=["gone", "come"])
def test_versions_with_and_without_files_follow_each_other(
    publish: Publish, root: Path, large: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are copied then, as between releases that draw the line elsewhere."""
    formats = dict.fromkeys(TABLES, "fp32")
    monkeypatch.setattr(layout, "LARGE_PAGES", large[0])
    publish(TABLES, formats=formats)
    monkeypatch.setattr(layout, "LARGE_PAGES", large[1])
    publish(CHANGED, formats=formats, settings=LoadSettings(only=("a",)))
    check(Model(root, "demo"), 2, "a")


def test_files_of_raw_ids_hold_their_index(root: Path, tmp_path: Path) -> None:
    """`--only` links both."""
    arrays: dict[str, Any] = {"raw.weight": rows_of(ROWS, DIM), "raw.ids": ids_of(ROWS, 1), **TABLES}
    np.savez(tmp_path / "c.npz", **arrays)
    tables = {"raw": {"key": "raw.weight", "ids": "raw", "buckets": 4}, "a": {"key": "a"}}
    spec = parse_model({"name": "demo", "checkpoint": "c.npz", "tables": tables}, tmp_path)
    load(spec, root)
    load(spec, root, LoadSettings(only=("a",)))
    model = Model(root, "demo")
    before, after = model.attach(1), model.attach(2, "always")
    assert before.files[1].status.st_ino == after.files[1].status.st_ino
    first, second = (
        choose().lookup(s.tables["raw"], ids_of(ROWS, 1), pooling=Pooling.NONE) for s in (before, after)
    )
    np.testing.assert_array_equal(first, second)
    assert first.any()


def test_a_file_in_which_the_table_lies_elsewhere_is_not_linked(
    model: Model, again: Callable[..., Loaded]
) -> None:
    """Another release may place it otherwise; it is copied then."""
    path = model.folder / "1.2.rows"
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes((data[:8192] + data[4096:])[:PAGE])
    path.chmod(0o400)
    rewrite_header(model.path(1), put(lambda at: at + 4096, "tables", 1, "offset"))
    check(model, 1)
    again("a")
    check(model, 2, "a")


def test_a_version_that_is_removed_while_it_is_taken_over_is_copied(
    model: Model, again: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are mapped still."""
    again("b")
    taken_over = Model.writer

    def remove_first(self: Model, *arguments: Any) -> Any:
        model.activate(1)
        model.remove(2)
        return taken_over(self, *arguments)

    monkeypatch.setattr(Model, "writer", remove_first)
    again("a")
    check(model, 3, "a", "b")


def test_damage_of_a_shared_file_is_that_of_all_versions(model: Model, again: Callable[..., Loaded]) -> None:
    """Which the scrubber marks, though a process has read them before; none of them is taken over."""
    model.attach()
    again("b")
    status = os.stat(model.folder / "1.3.rows")
    flip_bit(model.folder / "1.3.rows", 4096 + 64 * 7)
    os.utime(model.folder / "1.3.rows", ns=(status.st_atime_ns, status.st_mtime_ns))
    again_damaged = pytest.raises(SegmentError, match=r"1\.3\.rows|2\.3\.rows: table 'c', rows")
    with again_damaged:
        again("a")
    damage = damage_of(model, 2)
    assert damage is not None and damage.file == "2.3.rows"
    assert "2.3.rows: table 'c', rows [0, 16384)" in damage.text
    model.mark_damaged(2, "2.2.rows")
    assert model.damaged_versions() == [2]
    model.mark_damaged(2, damage.file)
    assert model.damaged_versions() == [1, 2]
    loaded = again()
    assert loaded.version == 3 and model.good() == 3


def test_a_note_is_no_matter(model: Model, again: Callable[..., Loaded]) -> None:
    """One of a killed load that is left goes by `gc`; one that cannot be linked is done without."""
    model.attach()
    (model.folder / "2.1.rows.verified").write_text("{}")
    again("b")
    check(model, 2, "b")
    (model.folder / "9.1.rows.verified").write_text("{}")
    assert model.folder / "9.1.rows.verified" in model.collect(8)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to a group")
def test_a_group_that_comes_later_reads_all_files(
    model: Model, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the version before are copied for it, and linked for the next one."""
    name = grp.getgrgid(next(g.gr_gid for g in grp.getgrall() if g.gr_gid)).gr_name
    for version in (2, 3):
        settings = LoadSettings(threads=1, only=("b",), group=name)
        publish(CHANGED, formats=dict.fromkeys(TABLES, "fp32"), settings=settings)
        files = [os.stat(f.path) for f in model.attach(version).files]
        assert {(f.st_gid, stat.S_IMODE(f.st_mode)) for f in files} == {(grp.getgrnam(name).gr_gid, 0o440)}
    assert [f.st_nlink for f in files] == [1, 2, 2, 2]


def test_files_are_opened_one_by_one(model: Model) -> None:
    """A version of more tables than a process may open is attached."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 1, limits[1]))
    os.close(opened.pop()), os.close(opened.pop())
    try:
        Segment(model.path(1), "header")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(opened.pop())


def test_a_pickle_attaches_all_files(model: Model) -> None:
    segment = pickle.loads(pickle.dumps(model.attach()))
    assert isinstance(segment, Segment) and len(segment.files) == 4
    np.testing.assert_array_equal(segment.tables["c"].packed.view(np.float32), TABLES["c"])


def test_a_version_that_goes_while_it_is_opened_is_missing_alone(
    model: Model, again: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader who opened the segment before it went finds the next live version."""
    from tableside.loader.versions.folder import Folder

    opened = Folder.open

    def remove_between(self: Folder, name: str, *flags: int) -> int:
        if name == "1.2.rows" and model.current() == 1:
            monkeypatch.setattr(Folder, "open", opened)
            again("a")
            model.remove(1)
        return opened(self, name, *flags)

    monkeypatch.setattr(Folder, "open", remove_between)
    assert model.attach().header.version == 2


def load_whole(again: Callable[..., Loaded], model: Model) -> None:
    again()


def load_some(again: Callable[..., Loaded], model: Model) -> None:
    again("b")


def compact_it(again: Callable[..., Loaded], model: Model) -> None:
    compact(model)


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("what", ["kill", "full"])
@pytest.mark.parametrize("work", [load_whole, load_some, compact_it])
def test_every_step(
    model: Model, again: Callable[..., Loaded], work: Callable[..., None], what: What, tmp_path: Path
) -> None:
    """After each, version 1 or 2 is live and whole, and `gc` leaves the files of versions alone."""
    apply(model, ChangeBatch(iter([TableChanges("c", np.arange(3), TABLES["c"][:3])])))
    if work is load_some:
        compact(model)  # its files are linked from version 1
    kept = tmp_path / "kept"
    shutil.copytree(model.folder, kept)
    first = model.current()
    for step in itertools.count(1):
        shutil.rmtree(model.folder)
        shutil.copytree(kept, model.folder)
        was_ended = run_until(step, what, lambda: work(again, model), (NoSpace, OSError))
        live = model.current()
        changed = {load_whole: "abc", load_some: "b"}.get(work, "") if live > first else ""
        check(model, live, *changed)
        if what == "full":
            partials = [n for n in os.listdir(model.folder) if n.endswith(".partial")]
            assert not partials
        model.collect(8)
        versions = {v: model.attach(v, "header").files for v in model.versions()}
        expected = {f.path.name for files in versions.values() for f in files}
        found = {n for n in files_of(model.folder) if not n.endswith(".delta")}
        assert found == expected
        work(again, model)
        if not was_ended:
            break
    assert step > 12, f"it has {step - 1} steps"
    assert attach_state(model).header.version > first
    assert available_bytes(model.folder) > 0
