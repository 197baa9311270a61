"""Changes of rows, from which a delta is made, and the rules for the rows that they are read from: errors
name the source, the row, what was expected and what was found."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import ChangeError

BLOCK_BYTES = 4 << 20  # of vectors that are read at once, about
MOST_ROWS = 1 << 16  # of a block
Row = int | str  # what a source calls a row: its number, or an entry's id


@dataclass(frozen=True, eq=False)
class TableChanges:
    """Rows of one table to insert, overwrite or delete, in order: an id's last change counts.

    ids: int64 [n], row numbers or raw ids, as requests send them. vectors: fp32 or fp16 [n, dim]; those of
    deleted ids are not read. deleted: bool [n]; None: none is. where: the first row's place, for people.
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
class ChangeBatch:
    """Changes that become visible together, all or none.

    changes: in order, read once; a table may come several times. source: the stream's name, or None.
    position: the stream's place behind the batch. after: the place before it; None: the stream begins.
    made_at: when its oldest change was made, of time.time(); None: not known.
    """

    changes: Iterable[TableChanges]
    source: str | None = None
    position: str | None = None
    after: str | None = None
    made_at: float | None = None


@dataclass
class RowRules:
    """What the rows of one source must agree on. source, unit: its name, and what its rows are counted in,
    for errors. table: the table of all rows; None: each row names its own."""

    source: str
    unit: str = "row"
    table: str | None = None
    dims: dict[str, int] = field(default_factory=dict)  # table -> values of a vector, once one came

    def error(self, row: Row, text: str) -> ChangeError:
        """An error about a row, which is counted as the source counts."""
        return ChangeError(f"{self.where(row)}: {text}")

    def where(self, row: Row) -> str:
        """A row's place, for people."""
        return f"{self.source}: {self.unit} {row if isinstance(row, str) else f'{row:,}'}"

    def check_table(self, table: str, row: Row) -> str:
        """The table of a row that names it. ChangeError: another one is expected."""
        if self.table is not None and table != self.table:
            raise self.error(row, f"its table is {table!r}; expected {self.table!r}")
        return table

    def check_dim(self, table: str, dim: int, row: Row) -> None:
        """ChangeError: a vector has no values, or another number of them than the table's before it."""
        expected = self.dims.setdefault(table, dim) if dim else self.dims.get(table, 0)
        if not dim or dim != expected:
            told = f"{expected}, as before it" if expected else "at least 1"
            raise self.error(row, f"a vector of table {table!r} with {dim} values; expected {told}")

    def dim(self, table: str) -> int:
        """Values of a table's vectors; 0 where none came yet."""
        return self.dims.get(table, 0)


def int64_ids(values: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Integers as int64, and the place of the first one that int64 does not hold; -1: it holds them all."""
    if values.dtype == np.uint64 and (large := values >> np.uint64(63)).any():
        return values.astype(np.int64), int(large.argmax())
    return values.astype(np.int64, copy=False), -1


def ahead(blocks: Iterator[TableChanges], depth: int = 2) -> Iterator[TableChanges]:
    """The same blocks, up to `depth` of which a thread reads before they are asked for."""
    with ThreadPoolExecutor(1, "tableside-changes") as thread:
        waiting = deque(thread.submit(next, blocks, None) for _ in range(depth))
        while (block := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, blocks, None))
            yield block


def changes(
    table: str,
    ids: NDArray[np.int64],
    vectors: NDArray[Any],
    deleted: NDArray[np.bool_] | None,
    dim: int,
    where: str = "",
) -> TableChanges:
    """Changes of a table, where `vectors` [rows that stay, dim] has none for deleted ids."""
    if deleted is None or not deleted.any():
        return TableChanges(table, ids, vectors, None, where)
    spread = np.zeros((len(ids), dim), vectors.dtype)
    spread[~deleted] = vectors
    return TableChanges(table, ids, spread, deleted, where)
