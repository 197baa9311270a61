"""The cached lookups of a batch, as the cache's kernels read them.

    jobs int64 [lookups, PROBE_SIZE], as `ProbeField` says · the job of each block int32 [blocks]

A block is what one program of `find.probe` takes at once: PROBE_BLOCK ids of one lookup, or the rest of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import ProbeField

PROBE_BLOCK = 128  # ids


class CachedLookup(NamedTuple):
    """Ids that go through the cache. table: its number; ids: how many.

    ids_at: where they begin in the batch's inputs, int64, in bytes. locations_at: where their locations go,
    int32, in bytes. Several lookups are int64 [lookups, fields of this].
    """

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


def shifted(
    lookups: NDArray[np.int64], inputs: NDArray[np.int64], locations: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The same lookups where the inputs and locations of each one's request, [lookups], begin so many
    bytes further on."""
    moved = lookups.copy()
    moved[:, _IDS_AT] += inputs
    moved[:, _LOCATIONS_AT] += locations
    return moved


@dataclass(frozen=True)
class ProbeJobs:
    """Offsets of a batch's jobs and of the job of each block, or their addresses once `placed`."""

    jobs_at: int
    blocks_at: int
    ids: int
    blocks: int

    def placed(self, address: int) -> "ProbeJobs":
        """The same jobs with absolute addresses, written to `address` on the device, which must be
        8-aligned."""
        return replace(self, jobs_at=address + self.jobs_at, blocks_at=address + self.blocks_at)


def write_jobs(lookups: NDArray[np.int64], block: int) -> tuple[bytes, ProbeJobs]:
    """The lookups, int64 [lookups, fields of CachedLookup], as bytes for the device, and where in them jobs
    and blocks lie.

    block: ids of a block.
    """
    counts = -(-lookups[:, _IDS] // block)
    jobs = np.zeros((len(lookups), len(ProbeField)), np.int64)
    jobs[:, _OF_PROBE] = lookups
    jobs[:, ProbeField.FIRST_BLOCK] = np.cumsum(counts) - counts
    job_of_block = np.repeat(np.arange(len(lookups), dtype=np.int32), counts)
    return jobs.tobytes() + job_of_block.tobytes(), ProbeJobs(
        0, jobs.nbytes, cached_ids(lookups), int(counts.sum())
    )
