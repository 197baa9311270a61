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
        data = bytearray(count)
        read_into(memoryview(data), self.fd, self.path, self.begin + offset)
        return bytes(data)


def read_into(memory: memoryview, fd: int, path: Path, offset: int) -> None:
    """Fills memory with the bytes at `offset` of an open file. CheckpointError: it is short or unreadable."""
    while len(memory):
        try:
            count = os.preadv(fd, [memory], offset)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read at byte {offset}: {error.strerror}") from error
        if not count:
            early = f"ends at byte {offset}, {len(memory)} bytes early"
            raise CheckpointError(f"{path}: {early}; it was truncated while it was read")
        memory, offset = memory[count:], offset + count
