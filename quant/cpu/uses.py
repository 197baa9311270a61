"""A sample of the uses of rows by requests, in memory of a fixed size. A row is in it with all its uses or
with none: by the hash of its id and a salt of its table (SHARDS, Waldspurger et al., FAST 2015). Where it is
full, half of the rows are left out, and again.

    offset    bytes
    0         8       changes: odd while uses move; a reader reads again
    8         8       bits: a row is in the sample if its key < 2 ** (64 - bits)
    16        8       uses
    24        8       requests
    32        16 F    ids asked for of each of F features, in the first half of the time and in the second
    next 64   16      a use: id int64, feature uint32, when uint32, in milliseconds

Integers are little-endian. One thread writes. In unsigned 64-bit arithmetic, with MIX of `quant.rows.ids`:

    x = id + salt;  key = (x ^ x >> 32) * MIX
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Ids
from tableside.quant.cpu import _native
from tableside.quant.rows.ids import MIX

USE = np.dtype([("id", "<i8"), ("feature", "<u4"), ("ms", "<u4")])
_HEAD = 4


@dataclass(frozen=True)
class Uses:
    """A sample as it was read. totals: [features, 2]; uses: `USE` [n], in order."""

    bits: int
    requests: int
    totals: NDArray[np.int64]
    uses: NDArray[Any]

    def thinned(self, bits: int, salts: NDArray[np.uint64]) -> NDArray[Any]:
        """Returns the uses that a sample of so many bits has, at least its own."""
        keys = keys_of(self.uses["id"].astype(np.int64), salts[self.uses["feature"]])
        return self.uses[keys <= np.uint64((1 << (64 - bits)) - 1)]


def keys_of(ids: Ids, salts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the keys of ids [n] with their salts [n]."""
    x = ids.view(np.uint64) + salts
    return (x ^ (x >> np.uint64(32))) * np.uint64(MIX)


def sample_uses(
    sample: Any, places: Any, inputs: Any, salts: NDArray[np.uint64], is_second_half: bool, ms: int
) -> None:
    """Adds a request to a sample. places: int64 [n, fields of Place]; inputs: its buffer. salts: of each
    feature, that of its table. ValueError: the sample is not one, or of other features."""
    _native.sample_uses(sample, places, inputs, salts, int(is_second_half), ms)


def read_uses(data: bytes, features: int) -> Uses | None:
    """Reads a copy of a sample; None: uses moved in it while it was copied, or it is not one."""
    start = (8 * (_HEAD + 2 * features) + 63) // 64 * 64
    if len(data) < start:
        return None
    changes, bits, entries, requests = np.frombuffer(data, np.int64, _HEAD).tolist()
    if changes % 2 or not 0 <= bits < 48 or not 0 <= entries <= (len(data) - start) // USE.itemsize:
        return None
    totals = np.frombuffer(data, np.int64, 2 * features, 8 * _HEAD).reshape(features, 2)
    return Uses(bits, requests, totals, np.frombuffer(data, USE, entries, start))


def changes_of(data: bytes) -> int:
    """Returns how often uses have moved, of a copy's first bytes."""
    return int(np.frombuffer(data, np.int64, 1)[0])
