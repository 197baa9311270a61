"""What every worker needs, imported once in the process that workers are forked from, so that they share its memory."""

import ctypes
import gc

import tableside.serving.http.app
import tableside.serving.http.connection
import tableside.serving.metrics  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a worker would otherwise write to, and so copy, every page that was shared

# Bodies and outputs of some 100 KB come and go with each request. By default glibc gives such memory back to the kernel at once
# and asks for it again, a page fault for every 4 KiB of it; kept in the process it costs nothing (docs/log.md).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
if hasattr(_libc := ctypes.CDLL(None), "mallopt"):
    _libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)
    _libc.mallopt(_M_MMAP_THRESHOLD, 64 << 20)
