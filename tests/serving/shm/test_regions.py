"""Regions of shared memory in one process: which objects are taken, and what is read and written."""

import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_memory import on_small_tmpfs
from support import descriptors

from tableside.serving.errors import ApiError
from tableside.serving.shm import regions
from tableside.serving.shm.regions import RegionRegistry, Regions, Slice

SHM = Path("/dev/shm")
NO_OBJECT = "its key names no object that may be used"


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


def test_a_write_that_is_cut_short_goes_on_where_it_stopped(make: Callable[..., Path]) -> None:
    """Bytes that a file may not have stand for memory that ends in the middle of the values."""
    path, one = make(8192), Regions(RegionRegistry())
    one.register("r", path.name, 0, 8192)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(ApiError, match=r"takes no more bytes \(File too large\)"):
            one.find("r").write(2048, memoryview(b"\1" * 4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == bytes(2048) + b"\1" * 2048 + bytes(4096)


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
