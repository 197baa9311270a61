"""The cached lookups of a batch as kernels read them.
    jobs int64 [lookups, PROBE_SIZE], as `ProbeField` · the job of each block int32 [blocks]
A block is the work of one program of `find.probe`: PROBE_BLOCK ids of one lookup, or the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import ProbeField

PROBE_BLOCK = 128  # ids


class CachedLookup(NamedTuple):
    """A lookup through the cache: table number, number of ids, and byte offsets of its int64 ids in the
    batch's inputs and of its int32 locations. Several are int64 [lookups, fields]."""

    table: int
    ids_at: int
    ids: int
    locations_at: int


_TABLE, _IDS_AT, _IDS, _LOCATIONS_AT = range(len(CachedLookup._fields))
_OF_PROBE = [ProbeField.TABLE, ProbeField.IDS_AT, ProbeField.IDS, ProbeField.LOCATIONS_AT]


def cached_rows(lookups: Sequence[CachedLookup]) -> NDArray[np.int64]:
    """Lookups as int64 [lookups, fields of CachedLookup]."""
    return np.array(lookups, np.int64).reshape(-1, len(CachedLookup._fields))


def cached_ids(lookups: NDArray[np.int64]) -> int:
    """Ids of all lookups together."""
    return int(lookups[:, _IDS].sum())


@dataclass(frozen=True)
class ProbeJobs:
    """Offsets of a batch's jobs and of the job of each block, or their addresses once `placed`."""

    jobs_at: int
    blocks_at: int
    ids: int
    blocks: int

    def placed(self, address: int) -> "ProbeJobs":
        """Returns the jobs with absolute addresses after a copy to `address`, which is 8-aligned."""
        return replace(self, jobs_at=address + self.jobs_at, blocks_at=address + self.blocks_at)


def write_jobs(lookups: NDArray[np.int64], block: int) -> tuple[bytes, ProbeJobs]:
    """Returns the bytes of jobs and blocks for int64 [lookups, fields of CachedLookup], and their offsets.
    block: ids a block."""
    counts = -(-lookups[:, _IDS] // block)
    jobs = np.zeros((len(lookups), len(ProbeField)), np.int64)
    jobs[:, _OF_PROBE] = lookups
    jobs[:, ProbeField.FIRST_BLOCK] = np.cumsum(counts) - counts
    job_of_block = np.repeat(np.arange(len(lookups), dtype=np.int32), counts)
    return jobs.tobytes() + job_of_block.tobytes(), ProbeJobs(
        0, jobs.nbytes, cached_ids(lookups), int(counts.sum())
    )
