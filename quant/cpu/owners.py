"""Which owner has an id, and the different ids of a lookup by owner."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Ids
from tableside.quant.cpu import _native
from tableside.quant.rows.fetched import SplitIds


@dataclass(frozen=True, eq=False)
class Owners:
    """The owners of a table. ends: int64 [owners], the row number or bucket after each one's last, ascending.
    buckets: 0: ids are row numbers; bucket_ids: as in `quant.rows.ids.IdIndex`."""

    ends: NDArray[np.int64]
    buckets: int = 0
    bucket_ids: int = 0

    def split(self, ids: Ids) -> SplitIds:
        """Returns the different ones of ids [n], those of one owner one after another."""
        distinct, at = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
        counts = np.empty(self.ends.size + 1, np.int64)
        asked = np.ascontiguousarray(ids)
        n = _native.split_ids(asked, self.ends, self.buckets, self.bucket_ids, distinct, at, counts)
        return SplitIds(distinct[:n], at, counts.cumsum().tolist())
