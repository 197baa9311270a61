"""Who else may touch what is published: squatters, links, modes, groups, locks; and a shared memory that
is full."""

import grp
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from small_memory import fill, mounted_tmpfs
from support import rows_of, run_tableside, until

from tableside.loader.errors import AccessError, LoaderError, SegmentError, VersionError
from tableside.loader.load.load import Loaded
from tableside.loader.load.settings import LoadSettings
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.folder import Folder, make_folder
from tableside.loader.versions.versions import Model, models

pytestmark = pytest.mark.quick

Publish = Callable[..., Loaded]
STRANGER = 12345  # a user of this machine who is neither root nor the one that runs the tests

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def as_stranger(action: Callable[[], str], gid: int = STRANGER) -> str:
    """What `action` returns, or the error that it raises, in a process of another user."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(STRANGER)
            said = action()
        except (LoaderError, OSError) as error:
            said = str(error)
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(VersionError, match=r"cannot make \S+/models: Not a directory; choose another --root"):
        make_folder(tmp_path / "file" / "root" / "models")


def test_what_is_published_is_this_users_alone(publish: Publish, root: Path) -> None:
    """Segments can be read by their owner and written by nobody; locks can be opened by their owner alone."""
    publish({"t": rows_of(10, 8)})
    folder = root / "demo"
    assert (mode(root), mode(folder)) == (0o700, 0o700)
    found = {p.name: mode(p) for p in folder.iterdir()}
    assert found == {
        "1.segment": 0o400,
        "current": 0o600,
        "current.new": 0o600,
        "load.lock": 0o600,
        "record.lock": 0o600,
    }


def test_a_group_that_was_named_can_read(publish: Publish, root: Path) -> None:
    """And goes on to be able to with later loads that do not name it."""
    publish({"t": rows_of(10, 8)}, settings=LoadSettings(group="daemon"))
    publish({"t": rows_of(10, 8)})
    folder = root / "demo"
    assert (mode(root), mode(folder)) == (0o711, 0o750)
    for name in ("1.segment", "2.segment"):
        assert (mode(folder / name), (folder / name).group()) == (0o440, "daemon")
    assert mode(folder / "current") == 0o640
    assert mode(folder / "load.lock") == 0o600
    with pytest.raises(AccessError, match="there is no group 'nobody-has-this'"):
        publish({"t": rows_of(10, 8)}, settings=LoadSettings(group="nobody-has-this"))


@as_root
def test_a_member_of_the_group_reads_and_names_the_owner(publish: Publish, root: Path) -> None:
    """A server of another user attaches a model that root, whom everybody trusts, or a user that it names
    published."""
    publish({"t": rows_of(10, 8)}, settings=LoadSettings(group="daemon"))

    def attach(owner: str | None) -> str:
        return as_stranger(
            lambda: str(Model(root, "demo", owner).attach().tables["t"].rows),
            gid=grp.getgrnam("daemon").gr_gid,
        )

    assert attach(None) == "10"
    for path in (root, root / "demo", *(root / "demo").iterdir()):
        os.chown(path, 54321, -1)
    assert "belongs to user 54321, not to" in attach(None)
    assert attach("54321") == "10"


@as_root
@pytest.mark.parametrize("what", ["root", "model", "segment", "record"])
def test_what_another_user_owns_is_refused(what: str, publish: Publish, root: Path) -> None:
    """At load and at attach: that user could have put anything there."""
    publish({"t": rows_of(10, 8)})
    model = Model(root, "demo")
    path = {
        "root": root,
        "model": root / "demo",
        "segment": model.path(1),
        "record": root / "demo" / "current",
    }[what]
    os.chown(path, STRANGER, -1)
    with pytest.raises(AccessError, match=rf"{path} belongs to user 12345, not to root"):
        model.attach()
    if what != "segment":  # which a load does not read
        with pytest.raises(AccessError, match="belongs to user 12345"):
            publish({"t": rows_of(10, 8)})


@pytest.mark.parametrize("what", ["root", "model", "segment"])
@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_what_others_can_write_to_is_refused(what: str, bits: int, publish: Publish, root: Path) -> None:
    """With the command that mends it."""
    publish({"t": rows_of(10, 8)})
    model = Model(root, "demo")
    path = {"root": root, "model": root / "demo", "segment": model.path(1)}[what]
    path.chmod(mode(path) | bits)
    with pytest.raises(AccessError, match=rf"chmod go-w {path}"):
        model.attach()


def test_a_root_that_is_not_there_has_no_models(tmp_path: Path) -> None:
    assert models(tmp_path / "none") == []


def test_a_folder_says_which_entries_exist(tmp_path: Path) -> None:
    """A link that leads nowhere is one; what is not there is none."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with Folder(tmp_path) as folder:
        assert [folder.exists(name) for name in ("file", "link", "none")] == [True, True, False]


