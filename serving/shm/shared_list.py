"""A short list shared by a server's processes: a memfd, which nobody else can open and which goes with them.

    byte 0             generation, uint64: count of changes; its lowest bit says which half holds the list
    byte 4096          half 0: the list's bytes uint64, then the list as JSON
    byte 4096 + HALF   half 1: the same

A change goes to the other half, then one aligned store raises the generation: a worker killed meanwhile
leaves the old list. Writers hold a record lock, which the kernel drops if they die. Readers take none and
read again if the generation changed.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import orjson

from tableside.serving.errors import ServingError

HALF_BYTES = 1 << 22
_FIRST = 4096
_WORD_BYTES = 8

Entry = TypeVar("Entry", bound=tuple[Any, ...])


class SharedList(Generic[Entry]):
    """A list of named tuples, sent to workers with their configuration. Any thread may call. entry: makes an
    entry of its values. what: the entries' name in errors."""

    entry: ClassVar[Callable[..., Any]]
    what: ClassVar[str]

    def __init__(self, fd: int = -1) -> None:
        """fd: an existing list's, owned from now on; -1: a new list."""
        self._fd = os.memfd_create("tableside-list", os.MFD_CLOEXEC) if fd < 0 else fd
        size = _FIRST + 2 * HALF_BYTES
        if fd < 0:
            os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, _FIRST, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = memoryview(self._map).cast("Q")
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (type(self), reduction.DupFd(self._fd))

    @property
    def generation(self) -> int:
        return int(self._words[0])

    def read(self) -> tuple[int, list[Entry]]:
        while True:
            generation = self.generation
            text = self._text(generation)
            # else the change after the next may have been written where this was read
            if self.generation == generation:
                return generation, [
                    type(self).entry(*values) for values in orjson.loads(text)
                ] if text else []

    def change(self, change: Callable[[list[Entry]], list[Entry]]) -> list[Entry]:
        """Replaces the list by `change(list)` and returns it; an exception there changes nothing.
        ServingError: larger than a half."""
        with self._lock, self._locked():
            generation, entries = self.read()
            changed = change(list(entries))
            if changed != entries:
                self._write(generation + 1, changed)
            return changed

    def _write(self, generation: int, entries: Sequence[Entry]) -> None:
        text = orjson.dumps([tuple(entry) for entry in entries])
        if len(text) > HALF_BYTES - _WORD_BYTES:
            why = f"the list of {self.what} has {len(text):,} bytes"
            raise ServingError(f"{why}; expected at most {HALF_BYTES - _WORD_BYTES:,}")
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


def process_of(pid: int) -> str:
    """Returns PID and start time of a process, as PIDs are reused; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{pid} {fields[19]}" if fields[0] not in "ZX" else ""


def lives(process: str) -> bool:
    """Returns whether a process named by `process_of` still runs."""
    return process_of(int(process.split()[0])) == process


def _half(generation: int) -> int:
    return _FIRST + (generation & 1) * HALF_BYTES


def _received(kind: type[SharedList[Any]], descriptor: Any) -> SharedList[Any]:
    return kind(descriptor.detach())
