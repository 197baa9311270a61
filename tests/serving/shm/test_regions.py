"""Regions of shared memory in one process: which objects are taken, when they end, and the list that
workers share."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_memory import on_small_tmpfs

from tableside.serving.errors import ApiError
from tableside.serving.shm import regions, shared_list
from tableside.serving.shm.regions import RegionEntry, RegionRegistry, Regions, Slice

SHM = Path("/dev/shm")
NO_OBJECT = "its key names no object that may be used"


@pytest.fixture
def make() -> Iterator[Callable[..., Path]]:
    """make(bytes, prefix) -> a new object of shared memory, which goes with the test."""
    made: list[Path] = []

    def run(size: int = 4096, prefix: str = "test") -> Path:
        made.append(SHM / f"{prefix}-{uuid.uuid4().hex[:12]}")
        made[-1].write_bytes(bytes(size))
        made[-1].chmod(0o600)
        return made[-1]

    yield run
    for path in made:
        path.unlink(missing_ok=True)


def descriptors(path: Path) -> int:
    """How many descriptors of this process are of a file, by its name as it was opened."""
    found = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    ]
    return sum(name.removesuffix(" (deleted)") == str(path) for name in found)


# ---- which objects are taken ----


def refuses(key: str) -> None:
    """The one error for all that may not be named; it says nothing of the key."""
    with pytest.raises(ApiError, match=NO_OBJECT) as caught:
        Regions(RegionRegistry()).register("r", key, 0, 16)
    assert caught.value.status == 400
    assert "shm" not in caught.value.message
    assert key.strip("/.") == "" or key not in caught.value.message


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "//",
        ".",
        "..",
        "/..",
        "/../etc/passwd",
        "a/b",
        "/tableside/demo/1.segment",
        "x\0y",
        "x" * 300,
        "\ud800",
        "no-such",
    ],
    ids=ascii,
)
def test_keys_that_name_no_object(key: str) -> None:
    refuses(key)


def test_a_segment_cannot_be_named(publish: Callable[..., Any], root: Path) -> None:
    """Neither by a path, nor by a hard link to it."""
    publish({"t": np.ones((8, 4), np.float32)})
    (segment,) = root.glob("demo/*.segment")
    refuses(str(segment.relative_to(SHM)))
    refuses(f"/{segment.relative_to(SHM)}")
    link = SHM / f"test-{uuid.uuid4().hex[:12]}"
    os.link(segment, link)
    try:
        refuses(f"/{link.name}")
    finally:
        link.unlink()


@pytest.mark.parametrize("prefix", regions.RESERVED)
def test_reserved_names(make: Callable[..., Path], prefix: str) -> None:
    """Objects of ours that lie in /dev/shm itself, semaphores and hidden files are refused though they are
    files of this user."""
    refuses(f"/{make(4096, prefix).name}")


def test_what_is_no_file(make: Callable[..., Path]) -> None:
    """A symbolic link, a FIFO, which is opened without waiting for its other end, and a folder."""
    target, name = make(), SHM / f"test-{uuid.uuid4().hex[:12]}"
    for create, remove in (
        (lambda: name.symlink_to(target), name.unlink),
        (lambda: os.mkfifo(name), name.unlink),
        (name.mkdir, name.rmdir),
    ):
        create()  # type: ignore[operator]
        try:
            refuses(f"/{name.name}")
        finally:
            remove()
    assert not descriptors(name)


def test_another_users_object(make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that belongs to somebody else is refused, though this process could open it."""
    path = make()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    refuses(path.name)
    assert not descriptors(path)


def test_the_object_must_hold_the_region(make: Callable[..., Path]) -> None:
    path, one = make(4096), Regions(RegionRegistry())
    for offset, size, message in (
        (0, 4097, "its object ends before offset 0 . byte_size 4,097"),
        (4096, 1, "its object ends before"),
        (1 << 61, 1 << 61, "its object ends before"),
        (0, 0, "expected an offset from 0 and a byte_size from 1"),
        (-1, 8, "expected an offset from 0"),
        (1 << 70, 8, "expected an offset from 0"),
    ):
        with pytest.raises(ApiError, match=message):
            one.register("r", path.name, offset, size)
    assert not one.status(None)
    one.register("r", path.name, 4095, 1)
    with pytest.raises(ApiError, match="region 'r' is registered already; unregister it first"):
        one.register("r", path.name, 0, 8)


@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128])
def test_names_have_a_length(make: Callable[..., Path], name: str) -> None:
    with pytest.raises(ApiError, match="expected 1 to 255 bytes"):
        Regions(RegionRegistry()).register(name, make().name, 0, 8)


