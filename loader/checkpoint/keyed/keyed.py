"""Tables of raw ids: rows of an id and a vector, read in pieces. Each format is a `KeyedRows`.

A table is read at most twice: ids alone (`ids`), then ids and vectors (`blocks`), a block in memory at a
time. Empty rows (of a hash table) are skipped, so fewer rows than `rows` may come. Repeated ids come
repeatedly.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant import Source
from tableside.quant.contract import Ids

PIECE_BYTES = 64 << 20  # of vectors, about, where a format can be cut anywhere
BLOCK_BYTES = 2 << 20  # of vectors, at most, but one row
ID_BLOCK_ROWS = 1 << 17


class IdBlock(NamedTuple):
    """Ids of some rows. rows: which, counted over the whole table, ascending, int64 [n]; ids: int64 [n]."""

    rows: Ids
    ids: Ids


class Block(NamedTuple):
    """Ids and vectors of some rows. rows, ids: as IdBlock; values: [n, dim] as they lie, bf16 as uint16."""

    rows: Ids
    ids: Ids
    values: NDArray[Any]


class KeyedRows(ABC):
    """One table. rows: at most; pieces: readable by any thread, in row order; paths: files; buffer_bytes:
    memory per piece, about. strings: they are ids of strings; has_ages: the checkpoint has their ages. `ids`
    and `blocks` give a piece's rows in the same order, in different blocks. A block's arrays may be
    overwritten by the next."""

    key: str
    rows: int
    dim: int
    source: Source
    pieces: int
    buffer_bytes: int
    paths: tuple[Path, ...]
    strings = has_ages = False

    @abstractmethod
    def ids(self, piece: int) -> Iterator[IdBlock]:
        """Returns the ids of a piece. CheckpointError: they cannot be read."""

    @abstractmethod
    def blocks(self, piece: int) -> Iterator[Block]:
        """Returns the ids and vectors of a piece, once. CheckpointError: they cannot be read."""

    @abstractmethod
    def where(self, row: int) -> str:
        """Returns the place of a row, for people: its file, and its number there, from 0."""

    def rehashed(self) -> "KeyedRows":
        """Returns the same rows, where strings have other ids."""
        raise NotImplementedError

    def text(self, row: int) -> str:
        """Returns the string that is the id of a row. CheckpointError: it cannot be read."""
        raise NotImplementedError

    def ages_s(self, rows: Ids) -> NDArray[np.int64]:
        """Returns how many seconds ago rows [n] of a block were used last, where the checkpoint has ages.
        CheckpointError: they cannot be read."""
        raise NotImplementedError

    @property
    @abstractmethod
    def verification(self) -> Mapping[str, str]:
        """Returns what `finish` compares: {"by": checksum}, or {"not": why}."""

    @abstractmethod
    def finish(self) -> None:
        """Call after every `blocks` was read to its end, once. CheckpointError: bytes changed since they
        were written."""


class KeyedTables(ABC):
    """The tables of raw ids of a checkpoint. names: key -> the ids' key, or None where the format says it.
    strings: keys of tables whose ids are strings."""

    names: Mapping[str, str | None]
    strings: Collection[str] = ()

    @abstractmethod
    def open(self, key: str, id_key: str | None) -> KeyedRows:
        """Returns a table, its files open. CheckpointError: there is none, or it is not as it should be."""
