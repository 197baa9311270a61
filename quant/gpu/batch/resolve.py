"""Jobs of `quant.gpu.kernels.resolve`, which turns ids into row numbers before anything reads rows.
    jobs int64 [lookups, RESOLVE_SIZE], as `ResolveField` · job of each program int32 [programs] · zeros to 8
A program takes a block of one lookup's ids, or the rest, and overwrites them by row numbers. Imports neither
torch nor Triton."""

RESOLVE_BLOCK = 256  # ids that a program takes
COUNTS = 2  # int64 of each lookup: ids without a row, ids whose row came from an older version
COUNT_BYTES = 8 * COUNTS