def test_limits_hold_for_all_regions_together(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all workers; what was unregistered leaves room."""
    monkeypatch.setattr(regions, "MOST_REGIONS", 3)
    monkeypatch.setattr(regions, "MOST_BYTES", 9000)
    path, registry = make(4096), RegionRegistry()
    one, other = Regions(registry), Regions(registry)
    one.register("a", path.name, 0, 4096)
    other.register("b", path.name, 0, 4096)
    with pytest.raises(ApiError, match=r"would have 9,192 bytes; the limit is 9,000"):
        one.register("c", path.name, 0, 1000)
    one.register("c", path.name, 0, 8)
    with pytest.raises(ApiError, match=r"3 shared memory regions are registered, the limit"):
        other.register("d", path.name, 0, 8)
    other.unregister("a")
    one.register("d", path.name, 0, 8)


# ---- how long they last ----


def test_every_worker_knows_a_region(make: Callable[..., Path]) -> None:
    """One registers it, another reads and writes it, a third unregisters it; descriptors go with it."""
    path, registry = make(64), RegionRegistry()
    one, other, third = (Regions(registry) for _ in range(3))
    one.register("r", f"/{path.name}", 16, 32)
    region = other.find("r")
    region.write(8, memoryview(b"12345678"))
    assert path.read_bytes() == bytes(24) + b"12345678" + bytes(32)
    found = bytearray(32)
    region.read(0, memoryview(found))
    assert found == bytes(8) + b"12345678" + bytes(16)
    del region
    third.unregister("r")
    for each in (one, other, third):
        with pytest.raises(ApiError, match="region 'r' is not registered"):
            each.find("r")
    gc.collect()
    assert not descriptors(path)


def test_a_request_under_way_keeps_its_region(make: Callable[..., Path]) -> None:
    """Unregistering ends no request: its answer goes into the object that it named, and the descriptor
    goes after that."""
    path, one = make(64), Regions(RegionRegistry())
    one.register("r", path.name, 0, 64)
    region = one.find("r")
    one.unregister(None)
    one.register("r", make(64).name, 0, 64)
    region.write(0, memoryview(b"late"))
    assert path.read_bytes()[:4] == b"late"
    assert one.find("r") is not region
    assert descriptors(path) == 1
    del region
    gc.collect()
    assert not descriptors(path)


def test_a_name_that_was_given_anew_is_another_object(make: Callable[..., Path]) -> None:
    """A worker that has not opened a region yet does not take another object for it; one that has does not
    either."""
    path, registry = make(64), RegionRegistry()
    one, other = Regions(registry), Regions(registry)
    one.register("r", path.name, 0, 64)
    held = path.with_name(path.name + "-held")
    path.rename(held)  # so that the new one cannot have its inode
    try:
        path.write_bytes(bytes(64))
        with pytest.raises(ApiError, match="'r' is not registered, or its object was removed"):
            other.find("r")
        held.unlink()
        with pytest.raises(ApiError, match="'r' is not registered, or its object was removed"):
            one.find("r")
    finally:
        held.unlink(missing_ok=True)


def test_removed_objects_are_unregistered(make: Callable[..., Path]) -> None:
    """By the workers' regular look, so that nobody keeps their memory."""
    path, registry = make(64), RegionRegistry()
    one, other = Regions(registry), Regions(registry)
    one.register("r", path.name, 0, 64)
    other.find("r")
    assert descriptors(path) == 2
    one.look()
    assert one.status("r")
    path.unlink()
    other.look()
    one.look()
    gc.collect()
    assert not registry.read()[1]
    assert not descriptors(path)


def test_a_region_is_forgotten_where_it_is_still_the_same(make: Callable[..., Path]) -> None:
    path, one = make(64), Regions(RegionRegistry())
    mine = one.register("mine", path.name, 0, 64)
    one.forget(mine._replace(offset=1))
    assert one.status(None) == [mine]
    one.forget(mine)
    assert not one.status(None)


# ---- truncated objects ----


def test_a_truncated_object_is_an_error(make: Callable[..., Path]) -> None:
    """Found where the region is named, where it is read and where it is written; it is not made longer
    again by that."""
    path, one = make(8192), Regions(RegionRegistry())
    one.register("r", path.name, 0, 8192)
    region = one.find("r")
    os.truncate(path, 4096)
    with pytest.raises(
        ApiError, match="its object is shorter than the 8,192 bytes from byte 0 on that were registered"
    ):
        one.find("r")
    with pytest.raises(ApiError, match="its object is shorter"):
        region.read(0, memoryview(bytearray(8192)))
    with pytest.raises(ApiError, match="its object is shorter"):
        region.write(0, memoryview(bytes(8)))
    assert path.stat().st_size == 4096
    os.truncate(path, 8192)
    region.read(0, memoryview(bytearray(8192)))


FULL = """
import os, sys
import numpy as np
from small_memory import fill
from pathlib import Path
from tableside.serving.shm import regions

path = Path("/dev/shm/holes")
path.touch(0o600)
os.truncate(path, 1 << 20)
known = regions.Regions(regions.RegionRegistry())
known.register("r", path.name, 0, 1 << 20)
region = known.find("r")
fill(Path("/dev/shm"))
into = memoryview(bytearray(1 << 20))
region.read(0, into)
assert not any(into)
try:
    region.write(0, into)
    print("written")
except regions.ApiError as error:
    print(error.status, error)
Path("/dev/shm/filler").unlink()
region.write(0, memoryview(b"\\2" * (1 << 20)))
print(set(path.read_bytes()))
"""


def test_no_room() -> None:
    """An object with holes takes memory when it is written, and none when it is read. Where there is none
    it takes no bytes."""
    paths = os.pathsep.join([str(Path(__file__).parent.parent.parent / "helpers"), *sys.path])
    command = [*on_small_tmpfs(Path("/dev/shm"), "size=2m"), sys.executable, "-c", FULL]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths}
    )
    assert not done.stderr
    refusal = (
        "507 shared memory region 'r' takes no more bytes (No space left on device); free shared "
        "memory, then try again"
    )
    assert done.stdout.splitlines() == [refusal, "{2}"]


