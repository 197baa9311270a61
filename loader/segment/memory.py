"""Files in shared memory, mapped so that the kernel can use 2 MiB pages.

`reserve` allocates all bytes of a new file, so that no later write gets SIGBUS. It touches one page of every
2 MiB, then asks for MADV_COLLAPSE (kernel 6.1), 20 times faster than collapsing full pages (docs/log.md).
Where the kernel or file system refuses, pages stay small.
"""

import contextlib
import ctypes
import errno
import math
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tableside.loader.errors import NoSpace
from tableside.loader.segment.huge_pages import HUGE_PAGE_BYTES, free_huge_bytes, huge_page_bytes, is_on_disk
from tableside.loader.segment.numa import bind, check_room
from tableside.quant.contract import Bytes

_MADV_RANDOM, _MADV_COLLAPSE = 1, 25
_PAGES_A_THREAD = 16  # fewer are not worth another thread
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def keep_in_memory(data: Bytes) -> bool:
    """Locks the pages of a mapping in memory while it is mapped, once for all processes that do. False: this
    process may not lock so much (RLIMIT_MEMLOCK)."""
    return bool(_libc.mlock(data.ctypes.data, data.nbytes) == 0)


def without_readahead(data: Bytes) -> None:
    """Has reads of a mapping on a disk bring the pages that they touch alone."""
    _libc.madvise(
        data.ctypes.data, data.nbytes, _MADV_RANDOM
    )  # advice: where it is not taken, nothing is lost


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int, offset: int = 0) -> int:
    result = _libc.mmap(address, size, protection, flags, fd, offset)
    if result in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size} bytes: {os.strerror(code)}")
    return int(result)


class _Mapped:
    """Memory that is unmapped with the last array over it. _span: (address, bytes) of the reservation."""

    _span: tuple[int, int]

    def _show(self, address: int, size: int, writable: bool) -> None:
        # numpy keeps the object that it got the interface from, so every view keeps the mapping.
        kind = {"shape": (size,), "typestr": "|u1", "version": 3}
        self.__array_interface__: dict[str, Any] = {"data": (address, not writable), **kind}

    @property
    def bytes(self) -> Bytes:
        return np.asarray(self)

    def __del__(self) -> None:
        if span := getattr(self, "_span", None):
            _libc.munmap(*span)


class FileToMap(NamedTuple):
    """An open file, its bytes, and whether they may be written. node: the NUMA node where a new one's pages
    are to lie; None: any."""

    fd: int
    size: int
    writable: bool = False
    node: int | None = None


