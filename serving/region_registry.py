"""Which shared memory regions clients registered: one small file in memory that all workers of a server share.

The file is a memfd. It has no name, so nobody else can open it, and it is gone with the server's last process, however that ends.

    byte 0             generation, uint64: how often the list changed; its lowest bit says which half holds the list
    byte 4096          half 0: the list's bytes uint64, then the list as JSON
    byte 4096 + HALF   half 1: the same

A change is written to the other half, then the generation is raised by one aligned store. So a worker that is killed in a change
leaves the list as it was. Changes exclude each other by a record lock, which the kernel drops when its holder dies. A reader
takes no lock: it reads again where the generation changed meanwhile, as only then another change may have written there.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import reduction
from typing import Any, NamedTuple

import orjson

from tableside.serving.errors import ServingError

HALF_BYTES = 1 << 22
_FIRST = 4096
_WORD_BYTES = 8


class Registered(NamedTuple):
    """A region as it was registered: `byte_size` bytes from byte `offset` on of the object `key` of POSIX shared memory.

    device, inode: of that object, so that another one of its name is not taken for it. worker: the process that registered it,
    for as long as its connection lasts; "" where the region outlives that.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    device: int
    inode: int
    worker: str = ""


Change = Callable[[list[Registered]], list[Registered]]


class RegionRegistry:
    """The list of registered regions. It is sent to workers as a part of their configuration. Any thread may call."""

    def __init__(self, fd: int = -1) -> None:
        """fd: of a registry that exists, which this object owns from now on; -1: a new one."""
        self._fd = os.memfd_create("client-regions", os.MFD_CLOEXEC) if fd < 0 else fd
        size = _FIRST + 2 * HALF_BYTES
        if fd < 0:
            os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, _FIRST, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = memoryview(self._map).cast("Q")
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._fd),)

    @property
    def generation(self) -> int:
        """How often the list changed."""
        return int(self._words[0])

    def read(self) -> tuple[int, list[Registered]]:
        """The generation, and the list of that generation."""
        while True:
            generation = self.generation
            text = self._text(generation)
            if self.generation == generation:  # else the change after the next may have been written where this was read
                return generation, [Registered(*entry) for entry in orjson.loads(text)] if text else []

    def change(self, change: Change) -> list[Registered]:
        """Replaces the list by what `change` makes of it, and returns that. What `change` raises leaves the list as it was.

        ServingError: the new list has more bytes than a half.
        """
        with self._lock, self._locked():
            generation, entries = self.read()
            changed = change(list(entries))
            if changed != entries:
                self._write(generation + 1, changed)
            return changed

    def _write(self, generation: int, entries: Sequence[Registered]) -> None:
        text = orjson.dumps([tuple(entry) for entry in entries])
        if len(text) > HALF_BYTES - _WORD_BYTES:
            raise ServingError(
                f"the list of client regions has {len(text):,} bytes; expected at most {HALF_BYTES - _WORD_BYTES:,}"
            )
        os.pwrite(self._fd, len(text).to_bytes(_WORD_BYTES, "little") + text, _half(generation))
        self._words[0] = generation

    def _text(self, generation: int) -> bytes:
        at = _half(generation)
        size = int.from_bytes(os.pread(self._fd, _WORD_BYTES, at), "little")
        return os.pread(self._fd, min(size, HALF_BYTES - _WORD_BYTES), at + _WORD_BYTES)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


def _half(generation: int) -> int:
    return _FIRST + (generation & 1) * HALF_BYTES


def _received(descriptor: Any) -> RegionRegistry:
    return RegionRegistry(descriptor.detach())
