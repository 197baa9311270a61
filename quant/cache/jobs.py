"""The cached lookups of a batch, as the cache's kernels read them.

    jobs int64 [lookups, PROBE_SIZE], as `ProbeField` says · the job of each block int32 [blocks]

A block is what one program of `find.probe` takes at once: so many ids of one lookup, or the rest of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tableside.quant.cache.kernels.state import ProbeField

_BLOCK = 128
_BLOCK_INTERPRETED = 1024  # fewer turns, which are what takes the interpreter long


@dataclass(frozen=True)
class CachedLookup:
    """Ids that go through the cache. table: its number; ids: how many.

    ids_at: where they begin in the batch's inputs, int64, in bytes. locations_at: where their locations go,
    int32, in bytes.
    """

    table: int
    ids_at: int
    ids: int
    locations_at: int

    def shifted(self, inputs_bytes: int, locations_bytes: int) -> "CachedLookup":
        """The same lookup where its request's inputs and locations begin so many bytes further on."""
        return replace(self, ids_at=self.ids_at + inputs_bytes, locations_at=self.locations_at + locations_bytes)


@dataclass(frozen=True)
class ProbeJobs:
    """Where a batch's jobs and the job of each block lie, in bytes from the first one written, or addresses
    once `placed`.
    """

    jobs_at: int
    blocks_at: int
    ids: int
    blocks: int

    def placed(self, address: int) -> "ProbeJobs":
        """The same jobs with absolute addresses, written to `address` on the device, which must be 8-aligned."""
        return replace(self, jobs_at=address + self.jobs_at, blocks_at=address + self.blocks_at)


def probe_block(is_interpreted: bool) -> int:
    """Ids of a block."""
    return _BLOCK_INTERPRETED if is_interpreted else _BLOCK


def write_jobs(lookups: Sequence[CachedLookup], is_interpreted: bool) -> tuple[bytes, ProbeJobs]:
    """The lookups as bytes for the device, and where in them jobs and blocks lie."""
    block = probe_block(is_interpreted)
    counts = [-(-lookup.ids // block) for lookup in lookups]
    firsts = np.cumsum([0, *counts])
    jobs = np.zeros((len(lookups), len(ProbeField)), np.int64)
    for job, lookup, first in zip(jobs, lookups, firsts[:-1], strict=True):
        job[ProbeField.TABLE], job[ProbeField.IDS_AT], job[ProbeField.IDS] = lookup.table, lookup.ids_at, lookup.ids
        job[ProbeField.LOCATIONS_AT], job[ProbeField.FIRST_BLOCK] = lookup.locations_at, first
    job_of_block = np.repeat(np.arange(len(lookups), dtype=np.int32), counts)
    ids = sum(lookup.ids for lookup in lookups)
    return jobs.tobytes() + job_of_block.tobytes(), ProbeJobs(0, jobs.nbytes, ids, sum(counts))
