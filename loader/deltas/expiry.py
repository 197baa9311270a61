"""Which ids a compaction drops, of a table with a ttl or with at most `max_rows` rows.

Ids go that no change wrote for longer than the ttl. Of more than `max_rows` ids that are left, those go that
were used least, where uses are counted (loader.hot.counts). Of those that were used alike the oldest go, and
of one age the least ids. So the same rows, times and counts lose the same ids.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.segment.stored import StoredIds, Times
from tableside.quant.contract import Ids


class LivingRows(NamedTuple):
    """Some rows of a table. times: of their last change, uint32 [n]; uses: [n], or 0 of all."""

    ids: Ids
    times: Times
    uses: NDArray[np.uint8] | int = 0

    @property
    def ranks(self) -> Ids:
        """Returns their order, int64 [n]: the lowest goes first."""
        return self.times.astype(np.int64) | np.asarray(self.uses, np.int64) << 32


@dataclass(frozen=True)
class Expiry:
    """What is dropped of a table: ids of a time before `oldest`, and those up to (last_rank, last_id).
    expired, evicted: how many."""

    oldest: int = 0
    last_rank: int = -1
    last_id: int = 0
    expired: int = 0
    evicted: int = 0

    @property
    def dropped(self) -> int:
        return self.expired + self.evicted

    def keeps(self, rows: LivingRows) -> NDArray[np.bool_]:
        """Returns which rows stay, bool [n]."""
        ranks = rows.ranks
        is_later = (ranks > self.last_rank) | ((ranks == self.last_rank) & (rows.ids > self.last_id))
        stays: NDArray[np.bool_] = is_later & (rows.times >= self.oldest)
        return stays


def expiry_of(
    ids: StoredIds,
    now: float,
    blocks: Callable[[], Iterable[LivingRows]],
    scratch: Callable[[int], Ids],
) -> Expiry:
    """Decides what goes at `now`, in seconds since 1970. blocks: gives all rows, each time the same; scratch:
    gives int64 [n]."""
    aged = Expiry(max(0, int(now) - ids.ttl_s) if ids.ttl_s else 0)
    left = expired = 0
    for rows in blocks():
        stay = int(aged.keeps(rows).sum())
        left, expired = left + stay, expired + rows.ids.size - stay
    evicted = max(0, left - ids.max_rows) if ids.max_rows else 0
    if not evicted:
        return Expiry(aged.oldest, expired=expired)
    found = _filled(scratch(left), (rows.ranks[aged.keeps(rows)] for rows in blocks()))
    last = _smallest(found, evicted)
    alike = evicted - int((found < last).sum())  # of the last rank, so many go
    found = _filled(found, (rows.ids[aged.keeps(rows) & (rows.ranks == last)] for rows in blocks()))
    return Expiry(aged.oldest, last, _smallest(found, alike), expired, evicted)


def _filled(out: Ids, parts: Iterable[Ids]) -> Ids:
    """Returns the parts, one after another, in the memory of `out`."""
    at = 0
    for part in parts:
        out[at : at + part.size] = part
        at += part.size
    return out[:at]


def _smallest(values: Ids, number: int) -> int:
    """Returns the value that is `number` th of all, from 1; reorders them."""
    values.partition(number - 1)
    return int(values[number - 1])
