"""Rows of a disk that hangs, or refuses to read: a real file system, whose process is stopped."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from block_files import AT, File
from fuse_disk import Disk, can_mount, disk_of

from tableside.loader.segment.blocks import BlockReader, Breaker
from tableside.quant.rows.fetched import RowState

pytestmark = pytest.mark.skipif(not can_mount(), reason="file systems are mounted by root, with /dev/fuse")
EVERY = np.arange(1000)


@pytest.fixture
def disk(file: File, tmp_path: Path) -> Iterator[Disk]:
    """The file's own, which is read through it from now on."""
    with disk_of(file.path, tmp_path / "mounted") as disk:
        file.path = disk.path
        yield disk


def read(file: File, reader: object, wait_s: float | None) -> tuple[np.ndarray, np.ndarray]:
    out, state = np.zeros((1000, 80), np.uint8), np.zeros(1000, np.uint8)
    deadline = None if wait_s is None else time.monotonic() + wait_s
    reader(EVERY, out, state, deadline)  # type: ignore[operator]
    return out, state


def forget(file: File, reader: BlockReader | None = None) -> None:
    """Has the page cache forget the file, where a reader has mapped it, too."""
    if reader is not None and reader._mapped is not None:
        at, size = reader._mapped.ctypes.data, reader._mapped.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        assert not ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    fd = os.open(file.path, os.O_RDONLY)
    os.fsync(fd)  # what was not written stays
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_come_from_a_file_system_that_does_not_say_what_is_in_memory(
    file: File, disk: Disk, mapped: bool
) -> None:
    """It has no RWF_NOWAIT. What mincore says is in memory is read without a wait; where the file is not
    mapped, nothing is known of it."""
    reader = file.reader(mapped)
    reader._breaker = Breaker()
    forget(file)
    for wait_s in (None, 300.0):
        out, state = read(file, reader, wait_s)
        assert not state.any()
        np.testing.assert_array_equal(out, file.rows)
    disk.hang()
    out, state = np.zeros((1000, 80), np.uint8), np.zeros(1000, np.uint8)
    reader.ready(EVERY, out, state, None)
    assert set(state) == {RowState.HERE if mapped else RowState.LATE}
    assert (out == file.rows).all() == mapped


def test_a_disk_that_hangs_holds_nobody_up(file: File, disk: Disk) -> None:
    """However many rows of it are asked for: more than its queue has room for. Once it goes on rows come
    again."""
    reader = file.reader(True, believed_ms=0)  # what is forgotten is not there
    reader._breaker, reader.timeout_s = (breaker := Breaker()), 0.25
    forget(file)
    disk.hang()
    for _ in range(12):
        _, state = read(file, reader, 0.25)
        assert set(state) == {RowState.LATE}
        reader.ask(EVERY)
    assert breaker.hangs
    disk.go_on()
    while state.any() or breaker.hangs:  # until one looks whether it reads again
        forget(file, reader)
        out, state = read(file, reader, 60.0)
    np.testing.assert_array_equal(out, file.rows)


def test_a_disk_that_hangs_takes_no_thread_from_another(file: File, disk: Disk, tmp_path: Path) -> None:
    reader, other = file.reader(), File.of(tmp_path / "others", 1000, 80, 400)
    reader._breaker = Breaker()
    forget(file)
    disk.hang()
    for _ in range(3):
        assert RowState.LATE in read(file, reader, 0.2)[1]
    forget(other)
    assert not read(other, other.reader(), 300.0)[1].any()


def test_rows_that_a_disk_refuses_are_late_and_not_damaged(
    file: File, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted and said once a second. A disk that refuses does not hang: rows of other blocks come,
    and these once they can."""
    reader, counts = file.reader(), dict[str, int]()
    reader._breaker, reader._name = Breaker(), "this table"
    reader.count = lambda where, rows: counts.update({where: counts.get(where, 0) + rows})
    disk.refuse(True)
    forget(file)
    _, state = read(file, reader, 300.0)
    assert set(state) == {RowState.LATE} and counts["failed"] == 1000 and not counts["corrupt"]
    assert caplog.messages == ["this table: row 0 in blocks 0 to 0 cannot be read: Input/output error"]
    ends = time.monotonic() + 1.5
    while time.monotonic() < ends:
        read(file, reader, 300.0)
    assert not reader._breaker.hangs
    disk.refuse(False)
    while state.any():
        out, state = read(file, reader, 300.0)
    np.testing.assert_array_equal(out, file.rows)
    assert not reader.damage


def test_damaged_rows_are_told_with_their_place(file: File, caplog: pytest.LogCaptureFixture) -> None:
    reader, counts = file.reader(), dict[str, int]()
    reader._name, reader.count = "this table", lambda where, rows: counts.update({where: rows})
    file.write(60 * 80 + 7, bytes([file.rows[60, 7] ^ 4]))
    read(file, reader, None)
    said = (
        "this table: row 51 in blocks 0 to 1 is not what was written, or the file was cut; it was read twice"
    )
    assert reader.damage == said and caplog.messages == [said] and counts["corrupt"] == 52
    read(file, reader, None)
    assert reader.damage == said
    file.write(0, file.rows.tobytes())
    assert AT == 4096 and not read(file, reader, None)[1].any()
