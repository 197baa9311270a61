"""Changes of rows: what a delta is made of, before it is one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TableChanges:
    """Rows of one table that are inserted, overwritten or deleted, in order: of an id that comes twice the last change counts.

    ids: int64 [n], what requests send: row numbers, or raw ids. vectors: fp32 or fp16 [n, dim]; those of deleted ids are not
    read. deleted: bool [n]; None: none is. where: the place of the first row, for people; "": not known.
    """

    table: str
    ids: NDArray[np.int64]
    vectors: NDArray[Any]
    deleted: NDArray[np.bool_] | None = None
    where: str = ""

    @property
    def rows(self) -> int:
        return int(self.ids.size)


@dataclass(frozen=True)
class Batch:
    """Changes that become visible together, all or none.

    changes: in order, read once; a table may come several times. source: the name of the stream that they come from, and
    position: the place in it behind their last one, as the stream counts; None: they come from no stream. after: the place that
    they follow; None: they are the stream's first. made_at: when the oldest of them was made, of time.time(); None: not known.
    """

    changes: Iterable[TableChanges]
    source: str | None = None
    position: str | None = None
    after: str | None = None
    made_at: float | None = None