class Mapping(_Mapped):
    """Whole files, mapped shared one behind the other, aligned to their pages or 2 MiB; unmapped with the
    last array over them. All sizes but the last are multiples of the page. size: of all files; None: of
    these. `bytes`: uint8 [size], read-only unless the first is writable. Copies are the object itself;
    pickling raises TypeError."""

    def __init__(self, *files: FileToMap, size: int | None = None) -> None:
        self.size = sum(file.size for file in files) if size is None else size
        self.page_bytes = huge_page_bytes(files[0].fd) or HUGE_PAGE_BYTES
        span = self.size + self.page_bytes
        start = _mmap(None, span, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self.address = self._end = -(-start // self.page_bytes) * self.page_bytes
        self._span = (start, span)
        for file in files:
            self.add(file)
        self._show(self.address, self.size, files[0].writable)

    def add(self, file: FileToMap) -> None:
        """Maps the next file."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if file.writable else 0)
        _mmap(self._end, file.size, protection, mmap.MAP_SHARED | _MAP_FIXED, file.fd)
        self._end += file.size

    def collapse(self) -> bool:
        """Asks for 2 MiB pages, on all cores; False where the kernel refuses (part may be done)."""
        pages = self.size // HUGE_PAGE_BYTES
        threads = max(1, min(len(os.sched_getaffinity(0)), pages // _PAGES_A_THREAD))
        bounds = [pages * t // threads * HUGE_PAGE_BYTES for t in range(threads + 1)]

        def part(t: int) -> bool:
            size = bounds[t + 1] - bounds[t]
            return size == 0 or _libc.madvise(self.address + bounds[t], size, _MADV_COLLAPSE) == 0

        with ThreadPoolExecutor(threads) as pool:
            return all(list(pool.map(part, range(threads))))

    def huge_fraction(self) -> float:
        """Returns the share of the files mapped in pages of `page_bytes`, from /proc/self/smaps."""
        huge, is_ours, size = 0, False, 0
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                name, value = line.split()[:2]
                if not name.endswith(":"):
                    first, end = (int(part, 16) for part in name.split("-"))
                    is_ours, size = self.address <= first < self.address + self.size, end - first
                elif is_ours and name == "KernelPageSize:" and int(value) * 1024 == self.page_bytes:
                    huge += size
                elif is_ours and name == "ShmemPmdMapped:":
                    huge += int(value) * 1024
        return huge / self.size

    def __copy__(self) -> "Mapping":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mapping":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a mapping of shared memory is not pickled; pickle the Segment, which is attached again, or its "
            "path"
        )


class MappedWindow(_Mapped):
    """Bytes [offset, offset + size) of a file, mapped read-only at a multiple of `step` bytes from `origin`,
    with `step` unused bytes on both sides. `bytes`: uint8 [size]; unmapped with the last array over it."""

    def __init__(self, fd: int, offset: int, size: int, origin: int, step: int) -> None:
        page = huge_page_bytes(fd) or (HUGE_PAGE_BYTES if size >= HUGE_PAGE_BYTES else mmap.PAGESIZE)
        first = offset // page * page  # so that a huge page of the file can be one of the mapping
        length = -(-(offset + size - first) // page) * page
        guard = -(-step // page) * page
        tried = step // math.gcd(page, step)  # pages on, the distance in bytes modulo `step` comes again
        span = length + 2 * guard + (tried + 1) * page
        start = _mmap(None, span, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._span = (start, span)
        places = range(-(-(start + guard) // page) * page, start + span, page)
        at = next((p for p in places[:tried] if (p + offset - first - origin) % step == 0), None)
        if at is None:
            raise ValueError(
                f"no page lies a multiple of {step} bytes away from {origin:#x}, at {offset} of a file"
            )
        _mmap(at, length, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, first)
        self._show(at + offset - first, size, False)


def reserve(files: Sequence[FileToMap], where: Path) -> Mapping:
    """Allocates all bytes of the writable files, which are empty, and maps all of them. NoSpace: they stay
    empty."""
    new = [file for file in files if file.writable]
    size, free = sum(file.size for file in new), available_bytes(where)
    if size > free:
        raise _no_space(size, free, where)
    if (node := files[0].node) is not None and not huge_page_bytes(files[0].fd):
        check_room(node, size)
    try:
        for file in new:
            _allocate(file)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        for file in new:
            os.ftruncate(file.fd, 0)
        raise _no_space(size, available_bytes(where), where) from error
    return Mapping(*files)


def _allocate(file: FileToMap) -> None:
    os.ftruncate(file.fd, file.size)
    if file.node is not None:
        mapped = Mapping(file)
        bind(mapped.address, mapped.size, file.node)
    if huge_page_bytes(file.fd) == 0 and not is_on_disk(file.fd):
        for offset in range(0, file.size, HUGE_PAGE_BYTES):
            os.posix_fallocate(file.fd, offset, min(mmap.PAGESIZE, file.size - offset))
        Mapping(file).collapse()
    os.posix_fallocate(file.fd, 0, file.size)


def available_bytes(where: Path) -> int:
    """Returns the free bytes of a file system: memory for an unlimited tmpfs, free pages for a hugetlbfs."""
    stats = os.statvfs(where)
    if stats.f_blocks:
        return stats.f_bavail * stats.f_frsize
    if page := huge_page_bytes(where):
        return free_huge_bytes(page)
    with open("/proc/meminfo") as meminfo:
        return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))


def _no_space(size: int, free: int, where: Path) -> NoSpace:
    if page := huge_page_bytes(where):
        return NoSpace(
            f"{where} has {free:,} bytes of free huge pages, the segment needs {size:,}; remove old versions "
            "(tableside gc), or "
            f"set more pages aside: /sys/kernel/mm/hugepages/hugepages-{page >> 10}kB/nr_hugepages"
        )
    return NoSpace(
        f"{where} has {free:,} bytes free, the segment needs {size:,}; remove old versions (tableside gc), "
        "choose a smaller row format, or enlarge it (docker run --shm-size, remount with size=)"
    )


def processes_below(pid: int) -> list[int]:
    """Returns the process ids of descendants of `pid`; ended ones may be missing."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in [*Path(f"/proc/{pid}/task").iterdir()]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (task / "children").read_text().split())
    return children + [below for child in children for below in processes_below(child)]


def pss_bytes(pid: int | str = "self") -> dict[str, int]:
    """Returns pss, pss_shmem, pss_file and private of a process, from /proc/PID/smaps_rollup."""
    fields: dict[str, int] = {}
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            name, _, rest = line.partition(":")
            if rest.strip().endswith("kB"):
                fields[name] = int(rest.split()[0]) * 1024
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {key.lower(): fields[key] for key in ("Pss", "Pss_Shmem", "Pss_File")} | {"private": private}
