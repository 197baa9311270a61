"""Jobs of `quant.gpu.kernels.resolve`, which turns ids into row numbers before anything reads rows.
    jobs int64 [lookups, RESOLVE_SIZE], as `ResolveField` · job of each program int32 [programs] · zeros to 8
A program takes a block of one lookup's ids, or the rest, and overwrites them by row numbers. Imports neither
torch nor Triton."""

from dataclasses import dataclass, replace

RESOLVE_BLOCK = 256  # ids that a program takes
COUNTS = 2  # int64 of each lookup: ids without a row, ids whose row came from an older version
COUNT_BYTES = 8 * COUNTS


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
