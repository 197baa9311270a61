"""Opens regular files without blocking; refuses FIFOs, devices, sockets and folders. Locks open files, and
replaces whole ones.

A plain `open` of a FIFO waits for a writer, and a device may never end, so paths of users go through here.
"""

import fcntl
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tableside.loader.errors import LoaderError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, what: str, error: type[LoaderError] = LoaderError) -> int:
    """Opens a regular file for reading; the caller closes the descriptor. what: the file's role, for people
    ("checkpoint"). error: raised if the path is missing, unreadable, holds a NUL or is no regular file."""
    if "\0" in str(path):
        raise error(
            f"{what} {str(path)!r}: a path cannot hold the character NUL; expected the path of a file"
        )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, UnicodeEncodeError) as failure:
        if _is_socket(path):
            raise error(f"{path}: {what} is a socket; expected a regular file") from None
        reason = failure.strerror if isinstance(failure, OSError) else str(failure)
        raise error(f"{path}: {reason}; expected a readable file here ({what})") from failure
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise error(
                f"{path}: {what} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}; expected a regular file"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, limit_bytes: int, what: str, error: type[LoaderError] = LoaderError) -> bytes:
    """Returns a regular file's bytes. error: see `open_regular`; also if it exceeds `limit_bytes`."""
    with open(open_regular(path, what, error), "rb") as file:
        try:
            data = file.read(limit_bytes + 1)
        except OSError as failure:
            raise error(f"{path}: {what} cannot be read: {failure.strerror}") from failure
    if len(data) > limit_bytes:
        raise error(
            f"{path}: {what} is larger than {limit_bytes:,} bytes, the most that is read; is this the right "
            "file?"
        )
    return data


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the name of a file to be made, which then replaces `path`; after an error it is removed."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def take_lock(fd: int, wait_s: float = 0.0, *, is_shared: bool = False) -> bool:
    """Locks an open file, until it is closed or its holder dies; False: another holds it for `wait_s` s.
    is_shared: others may share the lock."""
    how = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    deadline, pause_s = time.monotonic() + wait_s, 0.001
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False
