"""Published files are read whole once a host: who read one first says so, and others believe it.

    ROOT/MODEL/3.segment.verified     of a file that was whole: boot, device, inode, bytes, time of change and
                                      header's checksum of that file, and when it was read
    ROOT/MODEL/3.1.rows.verified      the same of a large table's file; versions that share the file share it

It is believed as far as the folder is. A file that was written to meanwhile is read again; bytes that change
without that (a bit that flips, a write through a mapping) are found by the scrubber. While one process reads
a file, others wait for it. On a hugetlbfs nothing is said, and each process reads.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from tableside.loader.files import take_lock
from tableside.loader.segment.huge_pages import huge_page_bytes
from tableside.loader.segment.segment import Segment, SegmentFile
from tableside.loader.versions.folder import NOTE, Folder

_WAIT_S, _LOOK_S = 60.0, 0.02  # for another process that reads the file; between two looks at it


def verified_at(folder: Folder, segment: Segment) -> float | None:
    """Returns when a process of this host read every byte of a version or delta, of time.time(), of the file
    read first; None: not all were."""
    times = [_noted(folder, file) for file in segment.files]
    known = [at for at in times if at is not None]
    return min(known) if len(known) == len(times) else None


def verify_once(
    folder: Folder,
    segment: Segment,
    threads: int = 1,
    rest: float = 0.0,
    checked: Container[str] = (),
) -> float:
    """Reads every byte of the files that no process of this host read; returns when the first one was read.
    threads, rest: of `Segment.verify`. checked: tables whose rows are checked as they are read; of
    their files id indexes are read. SegmentError: a checksum is wrong."""
    times = [time.time()]
    for file in segment.files:
        if file.table in checked:
            segment.verify_indexes(file)
        else:
            times.append(_verify_once(folder, segment, file, threads, rest))
    return min(times)


def _verify_once(folder: Folder, segment: Segment, file: SegmentFile, threads: int, rest: float) -> float:
    if (at := _noted(folder, file)) is not None:
        return at
    try:
        fd = folder.open(file.path.name)
    except FileNotFoundError:  # it was removed, and is mapped still
        segment.verify_file(file, threads, rest)
        return time.time()
    try:
        if huge_page_bytes(fd):  # a note would take a page of it
            segment.verify_file(file, threads, rest)
            return time.time()
        is_ours = _take_turn(fd, lambda: _noted(folder, file) is not None)
        if is_ours and (at := _noted(folder, file)) is not None:
            return at
        segment.verify_file(file, threads, rest)
        at = time.time()
        if is_ours and os.fstat(fd).st_ino == file.status.st_ino:
            _note(folder, file, at)
        return at
    finally:
        os.close(fd)


def _take_turn(fd: int, is_noted: Callable[[], bool]) -> bool:
    """Waits while another process reads an open file, or until it is noted; False: for too long. Who holds a
    delta for other hosts (`Delta.hold`) shares its lock, for as long as they ask, and is not waited for."""
    deadline = time.monotonic() + _WAIT_S
    while not take_lock(fd) and not is_noted():
        if take_lock(fd, is_shared=True):  # nobody reads it: who was in the way is gone, or holds it
            return take_lock(fd) or True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _noted(folder: Folder, file: SegmentFile) -> float | None:
    try:
        noted = json.loads(folder.read(file.path.name + NOTE))
    except (FileNotFoundError, ValueError):
        return None
    at = noted.pop("at", None) if isinstance(noted, dict) else None
    return float(at) if isinstance(at, int | float) and noted == _identity(file) else None


def _note(folder: Folder, file: SegmentFile, at: float) -> None:
    """Says that a file is whole. Where this user cannot write there, or memory is full, nothing is said."""
    name = f"{file.path.name}{NOTE}.{os.getpid()}.partial"  # of a killed process the next load removes it
    with contextlib.suppress(OSError):
        fd = folder.create(name)
        try:
            os.write(fd, json.dumps({**_identity(file), "at": at}).encode())
            folder.rename(name, file.path.name + NOTE)
        except OSError:
            folder.unlink(name)
        finally:
            os.close(fd)


def _identity(file: SegmentFile) -> dict[str, Any]:
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "device": file.status.st_dev,
        "inode": file.status.st_ino,
        "bytes": file.status.st_size,
        "changed_ns": file.status.st_mtime_ns,
        "header": file.identity,
    }
