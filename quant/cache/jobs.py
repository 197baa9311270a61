"""The cached lookups of a batch as its kernels read them, and the kernels of a cache with their constants."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tableside.quant.cache import kernels as k
from tableside.quant.cache.kernels import JobField
from tableside.quant.device.launch import Kernel
from tableside.quant.gpu.layout import CacheJob

_PROBE, _PROBE_WARPS = 128, 1  # ids at once
_TILE, _MOST_WORDS, _ROW_WARPS = 8192, 64, 8  # words that a program copies at once, and of one row
TURN, _PART = 256, 512
_LINK = 512
UNLINK, _UNLINK_WARPS = 1024, 4
_PIECES = 2048  # of 16 bytes, that a program copies at once
_SAMPLE = 1024
MARKS = 1


@dataclass(frozen=True)
class CacheJobs:
    """The cached lookups of a batch, as `cache_jobs` wrote them to address `at` of the device; and the job of each block."""

    at: int
    blocks_at: int
    ids: int
    blocks: int


def cached_bytes(jobs: Sequence[CacheJob]) -> int:
    """Bytes of such jobs, or a few more, if each batch of them is padded to 8."""
    return sum(8 * len(JobField) + 4 * -(-job.ids // _PROBE) for job in jobs) + 8


def cache_jobs(jobs: Sequence[CacheJob], address: int, is_interpreted: bool) -> tuple[bytes, CacheJobs]:
    """Jobs as bytes that will lie at `address` on the device, 8-aligned."""
    block = TURN * 4 if is_interpreted else _PROBE
    counts = [-(-job.ids // block) for job in jobs]
    firsts = np.cumsum([0, *counts])
    rows = np.zeros((len(jobs), len(JobField)), np.int64)
    for n, job in enumerate(jobs):
        rows[n] = (job.table, job.ids_at, job.ids, job.locations_at, firsts[n])
    of_block = np.repeat(np.arange(len(jobs), dtype=np.int32), counts)
    written = CacheJobs(address, address + rows.nbytes, sum(job.ids for job in jobs), sum(counts))
    return rows.tobytes() + of_block.tobytes(), written


class Kernels:
    """The kernels of one cache, with their constants. Wide rows are taken in fewer at a time."""

    def __init__(self, is_lfu: bool, gathers: bool, widest_row_bytes: int, is_interpreted: bool) -> None:
        words = max(4, min(_MOST_WORDS, 1 << (widest_row_bytes // 4 - 1).bit_length()))
        self.rows = TURN if is_interpreted else _TILE // words
        self.part = TURN * 4 if is_interpreted else _PART
        block = TURN * 4 if is_interpreted else _PROBE
        lfu, lanes = {"LFU": is_lfu}, {"CLASS_LANES": k.CLASSES}
        self.begin, self.release = Kernel(k.begin, 1, **lanes), Kernel(k.release, 1)
        self.probe, self.resolve = Kernel(k.probe, _PROBE_WARPS, **lfu, BLOCK=block), Kernel(k.resolve, _PROBE_WARPS, BLOCK=block)
        self.enumerate = Kernel(k.enumerate_missing, 4, **lfu, MARKS=MARKS)
        self.choose = Kernel(k.choose, 8, **lfu, SAMPLE=_SAMPLE, **lanes)
        self.admit = Kernel(k.admit, 4, **lfu, BLOCK=TURN)
        self.evict = [Kernel(k.evict, 1, ANY=is_any, **lfu, BLOCK=self.part, **lanes) for is_any in (False, True)]
        self.unlink, self.end = Kernel(k.unlink, _UNLINK_WARPS, BLOCK=UNLINK), Kernel(k.end, 4, BLOCK=TURN)
        tile = {"ROWS": self.rows, "WORDS": words}
        self.list_rows, self.bring = Kernel(k.list_rows, 4, BLOCK=TURN), Kernel(k.bring, _ROW_WARPS, PIECES=_PIECES)
        self.fetch = Kernel(k.fetch, _ROW_WARPS, GATHERS=gathers, REST=False, **tile)
        self.fetch_rest = Kernel(k.fetch, _ROW_WARPS, GATHERS=False, REST=True, **tile)
        self.take_in, self.place = Kernel(k.take_in, 4, **lfu, BLOCK=_LINK), Kernel(k.place, _ROW_WARPS, **tile)
