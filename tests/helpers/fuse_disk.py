"""A disk that hangs, or refuses to read: a file system of one file, whose process tests stop, or tell to.

    python fuse_disk.py FILE FOLDER

Mounts the file in the folder as `rows`, by the kernel's FUSE (linux/fuse.h); needs root. SIGSTOP: it hangs.
SIGUSR1: reads fail with EIO; SIGUSR2: they do not any more.
"""

import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import end, until

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE, _INIT = 1, 2, 3, 14, 15, 17, 18, 26
_INTERRUPT, _BATCH_FORGET = 36, 42
_WITHOUT_ANSWER = (_FORGET, _INTERRUPT, _BATCH_FORGET)
_IN = struct.Struct("<IIQQIIIHH")
_FOREVER, _PAGES, _READ_BYTES, _ASYNC_READ = 1 << 30, 8, 1 << 17, 1
_ROOT, _FILE = 1, 2
_DETACH, _RDONLY, _NOSUID, _NODEV = 2, 1, 2, 4
_BIND = 4096

_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, folder: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, str(folder), kind)]
    if _libc.mount(*arguments, ctypes.c_ulong(flags), None if options is None else options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {folder}")


def can_mount() -> bool:
    """Whether this process may mount what /dev/fuse gives."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


class Disk:
    """The process of a mounted file. path: of the file in the file system."""

    def __init__(self, file: Path, folder: Path) -> None:
        self._mounted = [folder]
        self._process = subprocess.Popen([sys.executable, __file__, str(file), str(folder)])
        self.path = folder / "rows"
        until(self.path.exists, what="the file system to be mounted")

    def stand_for(self, file: Path) -> None:
        """Mounts it over a file, of another file system."""
        _mount(str(self.path), file, None, _BIND)
        self._mounted.append(file)

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def refuse(self, refuses: bool) -> None:
        """Whether reads fail."""
        self._process.send_signal(signal.SIGUSR1 if refuses else signal.SIGUSR2)

    def close(self) -> None:
        self.go_on()
        for place in reversed(self._mounted):
            _libc.umount2(str(place).encode(), _DETACH)
        end(self._process)


@contextmanager
def disk_of(file: Path, folder: Path) -> Iterator[Disk]:
    """Mounts a file in a new folder."""
    folder.mkdir()
    disk = Disk(file, folder)
    try:
        yield disk
    finally:
        disk.close()


class _FileSystem:
    def __init__(self, file: Path) -> None:
        self._fd, self.refuses = os.open(file, os.O_RDONLY), False

    def _attributes(self, node: int) -> bytes:
        status = os.fstat(self._fd)
        mode = status.st_mode if node == _FILE else 0o40755
        size = status.st_size if node == _FILE else 0
        times = (int(status.st_mtime),) * 3
        numbers = (node, size, -(-size // 512), *times, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
        return struct.pack("<6Q10I", *numbers)

    def answer(self, code: int, node: int, body: bytes) -> bytes:
        """OSError: what the kernel is told."""
        if code == _INIT:
            _, _, most_ahead, _ = struct.unpack_from("<4I", body)
            out = (7, 31, most_ahead, _ASYNC_READ, 64, 64, _READ_BYTES, 1, _PAGES, 0, 0)
            return struct.pack("<4I2H2I2HI", *out) + bytes(28)
        if code == _LOOKUP:
            if body != b"rows\0":
                raise OSError(errno.ENOENT, "")
            return struct.pack("<4Q2I", _FILE, 0, _FOREVER, _FOREVER, 0, 0) + self._attributes(_FILE)
        if code == _GETATTR:
            return struct.pack("<Q2I", _FOREVER, 0, 0) + self._attributes(node)
        if code == _OPEN:
            return struct.pack("<Q2I", 0, 2, 0)  # the page cache stays
        if code == _READ:
            _, at, size = struct.unpack_from("<2QI", body)
            if self.refuses:
                raise OSError(errno.EIO, "")
            return os.pread(self._fd, size, at)
        if code == _STATFS:
            return struct.pack("<5Q4I", 0, 0, 0, 0, 0, 4096, 255, 4096, 0) + bytes(24)
        if code == _RELEASE:
            return b""
        raise OSError(errno.ENOSYS, "")  # of a flush: closing then asks for none, and never waits


def main(file: str, folder: str) -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"
    _mount("rows", Path(folder), "fuse", _RDONLY | _NOSUID | _NODEV, options)
    files = _FileSystem(Path(file))
    signal.signal(signal.SIGUSR1, lambda *_: setattr(files, "refuses", True))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(files, "refuses", False))
    while True:
        try:
            request = os.read(fd, _READ_BYTES + (1 << 16))
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            return  # it is unmounted
        size, code, unique, node, *_ = _IN.unpack_from(request)
        if code in _WITHOUT_ANSWER:
            continue
        try:
            number, body = 0, files.answer(code, node, request[_IN.size : size])
        except OSError as error:
            number, body = -int(error.errno or errno.EIO), b""
        try:
            os.write(fd, struct.pack("<IiQ", 16 + len(body), number, unique) + body)
        except OSError as error:
            if error.errno != errno.ENOENT:  # who asked is gone
                raise


if __name__ == "__main__":
    main(*sys.argv[1:])