def test_a_root_that_is_a_link_is_refused(publish: Publish, root: Path, tmp_path: Path) -> None:
    root.symlink_to(tmp_path)
    try:
        with pytest.raises(AccessError, match="is a symbolic link or a file"):
            publish({"t": rows_of(10, 8)})
        with pytest.raises(AccessError, match="is a symbolic link"):
            models(root)
        assert not (tmp_path / "demo").exists()
    finally:
        root.unlink()


@pytest.mark.parametrize("name", ["current.new", "current", "load.lock", "record.lock", "2.segment.partial"])
def test_no_link_is_followed(name: str, publish: Publish, root: Path, tmp_path: Path) -> None:
    """A load writes to no file that a link in its folder names; the victim's bytes stay."""
    publish({"t": rows_of(10, 8)})
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = root / "demo" / name
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    if name.endswith(".partial"):  # a leftover, removed
        publish({"t": rows_of(10, 8)})
    else:
        with pytest.raises(AccessError, match=f"{name} is a symbolic link; expected a file; remove it"):
            publish({"t": rows_of(10, 8)})
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_record_that_is_no_file(kind: str, publish: Publish, root: Path) -> None:
    """Nothing waits for a FIFO's other end."""
    publish({"t": rows_of(10, 8)})
    path = root / "demo" / "current"
    path.unlink()
    os.mkfifo(path, 0o600) if kind == "fifo" else path.mkdir()
    with pytest.raises((AccessError, IsADirectoryError)):
        Model(root, "demo").attach()


@as_root
def test_a_stranger_cannot_hold_a_lock(publish: Publish, root: Path) -> None:
    """Whoever can open a file can lock it: nobody else can open these."""
    publish({"t": rows_of(10, 8)})
    for path in (root, root / "demo"):
        path.chmod(0o755)  # as older releases made them
    for name in ("load.lock", "record.lock"):
        (root / "demo" / name).chmod(0o644)
    publish({"t": rows_of(10, 8)})  # takes both locks for itself
    for name in ("load.lock", "record.lock"):
        path = root / "demo" / name
        assert "Permission denied" in as_stranger(lambda path=path: str(os.open(path, os.O_RDONLY)))


def test_a_lock_that_is_never_let_go(publish: Publish, root: Path) -> None:
    """Who waits for it is told, after a while, which process holds it."""
    publish({"t": rows_of(10, 8)})
    said = rf"process {os.getpid()} holds .*record.lock for more than 0.1 s; wait for it"
    with (
        Model(root, "demo").opened() as folder,
        Model(root, "demo").opened() as again,
        folder.lock("record.lock"),
    ):
        lock = again.lock("record.lock", 0.1)
        with pytest.raises(VersionError, match=said):
            lock.__enter__()


def test_a_killed_load_before_the_flip_does_not_cost_the_version_to_roll_back_to(
    publish: Publish, root: Path
) -> None:
    """What was never live does not count for --keep; the version that was stays; the killed one's number
    is not given again."""
    publish({"t": rows_of(10, 8)})
    publish({"t": rows_of(20, 8)})
    model = Model(root, "demo")
    child = os.fork()
    if child == 0:
        import tableside.loader.versions.versions

        tableside.loader.versions.versions.flip = lambda folder: os.kill(os.getpid(), 9)
        publish({"t": rows_of(30, 8)})
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 9
    assert (model.versions(), model.current()) == ([1, 2, 3], 2)
    loaded = publish({"t": rows_of(40, 8)})
    model.collect(keep=1)
    assert (loaded.version, model.versions(), model.current()) == (4, [2, 4], 4)


def test_a_version_that_waits_to_be_activated_stays(publish: Publish, root: Path) -> None:
    """Until a newer one is live; --keep counts those that were live."""
    publish({"t": rows_of(10, 8)})
    publish({"t": rows_of(20, 8)})
    publish({"t": rows_of(30, 8)}, settings=LoadSettings(activate=False))
    model = Model(root, "demo")
    model.collect(keep=1)
    assert (model.versions(), model.current(), model.last_good()) == ([1, 2, 3], 2, [2, 1])
    publish({"t": rows_of(40, 8)})
    model.collect(keep=1)
    assert (model.versions(), model.current()) == ([2, 4], 4)


def test_a_record_of_an_older_release(publish: Publish, root: Path) -> None:
    """Which does not say what was live: every published version counts as if it was."""
    for rows in (10, 20, 30):
        publish({"t": rows_of(rows, 8)})
    (root / "demo" / "current").write_text(json.dumps({"current": 3, "latest": 3}))
    model = Model(root, "demo")
    assert (model.current(), model.last_good()) == (3, [3, 2, 1])
    model.collect(keep=1)
    assert model.versions() == [2, 3]
    assert publish({"t": rows_of(40, 8)}).version == 4


