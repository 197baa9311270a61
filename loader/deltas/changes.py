"""Changes of rows, and the rules for rows of a source. Errors name source, row, expected and found values."""

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import ChangeError
from tableside.quant.contract import Ids

BLOCK_BYTES = 4 << 20  # of vectors that are read at once, about
MOST_ROWS = 1 << 16  # of a block
Row = int | str  # what a source calls a row: its number, or an entry's id


@dataclass(frozen=True, eq=False)
class TableChanges:
    """Changes of one table, in order; an id's last change counts. ids: int64 [n], as in requests. vectors:
    fp32 or fp16 [n, dim], ignored for deleted ids. deleted: bool [n] or None. where: the first row's place,
    for people. strings: the ids are those of strings."""

    table: str
    ids: Ids
    vectors: NDArray[Any]
    deleted: NDArray[np.bool_] | None = None
    where: str = ""
    strings: bool = False

    @property
    def rows(self) -> int:
        return int(self.ids.size)


@dataclass(frozen=True)
class ChangeBatch:
    """Changes that become visible together. changes: in order, read once. source: the stream's name, or None.
    position, after: the stream's positions behind and before the batch; after None: the stream begins.
    made_at: time.time() of the oldest change; None: unknown. For a model over several hosts: passed: the
    position and a checksum of each part, in order; empty: `position` alone. group: what its changes have in
    common that followers on all hosts apply together, if they keep up; is_group_end: no more of the group
    comes after it."""

    changes: Iterable[TableChanges]
    source: str | None = None
    position: str | None = None
    after: str | None = None
    made_at: float | None = None
    passed: Sequence[str] = ()
    group: str = ""
    is_group_end: bool = False


@dataclass
class RowRules:
    """Checks rows of one source. source, unit: names for errors. table: the table of rows that name none.
    strings: tables whose ids are strings, where the source does not tell them from integers."""

    source: str
    unit: str = "row"
    table: str | None = None
    strings: Container[str] = ()
    dims: dict[str, int] = field(default_factory=dict)  # table -> values of a vector, once one came

    def error(self, row: Row, text: str) -> ChangeError:
        """Returns an error about a row, which is counted as the source counts."""
        return ChangeError(f"{self.where(row)}: {text}")

    def where(self, row: Row) -> str:
        return f"{self.source}: {self.unit} {row if isinstance(row, str) else f'{row:,}'}"

    def check_table(self, table: str, row: Row) -> str:
        """Returns the table of a row that names it. ChangeError: another one is expected."""
        if self.table is not None and table != self.table:
            raise self.error(row, f"its table is {table!r}; expected {self.table!r}")
        return table

    def check_dim(self, table: str, dim: int, row: Row) -> None:
        """Raises ChangeError if a vector is empty, or its dim differs from the table's."""
        expected = self.dims.setdefault(table, dim) if dim else self.dims.get(table, 0)
        if not dim or dim != expected:
            told = f"{expected}, as before it" if expected else "at least 1"
            raise self.error(row, f"a vector of table {table!r} with {dim} values; expected {told}")

    def dim(self, table: str) -> int:
        """Values of a table's vectors; 0 where none came yet."""
        return self.dims.get(table, 0)


def ahead(blocks: Iterator[TableChanges], depth: int = 2) -> Iterator[TableChanges]:
    """Yields the same blocks; a thread reads up to `depth` of them in advance."""
    with ThreadPoolExecutor(1, "tableside-changes") as thread:
        waiting = deque(thread.submit(next, blocks, None) for _ in range(depth))
        while (block := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, blocks, None))
            yield block


def changes(
    table: str,
    ids: Ids,
    vectors: NDArray[Any],
    deleted: NDArray[np.bool_] | None,
    dim: int,
    where: str = "",
    strings: bool = False,
) -> TableChanges:
    """Returns changes of a table; `vectors` [kept rows, dim] lacks those of deleted ids."""
    if deleted is None or not deleted.any():
        return TableChanges(table, ids, vectors, None, where, strings)
    spread = np.zeros((len(ids), dim), vectors.dtype)
    spread[~deleted] = vectors
    return TableChanges(table, ids, spread, deleted, where, strings)
