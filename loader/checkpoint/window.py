"""A part of a file, read at places. What lies outside it cannot be read."""

import os
from pathlib import Path

from tableside.loader.errors import CheckpointError


class FileWindow:
    """Bytes [begin, begin + bytes) of an open file. The caller keeps the descriptor open."""

    def __init__(self, fd: int, path: Path, begin: int = 0, length: int | None = None) -> None:
        """length None: all that follows `begin`."""
        size = os.fstat(fd).st_size
        self.fd, self.path, self.begin = fd, path, begin
        self.bytes = size - begin if length is None else length
        if begin < 0 or self.bytes < 0 or begin + self.bytes > size:
            raise CheckpointError(
                f"{path}: bytes [{begin}, {begin + self.bytes}) were expected, the file has {size}; "
                "it was truncated or is still being written"
            )

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes; CheckpointError where the window or the file has fewer."""
        if offset < 0 or count < 0 or offset + count > self.bytes:
            raise CheckpointError(
                f"{self.path}: expected {count:,} bytes at {self.begin + offset:,}, the file is too short"
            )
        parts = []
        while count:
            try:
                part = os.pread(self.fd, min(count, 1 << 30), self.begin + offset)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot be read at byte {self.begin + offset}: {error.strerror}"
                ) from error
            if not part:
                raise CheckpointError(
                    f"{self.path}: ends at byte {self.begin + offset}; it was truncated while it was read"
                )
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)
