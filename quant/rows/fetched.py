"""Tables whose rows are not at an address: they are fetched by their numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tableside.quant.errors import QuantError, RowsNotRead
from tableside.quant.row_format import RowFormat
from tableside.quant.rows.hot import HotRows
from tableside.quant.rows.ids import RowMap

if TYPE_CHECKING:
    from tableside.quant.contract import Table


class RowState(IntEnum):
    """What came of a row that was asked for."""

    HERE = 0
    LATE = 1  # not within the deadline
    CORRUPT = 2  # read, and not what was written
    MISSING = 3  # asked for by an id that the table has not


def not_read(state: NDArray[np.uint8]) -> RowsNotRead:
    """Returns the error that says what came of rows that were asked for, `RowState` [n]."""
    late, corrupt = (int(np.count_nonzero(state == s)) for s in (RowState.LATE, RowState.CORRUPT))
    return RowsNotRead(state.size, late, corrupt)


class Fetch(Protocol):
    """Reads rows of one table; any thread may call."""

    def __call__(
        self,
        rows: NDArray[np.int64],
        out: NDArray[np.uint8],
        state: NDArray[np.uint8],
        deadline: float | None,
    ) -> None:
        """Copies packed rows to out [n, row_bytes], and writes what came of each to state [n] (`RowState`;
        HERE before the call). rows: [n] numbers of the table, ascending, each once. deadline: of
        time.monotonic; None: none. It may block until then, where it can within `quant.rows.turns.waiting`:
        else other readers wait meanwhile."""


@dataclass(frozen=True, eq=False)
class RowOwners:
    """The owners of a table's rows. ends: int64 [owners], the row number or bucket after each one's last,
    ascending. buckets: 0: ids are row numbers; bucket_ids: as in `quant.rows.ids.IdIndex`."""

    ends: NDArray[np.int64]
    buckets: int = 0
    bucket_ids: int = 0


class RowsAsked(NamedTuple):
    """Rows of several tables. tables: their names; row_bytes: int64 [tables]; ids: int64 [n], ids or row
    numbers, of a table each once: owner after owner, of each table after table, at last those that no owner
    has. counts: int64 [tables, owners + 1], of an owner, or of none; at: int64 [tables, owners + 1], the byte
    of `out` where the packed rows of these go. state: `RowState` [n], HERE before the call. Before the first
    row of an owner `out` has room for a byte for each of its ids, rounded up to 8, and behind its last one
    for 8 bytes, so that an answer may be read there as it comes."""

    tables: Sequence[str]
    row_bytes: NDArray[np.int64]
    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    at: NDArray[np.int64]
    out: NDArray[np.uint8]
    state: NDArray[np.uint8]

    @property
    def starts(self) -> NDArray[np.int64]:
        """The place in `ids` of the first id of each table and owner, int64 [tables, owners + 1]."""
        by_owner = self.counts.T
        return (by_owner.cumsum().reshape(by_owner.shape) - by_owner).T

    def blocks(self, table: int) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
        """Yields where the ids of one table and owner are, and their rows, [ids, row_bytes]."""
        row_bytes = int(self.row_bytes[table])
        of_owners = (of[table].tolist() for of in (self.starts, self.counts, self.at))
        for start, n, at in zip(*of_owners, strict=True):
            yield slice(start, start + n), self.out[at : at + n * row_bytes].reshape(n, row_bytes)


class Note(Protocol):
    """Is told what lookups ask of a table."""

    def __call__(self, ids: NDArray[np.int64], is_due: bool | None = None) -> bool:
        """Returns whether the ids [n] of a lookup were taken. is_due: what this said of another lookup of the
        same request, of all of which it wants to know, or of none; None: this is the first one."""


class RowReader(NamedTuple):
    """What reads rows of one table. ready: as `fetch`, of rows that need no wait, the others are LATE; None:
    all may need one. wait_s: that a lookup may wait at most; None: any time. away: returns the
    places in rows [n] of those that may not be read at the table's address now, without rows that the table
    has not; None: they never may. ask: has rows [n] brought, without a wait, as `fetch` will need them.
    default: gives the default row, uint8 [row_bytes], which stands for rows that are late; None, or if it
    gives None: these are an error. in_place: is told how many rows were read at the table's address."""

    fetch: Fetch
    ready: Fetch | None = None
    wait_s: float | None = None
    away: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None
    ask: Callable[[NDArray[np.int64]], object] | None = None
    default: Callable[[], NDArray[np.uint8] | None] | None = None
    note: Note | None = None
    in_place: Callable[[int], object] | None = None


@dataclass(frozen=True, eq=False)
class FetchedTable:
    """Packed rows that `reader` fetches. rows: including the default row. row_bytes: of one, as it writes
    it. row_map: maps ids to row numbers; None: ids are row numbers. id_at: byte of a row at which it keeps
    its raw id, which is compared there and not in `row_map`; -1: in `row_map`. in_place: the same rows in
    memory, of which `reader.away` speaks. QuantError: no row of this format and dim has so many bytes."""

    rows: int
    row_bytes: int
    row_format: RowFormat
    dim: int
    reader: RowReader
    row_map: RowMap | None = None
    id_at: int = -1
    in_place: "Table | None" = None

    def __post_init__(self) -> None:
        expected = self.row_format.row_sizes(self.dim)
        if self.row_bytes not in expected:
            raise QuantError(
                f"fetched rows have {self.row_bytes} bytes; expected {' or '.join(map(str, expected))} for "
                f"{self.row_format.label} of dim {self.dim}"
            )


@dataclass(frozen=True, eq=False)
class AskedTable:
    """Packed rows that are asked for by ids, together with those of other tables: whoever has them says which
    there are. name: of the table for `call`, which these tables share; it takes what is asked of each and the
    deadline (`Fetch`). rows: ids with a row. default: the row of other ids, uint8 [row_bytes]; None: they are
    refused. late_is_default: it also stands for rows that are late; else these are an error. wait_s: that a
    lookup may wait at most. hot: rows that are in memory, too, of a table whose ids are row numbers."""

    name: str
    rows: int
    row_bytes: int
    row_format: RowFormat
    dim: int
    owners: RowOwners
    call: Callable[[RowsAsked, float | None], object]
    wait_s: float
    default: NDArray[np.uint8] | None = None
    late_is_default: bool = False
    row_map: None = None
    hot: HotRows | None = None
    note: Note | None = None


def asked_table(table: Any) -> AskedTable | None:
    """Returns what a source of rows, placed on a device or not, asks for its rows; None: it does not ask."""
    source = getattr(table, "host", table)
    return source if isinstance(source, AskedTable) else None
