"""Tables of raw ids: ids and their vectors, one of each a row, read piece by piece. Every format is one more
`KeyedRows`.

A table is read twice at most: its ids alone (`ids`), to know how many there are and which come twice, then
ids and vectors (`blocks`). Neither keeps more than a block in memory, whatever the size of the files. Rows
that hold nothing are left out (empty slots of a hash table), so fewer rows may come than `rows` says. An id
that comes twice comes twice here as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant import Source

PIECE_BYTES = 64 << 20  # of vectors, about, where a format can be cut anywhere
BLOCK_BYTES = 2 << 20  # of vectors, at most, but one row
ID_BLOCK_ROWS = 1 << 17


class IdBlock(NamedTuple):
    """Ids of some rows. rows: which, counted over the whole table, ascending, int64 [n]; ids: int64 [n]."""

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]


class Block(NamedTuple):
    """Ids and vectors of some rows. rows, ids: as IdBlock; values: [n, dim] as they lie, bf16 as uint16."""

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    values: NDArray[Any]


class KeyedRows(ABC):
    """One table. rows: at most; pieces: parts that any thread may read; paths: its files; buffer_bytes:
    private memory that reading a piece takes, about.

    Pieces are in the order of rows. `ids` and `blocks` give the same rows of a piece in the same order, cut
    into other blocks. The next block may overwrite a block's arrays.
    """

    key: str
    rows: int
    dim: int
    source: Source
    pieces: int
    buffer_bytes: int
    paths: tuple[Path, ...]

    @abstractmethod
    def ids(self, piece: int) -> Iterator[IdBlock]:
        """The ids of a piece. CheckpointError: they cannot be read."""

    @abstractmethod
    def blocks(self, piece: int) -> Iterator[Block]:
        """The ids and vectors of a piece. CheckpointError: they cannot be read."""

    @abstractmethod
    def where(self, row: int) -> str:
        """The place of a row, for people: its file, and its number there, from 0."""

    @property
    @abstractmethod
    def verification(self) -> Mapping[str, str]:
        """What `finish` compares: {"by": checksum}, or {"not": why}."""

    @abstractmethod
    def finish(self) -> None:
        """Call it when `blocks` of every piece was read once to its end. CheckpointError: bytes changed since
        they were written."""


class KeyedTables(ABC):
    """The tables of raw ids of a checkpoint. names: key -> the ids' key, or None where the format says it."""

    names: Mapping[str, str | None]

    @abstractmethod
    def open(self, key: str, id_key: str | None) -> KeyedRows:
        """A table, its files open. CheckpointError: there is none, or it is not as it should be."""
