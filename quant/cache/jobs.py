"""The cached lookups of a batch as kernels read them.
    jobs int64 [lookups, PROBE_SIZE], as `ProbeField` · the job of each block int32 [blocks]
A block is the work of one program of `find.probe`: PROBE_BLOCK ids of one lookup, or the rest."""

import numpy as np

from tableside.quant.cache.kernels.state import ProbeField
from tableside.quant.device.launch import Jobs

PROBE_BLOCK = 128  # ids


def one_lookup(table: int, ids: int, block: int) -> tuple[bytes, Jobs]:
    """Returns the bytes and offsets of the jobs of a single lookup, whose ids and locations come first in
    their buffers. table: its number; block: ids a block."""
    job = np.zeros(len(ProbeField), np.int64)
    job[ProbeField.TABLE], job[ProbeField.IDS] = table, ids
    blocks = -(-ids // block)
    return job.tobytes() + bytes(4 * blocks), Jobs(0, job.nbytes, blocks, ids)
