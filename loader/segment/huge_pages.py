"""Files of a hugetlbfs (pages of 2 MiB or 1 GiB, as mounted).

They are read and mapped like others, but sizes are multiples of the page, write(2) is refused (we write
through a mapping), and free space is what the administrator set aside:

    echo 64 > /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages
    mount -t hugetlbfs -o pagesize=1G none /mnt/huge
    tableside load model.toml --root /mnt/huge

A model takes two pages more than its versions, for its record. Servers keep their counters in /dev/shm.
"""

import ctypes
import mmap
import os
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20  # of other file systems in memory
_HUGETLBFS_MAGIC, _TMPFS_MAGIC, _RAMFS_MAGIC = 0x958458F6, 0x01021994, 0x858458F6  # linux/magic.h
_STATFS_BYTES = 256  # more than struct statfs has; it begins with f_type and f_bsize, both long

_libc = ctypes.CDLL(None, use_errno=True)
_libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def huge_page_bytes(where: int | Path) -> int:
    """Returns the page size of the hugetlbfs of a descriptor or folder; 0: another file system."""
    kind, page = _statfs(where)
    return page if kind == _HUGETLBFS_MAGIC else 0


def is_on_disk(where: int | Path) -> bool:
    """Returns whether a descriptor or folder is of a file system that does not lie in memory."""
    return _statfs(where)[0] not in (_HUGETLBFS_MAGIC, _TMPFS_MAGIC, _RAMFS_MAGIC)


def _statfs(where: int | Path) -> tuple[int, int]:
    """Returns the kind of a file system, and the size of its blocks."""
    found = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    failed = (
        _libc.fstatfs(where, found) if isinstance(where, int) else _libc.statfs(os.fsencode(where), found)
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(where))
    return int(found[0]) & 0xFFFFFFFF, int(found[1])


def free_huge_bytes(page_bytes: int) -> int:
    """Returns the bytes of free, unreserved huge pages of a size."""
    pool = Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB")
    free, promised = (int((pool / f"{name}_hugepages").read_text()) for name in ("free", "resv"))
    return (free - promised) * page_bytes


def take_room(fd: int, size: int) -> None:
    """Reserves the first `size` bytes of a file, in whole pages. OSError: no room."""
    page = huge_page_bytes(fd) or 1
    os.posix_fallocate(fd, 0, -(-size // page) * page)


def write_whole(fd: int, data: bytes) -> None:
    """Replaces a file's content by `data`; zeros follow it on a hugetlbfs."""
    if page := huge_page_bytes(fd):
        take_room(fd, len(data))
        with mmap.mmap(fd, -(-len(data) // page) * page) as memory:
            memory[:] = data.ljust(len(memory), b"\0")
    else:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
