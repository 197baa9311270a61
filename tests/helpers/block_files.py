"""A file of a table whose rows are read in blocks (loader.segment.blocks)."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tableside.loader.segment.blocks import (
    BlockFile,
    BlockReader,
    block_count,
    write_sums,
    write_sums_between,
)
from tableside.loader.segment.memory import FileToMap, Mapping
from tableside.loader.segment.stored import StoredRows

AT, SEED = 4096, 0x0123456789ABCDEF  # byte of row 0 in the file, and its seed
HOUR = 3_600_000  # in milliseconds: longer than any test


def crc32c(data: bytes) -> int:
    """The specification."""
    total = 0xFFFFFFFF
    for byte in data:
        total ^= byte
        for _ in range(8):
            total = total >> 1 ^ (0x82F63B78 if total & 1 else 0)
    return total ^ 0xFFFFFFFF


@dataclass
class File:
    """A file of random rows, and what reads it."""

    path: Path
    stored: StoredRows
    rows: np.ndarray
    sums: np.ndarray

    @classmethod
    def of(cls, path: Path, rows: int, row_bytes: int, chunk_rows: int) -> "File":
        stored = StoredRows(rows, row_bytes, AT, chunk_rows, 0)
        values = np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), np.uint8)
        sums = np.zeros(block_count(stored), np.uint32)
        for chunk in range(stored.chunks):
            start, stop = stored.chunk_range(chunk)
            write_sums(values.reshape(-1), start * row_bytes, stop * row_bytes, SEED, sums)
        write_sums_between(values.reshape(-1), stored, SEED, sums)
        path.write_bytes(bytes(AT) + values.tobytes() + sums.tobytes())
        return cls(path, stored, values, sums)

    def reader(self, mapped: bool = False, believed_ms: int = HOUR, trusted_ms: int = HOUR) -> BlockReader:
        """mapped: it may read where the file is mapped."""
        fd, rows = os.open(self.path, os.O_RDONLY), None
        if mapped:
            whole = Mapping(FileToMap(fd, self.path.stat().st_size)).bytes
            rows = whole[AT : AT + self.stored.bytes]
        file = BlockFile(fd, AT, AT + self.stored.bytes, SEED)
        return BlockReader(file, self.stored, rows, believed_ms, trusted_ms)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out, state = np.zeros((rows.size, self.stored.row_bytes), np.uint8), np.zeros(rows.size, np.uint8)
        self.reader()(rows, out, state, None)
        return out, state

    def write(self, at: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(AT + at)
            file.write(data)
