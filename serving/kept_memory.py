"""Keeps freed memory in the process. glibc returns pieces of some 100 KB to the kernel, and page faults
follow (docs/log.md)."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 256 << 20, 64 << 20


def keep_freed_memory() -> None:
    """For this process and those forked from it. Other allocators than glibc's are left as they are."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
