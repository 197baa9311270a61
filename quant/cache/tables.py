"""The tables of a cache, and their device memory: maps of a batch's misses, and counters."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import GROUP_WORDS, ID_BITS, ROWS_PER_FLAG, TableCounter, TableField
from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError
from tableside.quant.row_format import ALIGNMENTS, GPU_ALIGNMENT, device_row_bytes
from tableside.quant.rows.fetched import FetchedTable

FLAGS = 1  # dirty flags that one program of `enumerate_misses` takes
_LEAST_COUNTED = 64  # tables that counters have room for
_ROW_BYTES_END = 4 << 16  # `fetch.list_rows` counts a row's words in 16 bits


@dataclass(frozen=True)
class CachedTable:
    """A table, its class, and its maps of misses, as `TableField` says. address: of row 0 for the device; 0:
    the host fetches rows. row_bytes: of one there. misses: int32 [words, 2]; dirty: int32 [flags]."""

    name: str
    address: int
    rows: int
    row_bytes: int
    row_class: int
    misses: torch.Tensor
    dirty: torch.Tensor

    @property
    def map_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.misses, self.dirty))

    def record(self) -> list[int]:
        """int64 [TABLE_SIZE] for the kernels."""
        fields = {
            TableField.ADDRESS: self.address,
            TableField.ROWS: self.rows,
            TableField.ROW_BYTES: self.row_bytes,
            TableField.CLASS: self.row_class,
            TableField.MISSES: self.misses.data_ptr(),
            TableField.DIRTY: self.dirty.data_ptr(),
        }
        return [fields[f] for f in TableField]


class TableHandle:
    """A table's place in a cache, given up with the last reference. number: as lookups name it."""

    def __init__(self, number: int, forgotten: Callable[[int], None]) -> None:
        self.number = number
        weakref.finalize(self, forgotten, number)  # whoever drops it may hold any lock


class Tables:
    """Tables by number, with counters, int64 [tables, COUNTER_SIZE]. fetched: those whose rows the host
    fetches; sources: by table, while whoever registered it keeps them. The caller holds the cache's lock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tables: dict[int, CachedTable] = {}
        self.fetched: set[int] = set()
        self.sources: WeakValueDictionary[int, FetchedTable] = WeakValueDictionary()
        self.counters = torch.zeros(0, dtype=torch.int64, device=device.torch_device)

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, number: int) -> CachedTable:
        return self._tables[number]

    def add(self, name: str, address: int, rows: int, row_bytes: int, row_class: int) -> int:
        """Takes a table under the smallest number that is free, with empty maps and counters."""
        number = next(n for n in range(len(self._tables) + 1) if n not in self._tables)
        flags = flag_count(rows)
        maps = [
            torch.zeros(n, dtype=torch.int32, device=self._device.torch_device)
            for n in ((flags * GROUP_WORDS, 2), (flags,))
        ]
        self._tables[number] = CachedTable(name, address, rows, row_bytes, row_class, *maps)
        if not address:
            self.fetched.add(number)
        first, end = number * len(TableCounter), (number + 1) * len(TableCounter)
        if end > self.counters.numel():
            grown = torch.zeros(
                max(_LEAST_COUNTED, 2 * (number + 1)) * len(TableCounter),
                dtype=torch.int64,
                device=self._device.torch_device,
            )
            grown[: self.counters.numel()] = self.counters
            self.counters = grown
        self.counters[first:end] = 0
        return number

    def remove(self, number: int) -> None:
        del self._tables[number]
        self.fetched.discard(number)
        self.sources.pop(number, None)

    def clear_maps(self) -> None:
        """Empties all maps."""
        for table in self._tables.values():
            table.misses.zero_()
            table.dirty.zero_()

    @property
    def host_bytes(self) -> int:
        """Bytes of the rows of all tables, padded as they are fetched."""
        return sum(t.rows * device_row_bytes(t.row_bytes) for t in self._tables.values())

    @property
    def are_tight(self) -> bool:
        """Whether rows of a table are not padded in host memory."""
        return any(t.row_bytes % GPU_ALIGNMENT for t in self._tables.values())

    @property
    def map_bytes(self) -> int:
        """Device bytes of all maps."""
        return sum(t.map_bytes for t in self._tables.values())

    def rows_of_classes(self, classes: int) -> list[int]:
        """Rows of the tables of each class."""
        rows = [0] * classes
        for table in self._tables.values():
            rows[table.row_class] += table.rows
        return rows

    def names(self) -> dict[int, tuple[str, int]]:
        """Number of each table -> its name, and bytes of its rows."""
        return {number: (t.name, t.row_bytes) for number, t in self._tables.items()}

    def records(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Returns flat records of all tables, and table and first flag of each `enumerate_misses` program."""
        records = np.zeros((max(1, max(self._tables, default=-1) + 1), len(TableField)), np.int64)
        groups = [np.zeros((0, 2), np.int32)]
        for number, table in self._tables.items():
            records[number] = table.record()
            firsts = np.arange(0, table.dirty.numel(), FLAGS, dtype=np.int32)
            groups.append(np.stack([np.full_like(firsts, number), firsts], 1))
        return records.reshape(-1), np.concatenate(groups).reshape(-1)


def check_table(rows: int, row_bytes: int) -> None:
    """QuantError: no cache can take such a table."""
    alignment = min(ALIGNMENTS)
    if not 0 < rows <= 1 << ID_BITS or row_bytes % alignment or not 0 < row_bytes < _ROW_BYTES_END:
        raise QuantError(
            f"a table of {rows:,} rows of {row_bytes} bytes cannot be cached; expected 1 to {1 << ID_BITS:,} "
            f"rows of a multiple of {alignment} bytes below {_ROW_BYTES_END:,}"
        )


def flag_count(rows: int) -> int:
    """Dirty flags of a table."""
    return -(-rows // ROWS_PER_FLAG)


def map_bytes(rows: int) -> int:
    """Device bytes for a table of `rows` rows, beside the cache's budget: a quarter of a byte a row."""
    return flag_count(rows) * 4 * (2 * GROUP_WORDS + 1)
