"""Memory shared by a door and its engine: an unnamed file, mapped by both, in which one of them hands out
blocks. It is sealed, so neither can crash the other by truncating it, and goes with its last holder."""

import bisect
import fcntl
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.serving.errors import ServingError

ALIGNMENT = 64  # bytes; of a cache line
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """A mapped unnamed file. fd: for the other process. bytes: uint8 [size] at `address`. view: the same,
    cheaper to slice."""

    def __init__(self, fd: int) -> None:
        """Owns `fd`, as `create` made it. ServingError: the file could be truncated."""
        self.fd = fd
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ServingError(
                "shared memory of another process is not sealed; expected a file that cannot change its size"
            )
        self.size = os.fstat(fd).st_size
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, self.size), np.uint8)
        self.view = self.bytes.data
        self.address = int(self.bytes.ctypes.data)  # kept, as asking for it takes microseconds

    @classmethod
    def create(cls, name: str, size: int) -> "SharedMemory":
        """Makes a file; `name` shows in the process's mappings. Pages are taken when first written."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd)

    def __del__(self) -> None:
        os.close(self.fd)  # the mapping goes with the last array over it


class Blocks:
    """Hands out parts of [0, size), first fit; free neighbours are joined. Belongs to one thread."""

    def __init__(self, size: int) -> None:
        self.size, self.held = size, 0
        self._starts, self._ends = [0], [size]  # of free parts, in order
        self._sizes: dict[int, int] = {}  # by start, of those handed out

    def take(self, size: int) -> int | None:
        """Returns a block's start, a multiple of ALIGNMENT; None: no room."""
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        for n, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                self._sizes[start] = size
                self.held += size
                if end - start == size:
                    del self._starts[n], self._ends[n]
                else:
                    self._starts[n] = start + size
                return start
        return None

    def give_back(self, start: int) -> None:
        """Frees a block. KeyError: it is not handed out."""
        size = self._sizes.pop(start)
        self.held -= size
        end, n = start + size, bisect.bisect(self._starts, start)
        joins_before = n > 0 and self._ends[n - 1] == start
        joins_after = n < len(self._starts) and self._starts[n] == end
        if joins_before and joins_after:
            self._ends[n - 1] = self._ends.pop(n)
            del self._starts[n]
        elif joins_before:
            self._ends[n - 1] = end
        elif joins_after:
            self._starts[n] = start
        else:
            self._starts.insert(n, start)
            self._ends.insert(n, end)


class Lent:
    """Owns a part of shared memory as an array: numpy.asarray gives uint8 [size]. `give_back` runs when the
    last array over it is gone."""

    def __init__(self, memory: SharedMemory, at: int, size: int, give_back: Any) -> None:
        self._memory, self._give_back = memory, give_back
        data = (memory.address + at, False)
        self.__array_interface__ = {"data": data, "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._give_back()