def test_another_models_segment_is_refused(publish: Publish, root: Path) -> None:
    """A copy under another name or number has the right checksums and the wrong rows."""
    publish({"t": rows_of(10, 8)})
    publish({"t": rows_of(10, 8)}, name="other")
    model = Model(root, "demo")
    shutil.copy(root / "other" / "1.segment", root / "demo" / "2.segment")
    with pytest.raises(Exception, match="holds version 1 of model 'other'; expected version 2 of 'demo'"):
        model.attach(2)
    shutil.copy(root / "demo" / "1.segment", root / "demo" / "3.segment")
    with pytest.raises(Exception, match="holds version 1 of model 'demo'; expected version 3 of 'demo'"):
        model.attach(3)
    with pytest.raises(Exception, match="expected version 3"):
        model.activate(3)
    assert model.current() == 1


def test_a_version_that_was_found_damaged_is_not_attached(publish: Publish, root: Path) -> None:
    """Not as the live one, not by its number, and it is not made live again; another version can be."""
    publish({"t": rows_of(10, 8)})
    publish({"t": rows_of(20, 8)})
    model = Model(root, "demo")
    model.mark_damaged(2)
    for attach in (lambda: model.attach(), lambda: model.attach(2, "header"), lambda: model.activate(2)):
        with pytest.raises(SegmentError, match="rows were found to have changed after they were written"):
            attach()
    assert model.good() == 1
    model.activate(1)
    assert model.attach().tables["t"].rows == 10


@pytest.mark.thorough
def test_more_than_three_thousand_tables(publish: Publish, root: Path) -> None:
    """The header is as large as it has to be."""
    tables = {f"table_{n}": rows_of(1, 4, n) for n in range(3500)}
    publish(tables)
    segment = Model(root, "demo").attach()
    assert len(segment.tables) == 3500
    assert Segment(segment.path).header == segment.header


# ---- a full shared memory ----


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB with three versions of a model, in which not one page is free."""
    with mounted_tmpfs(tmp_path / "shm", "8m") as folder:
        model = tmp_path / "model.toml"
        np.save(tmp_path / "t.npy", rows_of(5000, 64))
        model.write_text('name = "demo"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
        for _ in range(3):
            found = run_tableside("load", model, "--keep", 2, "--root", folder / "root")
            assert found.returncode == 0, found.stderr
        fill(folder)
        assert os.statvfs(folder).f_bavail == 0
        yield folder / "root"


@pytest.mark.thorough
@pytest.mark.parametrize("command", [("gc", "--keep", 0), ("remove", "demo", 1), ("remove", "demo", "--all")])
def test_a_full_shared_memory_can_be_emptied(command: tuple[object, ...], full: Path) -> None:
    """Removing needs no room; numbers are not given again afterwards."""
    found = run_tableside(*command, "--root", full)
    assert (found.returncode, found.stderr) == (0, "")
    left = {("gc", 0): [3], ("remove", 1): [2, 3], ("remove", "--all"): []}[(command[0], command[-1])]
    model = Model(full, "demo")
    assert (model.versions(), model.record().latest) == (left, 3)
    assert os.statvfs(full).f_bavail > 0


@pytest.mark.thorough
def test_a_full_shared_memory_without_room_for_a_record(full: Path) -> None:
    """Also where the page that was kept for the next record is gone: what is removed makes room first."""
    (full / "demo" / "current.new").unlink()
    with (full.parent / "more").open("wb") as more:
        os.posix_fallocate(more.fileno(), 0, 4096)
    assert os.statvfs(full).f_bavail == 0
    found = run_tableside("remove", "demo", "--all", "--root", full)
    assert (found.returncode, found.stderr) == (0, "")
    model = Model(full, "demo")
    assert (model.versions(), model.record().latest, model.record().current) == ([], 3, 0)


@pytest.mark.thorough
def test_a_full_shared_memory_can_be_rolled_back(full: Path) -> None:
    """The flip has its page."""
    for version in (1, 3, 2, 1):
        found = run_tableside("activate", "demo", version, "--root", full)
        assert (found.returncode, found.stderr) == (0, "")
        assert Model(full, "demo").current() == version


def test_the_folder_is_closed(publish: Publish, root: Path) -> None:
    """No descriptor stays open, whatever is asked or refused."""
    publish({"t": rows_of(10, 8)})
    model = Model(root, "demo")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        model.record()
        model.versions()
        model.collect(1)
        with pytest.raises(VersionError):
            model.attach(7)
        with pytest.raises(FileNotFoundError):
            Folder(root / "nothing")
    until(lambda: len(os.listdir("/proc/self/fd")) == before, what="descriptors to be closed")
