"""Large tables lie in files of their own, which versions share where a table did not change."""

import grp
import itertools
import json
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

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import AccessError, LoaderError, NoSpace, SegmentError
from tableside.loader.load.load import Loaded, LoadSettings, load
from tableside.loader.model.model import parse_model
from tableside.loader.segment import layout
from tableside.loader.segment.header import PRELUDE, checksum
from tableside.loader.segment.memory import available_bytes
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.service.scrub import damage_of

Publish = Callable[..., Loaded]
ROWS, DIM = 30_000, 16
PAGE = 2 << 20
TABLES = {name: rows_of(ROWS, DIM, n) for n, name in enumerate("abc")}
CHANGED = {"a": 2 * TABLES["a"], "b": 3 * TABLES["b"], "c": 5 * TABLES["c"]}
SETTINGS = LoadSettings(threads=1)


@pytest.fixture(autouse=True)
def _every_table_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LARGE_PAGES", 0)


@pytest.fixture
def model(publish: Publish, root: Path) -> Model:
    """Version 1 of three tables in fp32, each in a file of its own."""
    publish(TABLES, formats=dict.fromkeys(TABLES, "fp32"), settings=SETTINGS)
    return Model(root, "demo")


@pytest.fixture
def again(model: Model, publish: Publish) -> Callable[..., Loaded]:
    """again("a", "b") -> version in which these tables are those of CHANGED, and the others the live ones."""

    def run(*only: str) -> Loaded:
        settings = LoadSettings(threads=1, only=only)
        return publish(CHANGED, formats=dict.fromkeys(TABLES, "fp32"), settings=settings)

    return run


def check(model: Model, version: int | None = None, *changed: str) -> None:
    """Every row of a version is right, and every byte is what was written."""
    segment = model.attach(version, "always")
    for name, table in segment.tables.items():
        found = choose().lookup(table, np.arange(ROWS), pooling=Pooling.NONE)
        np.testing.assert_array_equal(found, (CHANGED if name in changed else TABLES)[name])


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


def _swap(model: Model) -> None:
    """Gives table b of version 1 the file of another one."""
    (model.folder / "1.2.rows").unlink()
    shutil.copy(model.folder / "2.2.rows", model.folder / "1.2.rows")


