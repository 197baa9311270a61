"""Mapped files that are truncated, or have no memory for a page: what is read and written says so, and nobody ends."""

import gc
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_memory import on_small_tmpfs

_mapping = pytest.importorskip("tableside.serving._mapping")
PAGE, PAGES = os.sysconf("SC_PAGESIZE"), 16


@pytest.fixture
def file() -> Iterator[int]:
    """A descriptor of PAGES pages of shared memory, all bytes 1, without a name."""
    path = Path(f"/dev/shm/test-{uuid.uuid4().hex[:12]}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    path.unlink()
    os.write(fd, b"\1" * PAGE * PAGES)
    yield fd
    os.close(fd)


def mapped(fd: int, offset: int, size: int) -> tuple[_mapping.Mapping, np.ndarray]:
    found = _mapping.map(fd, offset, size)
    return found, np.frombuffer(memoryview(found), np.uint8)


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, PAGE + 100])
def test_a_part_of_a_file_at_any_offset(file: int, offset: int) -> None:
    """Read, and written where others see it; nothing beside it changes."""
    one, values = mapped(file, offset, 2 * PAGE)
    os.pwrite(file, b"\2\3", offset)
    assert values[:3].tolist() == [2, 3, 1]
    values[-2:] = 4
    assert os.pread(file, 4, offset + 2 * PAGE - 3) == b"\1\4\4\1"
    assert values.size == 2 * PAGE
    assert one.is_whole


def test_a_truncated_file_is_not_whole(file: int) -> None:
    """What lies before its end is read on; what is written behind it goes nowhere, and a new mapping is whole again."""
    one, values = mapped(file, 0, PAGES * PAGE)
    os.ftruncate(file, 4 * PAGE)
    assert values[: 4 * PAGE].all()
    assert one.is_whole
    assert not values[6 * PAGE :].any()
    assert not one.is_whole
    assert not values[5 * PAGE]
    values[8 * PAGE :] = 7
    values[: 4 * PAGE] = 5
    os.ftruncate(file, PAGES * PAGE)
    assert not one.is_whole
    other, now = mapped(file, 0, PAGES * PAGE)
    assert (now[: 4 * PAGE] == 5).all()
    assert not now[4 * PAGE :].any()
    assert other.is_whole


def test_a_mapping_of_another_file_stays_whole(file: int) -> None:
    whole = _mapping.map(file, 0, 2 * PAGE)
    torn, values = mapped(file, 2 * PAGE, 2 * PAGE)
    os.ftruncate(file, 2 * PAGE)
    values[:] = 3
    assert (whole.is_whole, torn.is_whole) == (True, False)


def test_threads_write_while_it_is_truncated(file: int) -> None:
    """Each maps it and writes all of it again and again: nobody ends, some mappings are whole and some are not."""
    stop, seen = threading.Event(), set()

    def write() -> None:
        while not stop.is_set():
            one, values = mapped(file, 0, PAGES * PAGE)
            values[:] = 2
            seen.add(one.is_whole)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for k in range(2000):
        os.ftruncate(file, k % PAGES * PAGE)
        os.ftruncate(file, PAGES * PAGE)
    stop.set()
    for thread in threads:
        thread.join()
    assert seen == {True, False}
    one, values = mapped(file, 0, PAGES * PAGE)
    values[:] = 9
    assert one.is_whole
    assert os.pread(file, PAGES * PAGE, 0) == b"\11" * PAGES * PAGE


def test_places_are_given_back(file: int) -> None:
    """There are a few thousand at a time; one that has none is an error, and memory goes with the last view of it."""
    kept = []
    with pytest.raises(OSError, match="Too many open files"):
        while True:
            kept.append(_mapping.map(file, 0, PAGE))
    assert len(kept) > 4000
    kept.clear()
    gc.collect()
    for _ in range(10_000):
        _mapping.map(file, 0, PAGE)
    values = mapped(file, 0, PAGES * PAGE)[1]
    at = f"{values.ctypes.data:x}-"
    assert at in Path("/proc/self/maps").read_text()
    assert values.all()
    del values
    gc.collect()
    assert at not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, 0), (0, -4)])
def test_what_is_no_part_of_a_file(file: int, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"offset {offset}, size {size}; expected an offset from 0 and a size from 1"):
        _mapping.map(file, offset, size)


def test_what_cannot_be_mapped(file: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        _mapping.map(1 << 20, 0, PAGE)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        _mapping.map(file, 0, 1 << 62)


OTHERS = """
import mmap, os, sys
from tableside.serving import _mapping
fd = os.memfd_create("other")
os.ftruncate(fd, 2 * mmap.PAGESIZE)
ours, other = _mapping.map(fd, 0, mmap.PAGESIZE), mmap.mmap(fd, 2 * mmap.PAGESIZE)
os.ftruncate(fd, mmap.PAGESIZE)
other[mmap.PAGESIZE]
"""


@pytest.mark.parametrize("options", [[], ["-X", "faulthandler"]])
def test_memory_of_others_ends_the_process(options: list[str]) -> None:
    """As it would without us; a handler that was there before is asked."""
    done = subprocess.run([sys.executable, *options, "-c", OTHERS], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in done.stderr) is bool(options)


FULL = """
import os, sys
import numpy as np
from small_memory import fill
from pathlib import Path
from tableside.serving import regions
from tableside.serving.region_registry import RegionRegistry

path = Path("/dev/shm/holes")
path.touch(0o600)
os.truncate(path, 1 << 20)
known = regions.Regions(RegionRegistry(), regions.RegionLimits(1, 1 << 30))
known.register("r", path.name, 0, 1 << 20)
region = known.find("r")
fill(Path("/dev/shm"))
into = memoryview(bytearray(1 << 20))
region.read(0, into)
assert not any(into)
place = region.place(0, 1 << 20)
place.bytes[:] = 1
for write in (place.settle, lambda: region.write(0, into)):
    try:
        write()
        print("written")
    except regions.ApiError as error:
        print(error.status, error)
Path("/dev/shm/filler").unlink()
region.write(0, memoryview(b"\\2" * (1 << 20)))
print(set(path.read_bytes()))
"""


def test_no_room() -> None:
    """An object with holes takes memory when it is written, and none when it is read. Where there is none it takes no bytes."""
    paths = os.pathsep.join([str(Path(__file__).parent.parent / "helpers"), *sys.path])
    command = [*on_small_tmpfs(Path("/dev/shm"), "size=2m"), sys.executable, "-c", FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})
    assert not done.stderr
    said = "507 shared memory region 'r' takes no more bytes ({}); free shared memory, then try again"
    reasons = "some of its pages were gone meanwhile", "No space left on device"
    assert done.stdout.splitlines() == [*map(said.format, reasons), "{2}"]
