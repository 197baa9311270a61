"""What a server asks owners of rows, and what they answer. Numbers are little-endian.

GET  /v2/rows/MODEL             the owner's live version, as JSON (`Described`)
GET  /v2/rows/MODEL/states      the states that it keeps, as JSON: a list of STATE
GET  /v2/rows/MODEL/STATE       200: it has the state, and keeps it for some seconds
POST /v2/rows/MODEL/STATE       rows of a state, by `HostsState` as text
GET  /v2/buckets/MODEL/STATE    heads of its files (loader.segment.transfer), that of the version first
GET  /v2/buckets/MODEL/STATE/FILE/FIRST-END     chunks [FIRST, END) of one of them, bytes of one table or
                                id index. FILE: the checksum in its head, as 16 hexadecimal digits

request     int64: n tables; n times a table's number and its count of ids; ids, table after table
response    uint8 for each id: 1 if the table has it, padded with zeros to a multiple of 8;
            a packed row for each id, table after table, of no meaning where the byte is 0;
            xxh3-64 of what is before, seeded with STATE (`HostsState.seed`)
heads       int64: n files, the bytes of each head; then the heads
"""

from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tableside.loader.segment.remote import HostsState
from tableside.quant.contract import Bytes, Ids

PATH, FILES_PATH = "/v2/rows", "/v2/buckets"
SUM_BYTES = 8  # at the end of a response


class TableIds(NamedTuple):
    """Ids asked of tables. tables: int64 [n], their numbers in the version; counts: int64 [n], ids of each;
    ids: table after table."""

    tables: NDArray[np.int64]
    counts: NDArray[np.int64]
    ids: Ids


def rows_at(ids: int) -> int:
    """The byte of a response of so many ids where its rows begin."""
    return -(-ids // 8) * 8


class RowsLayout(NamedTuple):
    """Where a response has what it says of each table, in bytes. found_at, rows_at: int64 [tables], of its
    first id; ids: of all; size: of the whole body."""

    found_at: NDArray[np.int64]
    rows_at: NDArray[np.int64]
    ids: int
    size: int

    @classmethod
    def of(cls, counts: NDArray[np.int64], row_bytes: NDArray[np.int64]) -> "RowsLayout":
        """counts: ids of each table."""
        ends, row_ends = counts.cumsum(), (counts * row_bytes).cumsum()
        ids = int(ends[-1])
        first = rows_at(ids)
        return cls(
            ends - counts, row_ends - counts * row_bytes + first, ids, first + int(row_ends[-1]) + SUM_BYTES
        )


def pack_request(asked: TableIds) -> tuple[memoryview, ...]:
    """Returns the body of a request, as its parts."""
    head = np.empty(1 + 2 * asked.tables.size, "<i8")
    head[0], head[1::2], head[2::2] = asked.tables.size, asked.tables, asked.counts
    return tuple(part.view(np.uint8).data for part in (head, asked.ids) if part.size)


def unpack_request(body: Any, most: int) -> TableIds:
    """Reads the body of a request. most: tables of the version. ValueError: it is none."""
    if len(body) % 8:
        raise ValueError(f"the body has {len(body)} bytes; expected int64 numbers")
    numbers = np.frombuffer(body, "<i8")
    n = int(numbers[0]) if numbers.size else 0
    if not 0 < n <= (numbers.size - 1) // 2:
        raise ValueError(f"the body names {n} tables in {numbers.size} numbers")
    if n > most:
        raise ValueError(f"the body names {n} tables; expected at most {most}")
    tables, counts, ids = numbers[1 : 1 + 2 * n : 2], numbers[2 : 2 + 2 * n : 2], numbers[1 + 2 * n :]
    if tables.min() < 0 or tables.max() >= most:
        raise ValueError(
            f"the body names tables {tables.tolist()[:8]}; expected numbers from 0 to {most - 1}"
        )
    if counts.min() < 0 or counts.max() > ids.size or int(counts.sum()) != ids.size:
        raise ValueError(f"the body's counts are not those of its {ids.size} ids")
    return TableIds(tables, counts, ids)


def seal(body: Bytes, state: HostsState) -> None:
    """Writes the end of a response whose rows are there."""
    body[-SUM_BYTES:].view("<u8")[0] = _checksum(body, state)


def check_response(body: Bytes, size: int, state: HostsState) -> None:
    """ValueError: it is no response of this size, or of another state."""
    if body.size != size:
        raise ValueError(f"it has {body.size} bytes; expected {size}")
    if _checksum(body, state) != int(body[-SUM_BYTES:].view("<u8")[0]):
        raise ValueError("its checksum is wrong, or it is of another state")


def _checksum(body: Bytes, state: HostsState) -> int:
    return xxhash.xxh3_64_intdigest(body[:-SUM_BYTES].data, seed=state.seed)


class DescribedTable(NamedTuple):
    """A table of an owner. ids: first to end of its dense ids, or of its buckets; own: ids with a row;
    missing: their policy; buckets, bucket_ids: as in RemoteTable. strings: 1: its ids are strings."""

    name: str
    key: str
    row_format: str
    dim: int
    row_bytes: int
    first: int
    end: int
    own: int
    missing: str
    buckets: int
    bucket_ids: int
    strings: int = 0


class Described(NamedTuple):
    """An owner's live version. changes: sequence of the last change in its rows when it was cut; 0: it has
    those of its checkpoint. content: as of `HostsState`. sample: digest of the checkpoint
    (loader.checkpoint.rows.sample)."""

    model: str
    version: int
    changes: int
    content: int
    number: int
    owners: int
    sample: str
    tables: tuple[DescribedTable, ...]

    def to_json(self) -> dict[str, Any]:
        tables = [table._asdict() for table in self.tables]
        for table in tables:
            if not table["strings"]:
                del table["strings"]  # what an earlier release reads
        return {**self._asdict(), "content": f"{self.content:016x}", "tables": tables}

    @classmethod
    def from_json(cls, raw: Any) -> "Described":
        """ValueError: it describes no version."""
        try:
            tables = tuple(DescribedTable(**table) for table in raw["tables"])
            found = cls(**{**raw, "content": int(raw["content"], 16), "tables": tables})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        numbers = [found.version, found.changes, found.content, found.number, found.owners]
        numbers += [n for t in tables for n in t[3:8] + t[9:]]
        texts = [found.model, found.sample, *(text for t in tables for text in (*t[:3], t.missing))]
        are_typed = all(type(n) is int and 0 <= n < 1 << 64 for n in numbers)
        if not are_typed or not all(isinstance(text, str) for text in texts) or not found.sample:
            raise ValueError("a number or a text of it is impossible")
        return found
