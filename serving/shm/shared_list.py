"""A short list that all workers of a server share: one small file in memory.

The file is a memfd. It has no name, so nobody else can open it, and it is gone with the server's last
process, however that ends.

    byte 0             generation, uint64: how often the list changed; its lowest bit says which half holds the list
    byte 4096          half 0: the list's bytes uint64, then the list as JSON
    byte 4096 + HALF   half 1: the same

A change is written to the other half, then the generation is raised by one aligned store. So a worker that is
killed in a change leaves the list as it was. Changes exclude each other by a record lock, which the kernel
drops when its holder dies. A reader takes no lock: it reads again where the generation changed meanwhile, as
only then another change may have written there.
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
    """A list of named tuples. It is sent to workers as a part of their configuration. Any thread may call.

    entry: what an entry is made of, from its values in order. what: the entries' name in errors.
    """

    entry: ClassVar[Callable[..., Any]]
    what: ClassVar[str]

    def __init__(self, fd: int = -1) -> None:
        """fd: of a list that exists, which this object owns from now on; -1: a new one."""
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
        """How often the list changed."""
        return int(self._words[0])

    def read(self) -> tuple[int, list[Entry]]:
        """The generation, and the list of that generation."""
        while True:
            generation = self.generation
            text = self._text(generation)
            if (
                self.generation == generation
            ):  # else the change after the next may have been written where this was read
                return generation, [
                    type(self).entry(*values) for values in orjson.loads(text)
                ] if text else []

    def change(self, change: Callable[[list[Entry]], list[Entry]]) -> list[Entry]:
        """Replaces the list by what `change` makes of it, and returns that. What `change` raises leaves the
        list as it was.

        ServingError: the new list has more bytes than a half.
        """
        with self._lock, self._locked():
            generation, entries = self.read()
            changed = change(list(entries))
            if changed != entries:
                self._write(generation + 1, changed)
            return changed

    def _write(self, generation: int, entries: Sequence[Entry]) -> None:
        text = orjson.dumps([tuple(entry) for entry in entries])
        if len(text) > HALF_BYTES - _WORD_BYTES:
            raise ServingError(
                f"the list of {self.what} has {len(text):,} bytes; expected at most "
                f"{HALF_BYTES - _WORD_BYTES:,}"
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


def process_of(pid: int) -> str:
    """A process by its PID and when it started, as a PID alone may be given again; "" where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{pid} {fields[19]}" if fields[0] not in "ZX" else ""


def lives(process: str) -> bool:
    """Whether a process that `process_of` named has not ended."""
    return process_of(int(process.split()[0])) == process


def _half(generation: int) -> int:
    return _FIRST + (generation & 1) * HALF_BYTES


def _received(kind: type[SharedList[Any]], descriptor: Any) -> SharedList[Any]:
    return kind(descriptor.detach())
