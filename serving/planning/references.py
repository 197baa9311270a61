"""Which rows a stream of batches uses, sampled by a hash of the row (SHARDS, Waldspurger et al., FAST 2015).
A row is in the sample with all its uses or with none, so the sample says how far apart uses are. Where there
are more rows than are to be kept, the share of rows is halved."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tableside.quant.rows.ids import mix

_TABLES = 1 << 16  # a row is known by 48 bits of a hash of its id, and its table
_SALT = 0x9E3779B97F4A7C15
Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class References:
    """Uses of rows of one stream, in order. A row comes once a batch. key [n]: which row, from 0 on; batch
    [n]: of the use, from 0 on; count [n]: ids that asked for it; bytes, table [keys]: of each row. ids
    [tables]: of the whole stream, in batches that count; share: of rows that are sampled. first: the first
    batch that counts; those before it warm a cache."""

    key: Numbers
    batch: Numbers
    count: Numbers
    bytes: Numbers
    table: Numbers
    ids: Numbers
    share: float
    first: int

    def counts(self) -> Floats:
        """Returns how many ids each use counts for, [n]: 0 of a batch that warms, and so that all add up to
        the ids of the stream: a sample may have more or fewer, by its most used rows."""
        return np.where(self.batch >= self.first, self.count / self.share, 0.0)


class Sampler:
    """Takes batches. row_bytes: of each table. most: rows that are kept, about. coming: the share of all rows
    that comes."""

    def __init__(self, row_bytes: Sequence[int], most: int, coming: float = 1.0) -> None:
        self._row_bytes, self._most, self._coming = np.array(row_bytes, np.int64), most, coming
        self._kept: list[tuple[Keys, Numbers]] = []  # of each batch, with counts
        self._ids: list[Numbers] = []  # of each batch, by table
        self._rows = np.empty(0, np.uint64)  # that are kept
        self._new: list[Keys] = []
        self._random = np.random.default_rng(0)
        self.share = 1.0

    def add(self, ids: Sequence[Numbers]) -> None:
        """Takes a batch: ids [n] of rows that it uses, of each table. An id may come several times."""
        self._ids.append(np.array([of.size for of in ids], np.int64))
        together = np.concatenate([self._sampled(_keys(of, n)) for n, of in enumerate(ids)])
        keys, counts = np.unique(together, return_counts=True)
        order = self._random.permutation(keys.size)  # which of a batch's rows goes first is chance
        self._kept.append((keys[order], counts[order]))
        self._new.append(keys)
        if sum(map(len, self._new)) > self._most:
            self._rows, self._new = np.unique(np.concatenate([self._rows, *self._new])), []
            while self._rows.size > self._most:
                self.share /= 2
                self._rows = self._sampled(self._rows)
                self._kept = [self._thinned(*batch) for batch in self._kept]

    def _sampled(self, keys: Keys) -> Keys:
        return keys[self._is_sampled(keys)] if self.share < 1 else keys

    def _is_sampled(self, keys: Keys) -> NDArray[np.bool_]:
        return keys < np.uint64(int(self.share * 2**64))

    def _thinned(self, keys: Keys, counts: Numbers) -> tuple[Keys, Numbers]:
        is_left = self._is_sampled(keys)
        return keys[is_left], counts[is_left]

    def references(self, ids: Numbers | None = None) -> References:
        """Returns what was taken; the second half of the batches counts. ids [tables]: of the whole stream in
        that half; None: those that were taken."""
        sizes = [keys.size for keys, _ in self._kept]
        first = len(sizes) // 2
        rows, key = np.unique(
            np.concatenate([self._rows[:0], *(keys for keys, _ in self._kept)]), return_inverse=True
        )
        table = (rows % np.uint64(_TABLES)).astype(np.int64)
        return References(
            key.astype(np.int64),
            np.repeat(np.arange(len(sizes)), sizes),
            np.concatenate([key[:0], *(counts for _, counts in self._kept)]),
            self._row_bytes[table],
            table,
            sum(self._ids[first:], np.zeros(self._row_bytes.size, np.int64)) if ids is None else ids,
            self._coming * self.share,
            first,
        )


def _keys(ids: Numbers, table: int) -> Keys:
    """Returns the keys of a table's ids [n], in an order that says nothing of theirs."""
    salted = ids.astype(np.uint64) + np.uint64((table + 1) * _SALT % 2**64)
    return mix(salted.view(np.int64)) // np.uint64(_TABLES) * np.uint64(_TABLES) + np.uint64(table)