# ---- slices ----


def test_slices_are_joined(make: Callable[..., Path]) -> None:
    """Where they follow each other on both sides, and only there; empty ones go."""
    one, path = Regions(RegionRegistry()), make(4096)
    one.register("r", path.name, 0, 4096)
    one.register("s", path.name, 0, 4096)
    r, s = one.find("r"), one.find("s")
    given = [
        Slice(r, 0, 8, 0),
        Slice(r, 100, 0, 5),
        Slice(r, 8, 8, 8),
        Slice(r, 16, 8, 32),
        Slice(r, 32, 8, 40),
        Slice(s, 40, 8, 48),
    ]
    assert regions.joined(given) == [Slice(r, 0, 16, 0), *given[3:]]


def test_slices_that_overlap(make: Callable[..., Path]) -> None:
    """Two regions may be parts of one object, and a region in the middle of it begins elsewhere."""
    one, path, other = Regions(RegionRegistry()), make(4096), make(4096)
    one.register("r", path.name, 0, 4096)
    one.register("s", path.name, 100, 1000)
    one.register("t", other.name, 0, 4096)
    r, s, t = (one.find(n) for n in "rst")
    assert not regions.overlap([Slice(r, 0, 8, 0), Slice(r, 8, 8, 0), Slice(t, 4, 8, 0)])
    assert regions.overlap([Slice(r, 8, 8, 0), Slice(t, 0, 8, 0), Slice(r, 0, 9, 0)])
    assert regions.overlap([Slice(r, 100, 8, 0), Slice(s, 0, 1, 0)])
    assert regions.overlap([Slice(r, 0, 100, 0), Slice(r, 10, 10, 0), Slice(r, 50, 10, 0)])
    assert not regions.overlap([Slice(r, 0, 100, 0), Slice(s, 0, 1, 0), Slice(r, 50, 0, 0)])


# ---- the list ----


def entry(name: str) -> RegionEntry:
    return RegionEntry(name, "key", 0, 1, 2, 3)


def _add_and_remove(registry: RegionRegistry, name: str, rounds: int, begin: Barrier) -> None:
    begin.wait()
    for _ in range(rounds):
        registry.change(lambda entries: [*entries, entry(name)])
        assert entry(name) in registry.read()[1]
        registry.change(lambda entries: [e for e in entries if e.name != name])
    registry.change(lambda entries: [*entries, entry(name)])


def test_processes_change_the_list_at_once() -> None:
    """No change is lost and none is read half, over processes that got the registry as workers do."""
    context = multiprocessing.get_context("forkserver")
    registry, names, rounds = RegionRegistry(), ["a" * 9, "b" * 5000, "c"], 300
    begin = context.Barrier(len(names) + 1)
    processes = [
        context.Process(target=_add_and_remove, args=(registry, name, rounds, begin)) for name in names
    ]
    for process in processes:
        process.start()
    begin.wait()
    seen = set()
    while any(process.is_alive() for process in processes):
        seen.add(len(registry.read()[1]))
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(e.name for e in registry.read()[1]) == sorted(names)
    assert registry.generation == len(names) * (2 * rounds + 1)
    assert seen <= {0, 1, 2, 3}


def _die_in_a_change(registry: RegionRegistry) -> None:
    write = os.pwrite

    def half(fd: int, text: bytes, at: int) -> int:
        write(fd, text[: len(text) // 2], at)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    os.pwrite = half  # type: ignore[assignment]
    registry.change(lambda entries: [entry("x" * 1000)])


def test_a_process_that_dies_in_a_change() -> None:
    """It leaves the list as it was, and no lock behind."""
    registry = RegionRegistry()
    registry.change(lambda entries: [entry("a")])
    process = multiprocessing.get_context("fork").Process(target=_die_in_a_change, args=(registry,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert registry.read() == (1, [entry("a")])
    registry.change(lambda entries: [*entries, entry("b")])
    assert registry.read() == (2, [entry("a"), entry("b")])


def test_the_list_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than it holds is refused, and what it holds is kept; as many regions as may be fit."""
    registry = RegionRegistry()
    longest = [
        RegionEntry("\x01" * 255, "\x01" * 255, 1 << 62, 1 << 62, 1 << 62, 1 << 62, "x" * 88)
    ] * regions.MOST_REGIONS
    registry.change(lambda entries: longest)
    assert registry.read()[1] == longest
    monkeypatch.setattr(shared_list, "HALF_BYTES", 1 << 12)
    small = RegionRegistry()
    with pytest.raises(Exception, match=r"the list of client regions has .* bytes; expected at most 4,088"):
        small.change(lambda entries: longest)
    assert small.read() == (0, [])