WRONG: dict[str, tuple[Callable[[Model], object], type[LoaderError], str]] = {
    "missing": (
        lambda m: (m.folder / "1.2.rows").unlink(),
        SegmentError,
        r"1\.2\.rows is gone, the file of a table of \S+1\.segment",
    ),
    "of another version": (_swap, SegmentError, "not the file of table 'b' that the version names"),
    "of another table": (
        lambda m: shutil.copy(m.folder / "1.1.rows", (m.folder / "1.2.rows").resolve()),
        SegmentError,
        "not the file of table 'b' that the version names",
    ),
    "truncated": (
        lambda m: os.truncate(m.folder / "1.2.rows", PAGE - 1),
        SegmentError,
        "the file of table 'b' has 2097151 bytes; the version says 2097152",
    ),
    "its head flipped": (
        lambda m: flip_bit(m.folder / "1.2.rows", 17),
        SegmentError,
        "not the file of table 'b' that the version names",
    ),
    "a row flipped": (
        lambda m: flip_bit(m.folder / "1.2.rows", 4096 + 64 * 7),
        SegmentError,
        r"table 'b', rows \[0, 16384\): the checksum is wrong",
    ),
    "a link": (
        lambda m: (
            (m.folder / "1.2.rows").rename(m.folder / "x"),
            (m.folder / "1.2.rows").symlink_to(m.folder / "x"),
        ),
        AccessError,
        r"1\.2\.rows is a symbolic link",
    ),
    "of others": (
        lambda m: (m.folder / "1.2.rows").chmod(0o666),
        AccessError,
        "users other than .* can change it",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_refused_by_name(model: Model, again: Callable[..., Loaded], wrong: str) -> None:
    """Attached, activated or linked."""
    again("b")
    model.activate(1)
    damage, error, text = WRONG[wrong]
    damage(model)
    for call in (lambda: model.attach(1), lambda: again("a"), lambda: model.activate(1)):
        with pytest.raises(error, match=text):
            call()
    check(model, 2, "b")
    assert 3 not in model.versions()


def _rewrite(path: Path, change: Callable[[dict[str, Any]], None], size: int | None = None) -> None:
    """Changes the header of a segment, whose checksum is right afterwards. size: to cut it to."""
    data = bytearray(path.read_bytes())[:size]
    magic, version, header_bytes, whole, _ = PRELUDE.unpack_from(data)
    at = PRELUDE.size + header_bytes
    header = json.loads(data[PRELUDE.size : at])
    chunks = sum(-(-t["rows"] // t["chunk_rows"]) for t in header["tables"])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(header_bytes)
    assert len(text) == header_bytes
    found = checksum(text + data[at : at + 8 * chunks])
    data[:at] = PRELUDE.pack(magic, version, header_bytes, size or whole, found) + text
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)


def _put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    """value: or a function of the one before."""

    def change(header: dict[str, Any]) -> None:
        held: Any = header
        for key in path[:-1]:
            held = held[key]
        held[path[-1]] = value(held[path[-1]]) if callable(value) else value

    return change


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a name that is a list": (_put(["a"], "tables", 0, "name"), "a file of table 'a'"),
    "a file's table is a list": (_put(["a"], "files", 0, "table"), "or with no number"),
    "of no table": (_put("d", "files", 0, "table"), "a file of table 'd'"),
    "a table twice": (_put("a", "files", 1, "table"), "a file of table 'a'"),
    "another order": (_put(lambda f: f[::-1], "files"), "expected a multiple of 4096 from 2097152 on"),
    "no number": (_put("1", "files", 0, "checksum"), "or with no number"),
    "no bytes": (_put(0, "files", 2, "bytes"), "expected a multiple of 4096"),
    "more than there is": (_put(1 << 60, "files", 2, "bytes"), "expected a multiple of 4096"),
    "4 TiB": (_put(1 << 42, "files", 2, "bytes"), "the version says 4398046511104"),
    "a table over the head": (_put(lambda at: at - 4096, "tables", 0, "offset"), "table 'a' lies at bytes"),
    "a table in another's file": (_put(lambda at: at + PAGE, "tables", 0, "offset"), "table 'a' lies at"),
    "a table in the segment": (_put(8192, "tables", 0, "offset"), "table 'a' lies at bytes"),
    "another checksum": (_put(5, "files", 0, "checksum"), "not the file of table 'a'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_about_files_is_refused(model: Model, lie: str) -> None:
    change, text = LIES[lie]
    _rewrite(model.path(1), change)
    with pytest.raises(SegmentError, match=text):
        model.attach(1, "header")


def test_a_segment_of_no_whole_pages_before_files_is_refused(model: Model) -> None:
    def change(header: dict[str, Any]) -> None:
        for file in header["files"]:
            file["offset"] -= 100

    _rewrite(model.path(1), change, PAGE - 100)
    with pytest.raises(SegmentError, match="the segment has 2097052 bytes before files of tables"):
        model.attach(1, "header")


def test_a_file_in_which_the_table_lies_elsewhere_is_not_linked(
    model: Model, again: Callable[..., Loaded]
) -> None:
    """Another release may place it otherwise; it is copied then."""
    path = model.folder / "1.2.rows"
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes((data[:8192] + data[4096:])[:PAGE])
    path.chmod(0o400)
    _rewrite(model.path(1), _put(lambda at: at + 4096, "tables", 1, "offset"))
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
    assert [f.st_nlink for f in files] == [1, 2, 1, 2]


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


@pytest.mark.drawn(2)
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
