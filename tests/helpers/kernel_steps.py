"""The steps of `quant.gpu.kernels.lookup` in plain Python, one id, bag or row at a time, as tests expect
them.

What a row's bytes mean is in `quant.cpu.reference`, which has every format in plain torch.
"""

from collections.abc import Sequence

from tableside.quant.gpu.kernels.job import SPLIT_BLOCK

_STAGING_UNIT = 16  # bytes


def bag_starts(lengths: Sequence[int], ids: int) -> tuple[bool, list[int]]:
    """Whether lengths are wrong (one is negative, or their sum is not `ids`); and where each bag starts,
    and the last ends."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return min(lengths, default=0) < 0 or starts[-1] != ids, starts


def row_address(
    id: int, table: int, row_bytes: int, location: int, hbm_rows: int, share: int, staging: int
) -> int:
    """Where a row lies. The arguments are those of the kernel's `_row_address`, for one id."""
    block, in_block = divmod(id, SPLIT_BLOCK)
    padded = -(-row_bytes // _STAGING_UNIT) * _STAGING_UNIT  # outside of the table itself
    if id >= 0 and in_block < share:  # a split table's row that is in HBM
        return hbm_rows + (block * share + in_block) * padded
    if location >= 0:  # in a slot of the cache
        return hbm_rows + location * padded
    if location == -1:  # where the table lies
        return (table + id * (row_bytes if id >= 0 else padded)) % 2**64
    return staging + (-2 - location) * _STAGING_UNIT  # fetched for this batch


def pooled(
    rows: Sequence[Sequence[float]], weights: Sequence[float] | None, is_mean: bool, dim: int
) -> list[float]:
    """The vector of one bag from its dequantized rows, each [dim]: their weighted sum, for a mean divided
    by their number."""
    vector = [-0.0 if len(rows) == 1 else 0.0] * dim  # the sum of one row is that row, and x + -0 is x
    for n, row in enumerate(rows):
        weight = 1.0 if weights is None else weights[n]
        vector = [sum_ + weight * value for sum_, value in zip(vector, row, strict=True)]
    return [value / max(1, len(rows)) for value in vector] if is_mean else vector
