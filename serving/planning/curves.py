"""Hit rates of a cache by its size, of a sample of uses.

A sample is of rows by a hash of them (SHARDS, Waldspurger et al., FAST 2015): a row is in it with all its
uses or with none, so it says how far apart uses are. Where there are more rows than are to be kept, the share
of rows is halved. LRU: from the bytes of the rows that are used between two uses of a row (Mattson et al.,
1970). LFU: by a cache over the sample, as much smaller as the sample is, with the scores and the admission of
ours (`quant.cache.cache`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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


HALF_LIFE = 1000.0  # batches, of a use (`CacheSettings.half_life`)


def previous_use(key: Numbers) -> Numbers:
    """Returns the place of the use before, of the same key, [n]; -1: there is none."""
    order = np.argsort(key, kind="stable")
    found = np.full(key.size, -1, np.int64)
    is_again = key[order[1:]] == key[order[:-1]]
    found[order[1:][is_again]] = order[:-1][is_again]
    return found


def reuse_bytes(r: References) -> Floats:
    """Returns how many bytes an LRU cache has to have so that a use finds its row, [n], those of the row with
    it; infinite for a first use. In the whole stream, not in the sample."""
    last, size = previous_use(r.key), r.bytes[r.key]
    ends = np.concatenate([[0], np.cumsum(size)])
    # Of the uses between, those whose row was used between before are no new rows. Uses of one batch come at
    # once: in this order none is behind one of its batch that was used later.
    order, again = np.lexsort((last, r.batch)), np.empty(last.size, np.int64)
    again[order] = _weight_of_larger_before(last[order], size[order])
    begun = np.searchsorted(r.batch, r.batch)
    return np.where(last < 0, np.inf, (ends[begun] - ends[last + 1] - again + size) / r.share)


def _weight_of_larger_before(values: Numbers, weights: Numbers) -> Numbers:
    """Returns the sum of the weights of those before an element that are larger, [n]. Merges runs of 1, 2,
    4 and so on, all runs of a length at once. values: from -1 on; of equal ones nothing is said."""
    n, width = values.size, 1
    found = np.zeros(n, np.int64)
    while width < n:
        run = np.arange(n) // (2 * width)
        order = np.argsort(run * (n + 1) + values, kind="stable")  # within each run, by value
        is_left = (order // width) % 2 == 0
        ends = np.cumsum(np.where(is_left, weights[order], 0))
        last = np.minimum((run + 1) * (2 * width), n) - 1  # of the run, whose elements are together
        found[order[~is_left]] += (ends[last] - ends)[~is_left]
        width *= 2
    return found


def lru(r: References, sizes: Sequence[float]) -> Floats:
    """Returns the hits of an LRU cache of each size, in ids by table, [sizes, tables]."""
    order = np.argsort(distance := reuse_bytes(r))
    counts, table = r.counts()[order], r.table[r.key[order]]
    within = np.searchsorted(distance[order], np.array(sizes, float), side="right")
    found = np.zeros((len(sizes), r.ids.size))
    for n in range(r.ids.size):
        found[:, n] = np.concatenate([[0], np.cumsum(np.where(table == n, counts, 0))])[within]
    return _adjusted(r, found)


def lfu(r: References, sizes: Sequence[float], half_life: float = HALF_LIFE) -> Floats:
    """Returns the hits of an LFU cache of each size, in ids by table, [sizes, tables]."""
    found = np.array([_lfu_hits(r, size * r.share, half_life) for size in sizes])
    return _adjusted(r, found.reshape(len(sizes), -1))


def _adjusted(r: References, hits: Floats) -> Floats:
    """Returns hits by table, [sizes, tables], where the sample has more or fewer ids than its share of the
    stream's. That is due to the rows that are used most, which any cache holds (SHARDS_adj)."""
    sampled = np.bincount(r.table[r.key], r.counts(), r.ids.size)
    return np.clip(hits + (r.ids - sampled), 0, r.ids)


class _Ghosts:
    """Scores of missed rows: of those that share a pair of ghosts, the two with the highest ones. The lower
    score falls when another row is missed."""

    def __init__(self, pairs: int) -> None:
        self._pairs = pairs
        self._keys, self._scores = np.full((pairs, 2), -1), np.full((pairs, 2), -np.inf)

    def missed(self, key: Numbers, tick: float) -> Floats:
        """Returns the scores of rows [n] that are missed now, with what is remembered of them."""
        pair = (mix(key) % np.uint64(self._pairs)).astype(np.int64)
        (one, other), (score, score_of_other) = self._keys[pair].T, self._scores[pair].T
        which = ((one != key) & ((other == key) | (score_of_other < score))).astype(np.int64)
        known, before = self._keys[pair, which], self._scores[pair, which]
        found = np.where(known == key, np.logaddexp2(before, tick), tick)
        stays = (known != key) & (before > tick)
        self._keys[pair, which] = np.where(stays, known, key)
        self._scores[pair, which] = np.where(stays, before - 1, found)
        return found


def _lfu_hits(r: References, size: float, half_life: float) -> Floats:
    """Hits of a cache of `size` bytes over the sample, by table."""
    score = np.empty(r.bytes.size)  # of held rows: log2 of their uses, of which old ones count less
    is_held = np.zeros(r.bytes.size, bool)
    hits, counts, free = np.zeros(r.ids.size), r.counts(), size
    smallest = max(1, int(r.bytes.min(initial=1 << 40)))
    ghosts = _Ghosts(max(1, int(size * r.bytes.size / max(1, r.bytes.sum())) // 2))
    ends = np.searchsorted(r.batch, np.arange(int(r.batch.max(initial=-1)) + 2))
    for batch, (start, end) in enumerate(pairwise(ends)):
        key, tick = r.key[start:end], batch / half_life
        is_hit = is_held[key]
        found, missed = key[is_hit], key[~is_hit]
        hits += np.bincount(r.table[found], counts[start:end][is_hit], r.ids.size)
        score[found] = np.logaddexp2(score[found], tick)
        score[missed] = ghosts.missed(missed, tick)
        missed = missed[np.argsort(-score[missed], kind="stable")]
        needed = np.cumsum(r.bytes[missed])
        is_held[found] = False  # those of this batch stay
        victims = np.flatnonzero(is_held)
        most = min(victims.size, int(max(0.0, (needed[-1] if needed.size else 0) - free) / smallest) + 1)
        if most < victims.size:
            largest = np.partition(score[victims], most - 1)[most - 1]
            victims = victims[score[victims] <= largest]
        victims = victims[np.argsort(score[victims], kind="stable")]
        room = np.concatenate([[0], np.cumsum(r.bytes[victims])])
        taken = np.searchsorted(room, needed - free)  # victims that make room for so many of the missed
        has_room = taken <= victims.size
        worst = np.concatenate([[-np.inf], score[victims]])[np.minimum(taken, victims.size)]
        takes_none = np.diff(taken, prepend=0) == 0  # there is room left by the ones before
        admitted = int(np.argmin(np.append(has_room & (takes_none | (worst < score[missed])), False)))
        is_held[found] = True
        if admitted:
            gone = int(taken[admitted - 1])
            is_held[victims[:gone]] = False
            is_held[missed[:admitted]] = True
            free += room[gone] - needed[admitted - 1]
    return hits
