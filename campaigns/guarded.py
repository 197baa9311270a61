"""Memory for the campaign `programs`: tensors between pages that nobody may touch, in a heap that tells what
is not written.

A read or write beyond a tensor's pages is SIGSEGV. What lies on the tensor's own pages beside it, and what
malloc gives or takes back, is filled with a canary; a score that changes with the canary was made of bytes
that are not the tensor's.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PERTURB, _MMAP_THRESHOLD = -6, -3  # of mallopt
_PAGE = mmap.PAGESIZE
Place = Literal["start", "end"]


def poison_heap(canary: int) -> None:
    """From now on malloc fills what it gives and takes back with a canary, also in large pieces (glibc,
    tcache_count=0)."""
    _LIBC.mallopt(_PERTURB, canary)
    _LIBC.mallopt(_MMAP_THRESHOLD, 1 << 30)  # pieces that are mapped would be zeros


class Arena:
    """Tensors' bytes, each in pages of its own with an untouchable one before and behind."""

    def __init__(self, place: Place, canary: int) -> None:
        self._place, self._canary = place, canary
        self._mapped: list[tuple[int, int]] = []

    def put(self, content: bytes) -> Any:
        """A copy of `content` that begins right behind, or ends right before, an untouchable page."""
        inner = max(_PAGE, -(-len(content) // _PAGE) * _PAGE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _LIBC.mmap(None, inner + 2 * _PAGE, 0, flags, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"mmap: errno {ctypes.get_errno()}")
        self._mapped.append((address, inner + 2 * _PAGE))
        first = address + _PAGE
        if _LIBC.mprotect(first, inner, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"mprotect: errno {ctypes.get_errno()}")
        ctypes.memset(first, self._canary, inner)
        at = first if self._place == "start" else first + inner - len(content)
        ctypes.memmove(at, content, len(content))
        return (ctypes.c_char * len(content)).from_address(at)

    def close(self) -> None:
        for address, size in self._mapped:
            _LIBC.munmap(address, size)


@contextmanager
def arena(place: Place, canary: int) -> Iterator[Arena]:
    """An arena whose memory is gone afterwards: no tensor over it may be left."""
    made = Arena(place, canary)
    try:
        yield made
    finally:
        made.close()
