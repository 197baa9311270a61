"""Files that are opened with care: a FIFO, a device, a socket or a folder in a file's place is refused, and
nothing waits for it.

A plain `open` of a FIFO waits for a writer, and a device may never end. So paths that come from a user or
from another file are opened here, without waiting, and looked at before a byte is read.
"""

import os
import stat
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
    """Opens a regular file for reading; the caller closes the descriptor. what: the file's part, for people
    ("checkpoint").

    error: raised where the path is missing, cannot be opened, holds a NUL, or is no regular file.
    """
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
    """All bytes of a regular file of at most `limit_bytes`. error: see `open_regular`, or the file is
    larger."""
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


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False
