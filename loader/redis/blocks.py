"""The rows of a table in Redis: keys, values, checksums, and the commands that read them.

    tableside:ads:user:0f3c5a9e1b7d2468:00012{3ab}    block 0x123ab: MODEL, TABLE, the table's seed

A block has `block_rows` records, the last one fewer: a packed row, then its checksum, uint32 little-endian.
One GETRANGE reads one record, so a request costs its rows and no blocks. In a cluster the digits in braces
say a block's slot. With k, random words of the seed, and w, the row's words, uint32 little-endian, a checksum
is

    (k[0] + k[1] * row number + k[2] * w[0] + k[3] * w[1] + ...) mod 2^64 >> 32

A row of another load, table or number, or one that changed, has it once in 2^32 times. Values are as long as
an allocation of Redis's, so that keys and checksums take little beside the rows.
"""

import binascii
import secrets

import numpy as np
from numpy.typing import NDArray

from tableside.loader.model.tiers import RedisTier
from tableside.loader.redis import _records
from tableside.loader.segment.remote import RedisPlace
from tableside.quant.contract import Bytes, Ids

SUM_BYTES = 4
_BLOCK_BYTES = (1 << 14) - 8  # with what Redis writes before and behind a value
_SEEDS = 1 << 63
_TAG_DIGITS, _HEAD_DIGITS = 3, 5  # of a block's number, in braces and before them
SLOTS = 1 << 14  # of a cluster
_SLOT_OF_TAG = np.array(
    [binascii.crc_hqx(b"%03x" % tag, 0) % SLOTS for tag in range(16**_TAG_DIGITS)], np.int64
)


def new_place(model: str, table: str, tier: RedisTier, row_bytes: int) -> RedisPlace:
    """Returns where a load writes a table."""
    seed = secrets.randbelow(_SEEDS)
    rows = max(1, _BLOCK_BYTES // (row_bytes + SUM_BYTES))
    prefix = f"tableside:{model}:{table}:{seed:016x}:"
    return RedisPlace(tier.addresses, tier.is_tls, prefix, seed, rows, tier.service)


class RedisBlocks:
    """The blocks of a table. row_bytes: a multiple of 4."""

    def __init__(self, place: RedisPlace, row_bytes: int) -> None:
        self.place, self.row_bytes, self.record_bytes = place, row_bytes, row_bytes + SUM_BYTES
        self.words = np.random.PCG64(place.seed).random_raw(2 + row_bytes // 4)
        self._prefix = place.prefix.encode()

    def key(self, block: int) -> bytes:
        digits = f"{block:0{_HEAD_DIGITS + _TAG_DIGITS}x}"
        return f"{self.place.prefix}{digits[:_HEAD_DIGITS]}{{{digits[_HEAD_DIGITS:]}}}".encode()

    def slots(self, rows: Ids) -> Ids:
        """Returns the cluster's slot of each row [n]."""
        return _SLOT_OF_TAG[rows // self.place.block_rows % _SLOT_OF_TAG.size]

    def commands(self, rows: Ids, before: bytes = b"") -> bytes:
        """Returns commands that ask for the records of rows [n]. before: what comes before each."""
        return _records.commands(self._prefix, self.place.block_rows, self.record_bytes, before, rows)

    def sums(self, rows: Ids, packed: Bytes) -> NDArray[np.uint32]:
        """Returns the checksums of rows [n]. packed: uint8 [n, row_bytes], contiguous in a row."""
        first, second = self.words[:2]
        found = (
            np.einsum("ij,j->i", packed.view("<u4"), self.words[2:]) + first + second * rows.view(np.uint64)
        )
        sums: NDArray[np.uint32] = (found >> np.uint64(32)).astype(np.uint32)
        return sums

    def records(self, first: int, packed: Bytes) -> Bytes:
        """Returns the records of rows that follow each other, uint8 [n, record_bytes]. first: the number of
        the first one."""
        made = np.empty((len(packed), self.record_bytes), np.uint8)
        made[:, : self.row_bytes] = packed
        sums = self.sums(np.arange(first, first + len(packed)), packed)
        made[:, self.row_bytes :] = sums.astype("<u4").view(np.uint8).reshape(-1, SUM_BYTES)
        return made
