"""Jobs of `quant.gpu.kernels.resolve`, which turns ids into row numbers before anything reads rows.
    jobs int64 [lookups, RESOLVE_SIZE], as `ResolveField` · job of each program int32 [programs] · zeros to 8
A program takes a block of one lookup's ids, or the rest, and overwrites them by row numbers. Imports neither
torch nor Triton."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tableside.quant.gpu.kernels.job import ResolveField

RESOLVE_BLOCK = 256  # ids that a program takes
COUNTS = 2  # int64 of each lookup: ids without a row, ids whose row came from an older version
COUNT_BYTES = 8 * COUNTS


@dataclass(frozen=True)
class ResolvedLookup:
    """Staged ids to turn into row numbers. lookup: its number in the plan; ids: how many; row_map: device
    address of the NativeRowMap; ids_at: byte offset in inputs; found_at: of the mask in outputs, or -1."""

    lookup: int
    row_map: int
    ids_at: int
    ids: int
    found_at: int = -1
    is_overlaid: bool = False

    def shifted(self, inputs_bytes: int, outputs_bytes: int) -> "ResolvedLookup":
        """The same where its request's inputs and outputs begin so many bytes further on."""
        found_at = self.found_at + outputs_bytes if self.found_at >= 0 else -1
        return replace(self, ids_at=self.ids_at + inputs_bytes, found_at=found_at)


@dataclass(frozen=True)
class ResolveJobs:
    """Byte offsets of a batch's jobs and programs' jobs; addresses once `placed`. is_overlaid: a table has an
    overlay."""

    jobs_at: int
    programs_at: int
    programs: int
    is_overlaid: bool = False

    def placed(self, address: int) -> "ResolveJobs":
        """Returns the jobs with absolute addresses after a copy to `address`, which is 8-aligned."""
        return replace(self, jobs_at=address + self.jobs_at, programs_at=address + self.programs_at)


def write_jobs(lookups: Sequence[ResolvedLookup], block: int) -> tuple[bytes, ResolveJobs]:
    """Returns the lookups' bytes for the device, and offsets of jobs and programs. block: ids a program."""
    counts = [-(-lookup.ids // block) for lookup in lookups]
    firsts = np.cumsum([0, *counts])
    jobs = np.zeros((len(lookups), len(ResolveField)), np.int64)
    for job, lookup, first in zip(jobs, lookups, firsts[:-1], strict=True):
        job[ResolveField.ROW_MAP], job[ResolveField.IDS_AT], job[ResolveField.IDS] = (
            lookup.row_map,
            lookup.ids_at,
            lookup.ids,
        )
        job[ResolveField.TARGET_AT], job[ResolveField.FOUND_AT] = lookup.ids_at, lookup.found_at
        job[ResolveField.FIRST_PROGRAM] = first
    programs = int(firsts[-1])
    job_of_program = np.repeat(np.arange(len(lookups), dtype=np.int32), counts)
    written = jobs.tobytes() + job_of_program.tobytes() + bytes(-4 * programs % 8)
    return written, ResolveJobs(0, jobs.nbytes, programs, any(lookup.is_overlaid for lookup in lookups))
