"""The slots of a cache, in pages of device memory. A page belongs to a class, the rows of one size, and may
change class. `quant.cache.kernels.state` describes its layout."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import CLASSES, NODE_BYTES, NODE_USE, PRIORITY_LIMIT
from tableside.quant.errors import QuantError

_PAGES_AT_ONCE = 256
_SMALLEST, _LARGEST = 8 << 10, 256 << 10


@dataclass
class RowClass:
    """Rows of one size: slots of a page, and the pages that are theirs."""

    row_bytes: int
    slots: int
    pages: list[int]


@dataclass(frozen=True)
class Nodes:
    """Contents of some pages: keys int64, uses int32, each [pages, slots]."""

    keys: torch.Tensor
    uses: torch.Tensor


class Pages:
    """Divides `memory`, uint8 [pages, page_bytes] on a device, into slots for rows of `smallest_row_bytes` or
    more. dropped: called with a class and its number of rows, int64 [] on the device, when rows go with their
    page. of_page: int32 [pages, 2], class (-1: none) and first row; moving: pages on their way to a class.
    QuantError: more slots than int32 counts."""

    def __init__(
        self, memory: torch.Tensor, smallest_row_bytes: int, dropped: Callable[[int, torch.Tensor], None]
    ) -> None:
        self._memory, self._dropped = memory, dropped
        self.count, self.page_bytes = memory.shape
        self.node_bits = max(1, slots_of_page(self.page_bytes, smallest_row_bytes).bit_length())
        if (self.count << self.node_bits) >= 2**31:
            raise QuantError(
                f"a cache of {self.count * self.page_bytes:,} bytes has more slots than int32 counts; lower "
                "budget_bytes"
            )
        self.classes: list[RowClass] = []
        self.of_page = np.full((self.count, 2), -1, np.int32)  # class (-1: none), first row
        self.moving: list[tuple[int, int]] = []  # (page, the class to come)
        self._unassigned = list(range(self.count))

    @property
    def slots(self) -> int:
        """Slots of all pages, as now divided."""
        return sum(c.slots * len(c.pages) for c in self.classes)

    @property
    def widest(self) -> int:
        """Bytes of the widest rows; 0: there are none."""
        return max((c.row_bytes for c in self.classes), default=0)

    @property
    def most_slots(self) -> int:
        """Most slots of a page, of any class."""
        return max((c.slots for c in self.classes), default=0)

    def class_of(self, row_bytes: int) -> int:
        """Returns the number of a row size's class, which it may make. QuantError: the rows do not fit."""
        for n, c in enumerate(self.classes):
            if c.row_bytes == row_bytes:
                return n
        slots = slots_of_page(self.page_bytes, row_bytes)
        if self.count * self.page_bytes // row_bytes >= 2**31:
            raise QuantError(
                f"a cache of {self.count * self.page_bytes:,} bytes holds more rows of {row_bytes} bytes "
                "than int32 counts; "
                "lower budget_bytes"
            )
        if not 0 < slots < 1 << self.node_bits or len(self.classes) == CLASSES:
            raise QuantError(
                f"rows of {row_bytes} bytes do not fit this cache: {slots} to a page of {self.page_bytes:,} "
                "bytes, "
                f"expected 1 to {(1 << self.node_bits) - 1}, and at most {CLASSES} sizes of rows"
            )
        self.classes.append(RowClass(row_bytes, slots, []))
        return len(self.classes) - 1

    def assign(self, rows: Sequence[int]) -> bool:
        """Divides pages by the row counts of each class's tables, taking from other classes if it must.
        Returns whether any moved. QuantError: a class with tables gets none."""
        wanted = self._wanted(rows)
        if min((w for w, n in zip(wanted, rows, strict=True) if n), default=1) < 1:
            raise QuantError(
                f"a cache of {self.count} pages of {self.page_bytes:,} bytes cannot hold {len(self.classes)} "
                "sizes of "
                "rows; raise budget_bytes"
            )
        coming = [sum(1 for _, c in self.moving if c == n) for n in range(len(self.classes))]
        have = [len(c.pages) + coming[n] for n, c in enumerate(self.classes)]
        takers = [n for n in range(len(wanted)) for _ in range(wanted[n] - have[n])]
        fresh = [self._unassigned.pop() for _ in takers[: len(self._unassigned)]]
        self._give_all(zip(fresh, takers, strict=False))
        for taker in takers[len(fresh) :]:
            donor = max(range(len(wanted)), key=lambda n: len(self.classes[n].pages) - wanted[n])
            if len(self.classes[donor].pages) <= wanted[donor]:
                break  # the rest comes with the pages that are on their way
            self.take(donor, 1, taker)
        return bool(takers)

    def _wanted(self, rows: Sequence[int]) -> list[int]:
        """Pages of each class by the rows of its tables, none more than they fill."""
        full = [-(-n // c.slots) for n, c in zip(rows, self.classes, strict=True)]
        total = sum(full)
        if total == 0:
            return full
        wanted = [min(f, max(1, self.count * f // total)) if f else 0 for f in full]
        while sum(wanted) > self.count:
            wanted[int(np.argmax(wanted))] -= 1
        for n in sorted(range(len(full)), key=lambda n: full[n] - wanted[n], reverse=True):
            wanted[n] += min(full[n] - wanted[n], self.count - sum(wanted))
        return wanted

    def take(self, donor: int, count: int, taker: int) -> None:
        """Empties a class's last pages. `settle` gives them to `taker`, once no batch can read them."""
        c = self.classes[donor]
        pages = c.pages[-count:]
        self._count_dropped(donor, pages)
        self._clear(c, pages)
        del c.pages[-count:]
        self.of_page[pages] = -1
        self.moving += [(p, taker) for p in pages]

    def settle(self) -> None:
        """Gives pages that were taken to their new class."""
        self._give_all(self.moving)
        self.moving.clear()

    def empty(self) -> None:
        """Drops every row. Slots keep their last ticket, for batches in flight may still read them."""
        for n in range(len(self.classes)):
            for pages in self.parts(n):
                self._count_dropped(n, pages)
                self.set_keys(n, pages, -1)

    def _count_dropped(self, number: int, pages: list[int]) -> None:
        self._dropped(number, (self.nodes(number, pages).keys >= 0).sum())

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._memory.device)

    def _clear(self, c: RowClass, pages: list[int]) -> None:
        """Makes nodes that hold no key, and were last used long ago."""
        node = np.zeros((c.slots, 4), np.int32)
        node[:, :3] = -1
        node[:, 3] = -PRIORITY_LIMIT
        empty = torch.from_numpy(node.reshape(-1).view(np.uint8)).to(self._memory.device)
        self._memory[self._index(pages), : NODE_BYTES * c.slots] = empty

    def _give_all(self, moves: Iterable[tuple[int, int]]) -> None:
        to: dict[int, list[int]] = {}
        for page, taker in moves:
            to.setdefault(taker, []).append(page)
        for taker, pages in to.items():
            c = self.classes[taker]
            self._clear(c, pages)
            c.pages += pages
            starts = np.array(pages, np.int64) * self.page_bytes + NODE_BYTES * c.slots
            self.of_page[pages, 0] = taker
            self.of_page[pages, 1] = -(-starts // c.row_bytes)

    def nodes(self, number: int, pages: Sequence[int]) -> Nodes:
        """Contents of a class's pages."""
        c = self.classes[number]
        index = self._index(pages)
        nodes = self._memory[index, : NODE_BYTES * c.slots]
        return Nodes(
            nodes.view(torch.int64)[:, ::2], nodes.view(torch.int32)[:, NODE_USE // 4 :: NODE_BYTES // 4]
        )

    def set_keys(self, number: int, pages: Sequence[int], keys: torch.Tensor | int) -> None:
        """Writes the keys of a class's pages: int64 [pages, slots], or one for all. Leaves chains alone."""
        self._memory.view(torch.int64)[self._index(pages), : 2 * self.classes[number].slots : 2] = keys

    def parts(self, number: int) -> list[list[int]]:
        """A class's pages, as many at once as `nodes` should read."""
        pages = self.classes[number].pages
        return [pages[first : first + _PAGES_AT_ONCE] for first in range(0, len(pages), _PAGES_AT_ONCE)]

    def device_arrays(self) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:
        """Arrays for kernels: class and first row of each page, [2 * pages]; the pages of each class."""
        return self.of_page.reshape(-1), [np.array(c.pages or [0], np.int32) for c in self.classes]


def page_bytes_of(budget_bytes: int) -> int:
    """Returns the largest power of 2 up to 1/64 of the budget, clamped to 8 KiB … 256 KiB."""
    return max(_SMALLEST, min(_LARGEST, 1 << max(0, (budget_bytes // 64).bit_length() - 1)))


def slots_of_page(page_bytes: int, row_bytes: int) -> int:
    """Rows that a page holds with their nodes, the first at a multiple of its size."""
    return max(0, (page_bytes - row_bytes + 1) // (NODE_BYTES + row_bytes))
