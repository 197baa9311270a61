"""Memory that a door and its engine share: a file without a name, mapped by both, in which one of them hands
out blocks.

The file cannot shrink (it is sealed), so neither process can crash the other by truncating it. It goes with
its last holder.
"""

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
    """A mapped file without a name. fd: to be sent to the other process. bytes: uint8 [size]; address: of the
    first one.

    view: of the same bytes; its parts cost less.
    """

    def __init__(self, fd: int) -> None:
        """fd: as `create` made it; this object closes it. ServingError: it could be truncated while it is
        mapped."""
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
        """name: for who looks at a process's mappings. Pages are taken when they are first written."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd)

    def __del__(self) -> None:
        os.close(self.fd)  # the mapping goes with the last array over it


class Blocks:
    """Hands out parts of [0, size): first fit, parts next to each other are joined when they are free.
    Belongs to one thread."""

    def __init__(self, size: int) -> None:
        self.size, self.held = size, 0
        self._starts, self._ends = [0], [size]  # of free parts, in order
        self._sizes: dict[int, int] = {}  # by start, of those handed out

    def take(self, size: int) -> int | None:
        """Where a block of `size` bytes begins, a multiple of ALIGNMENT; None: there is no room now."""
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
        """KeyError: no such block is handed out."""
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
    """A part of shared memory as an array's owner: `give_back` is called when the last array over it is gone.

    numpy.asarray gives the array, uint8 [size]. It keeps the memory mapped.
    """

    def __init__(self, memory: SharedMemory, at: int, size: int, give_back: Any) -> None:
        self._memory, self._give_back = memory, give_back
        self.__array_interface__ = {
            "data": (memory.address + at, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._give_back()
