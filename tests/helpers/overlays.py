"""Tables with overlays in memory, and what a dictionary says of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tables
from indexed_tables import built, kinds_of_ids, raw_table, rows_in

from tableside.quant import RowFormat, Table
from tableside.quant.row_format import GPU_ALIGNMENT
from tableside.quant.rows.ids import RowMap, id_at, set_bits
from tableside.quant.rows.overlay import (
    Marks,
    Overlay,
    OverlayLayer,
    filter_bits,
    filter_words,
    mark_words,
)


@dataclass(frozen=True, eq=False)
class Overlaid:
    """A table with an overlay. plain: all rows that were ever given, where an id is a row number. numbers:
    id -> its row of `plain`; default: that of every other id, or None: they are refused."""

    table: Table
    plain: Table
    numbers: dict[int, int]
    default: int | None

    def expected_rows(self, ids: np.ndarray) -> np.ndarray:
        return np.array([self.numbers.get(i, self.default) for i in ids.tolist()], np.int64)

    def expected_found(self, ids: np.ndarray) -> np.ndarray:
        return np.array([i in self.numbers for i in ids.tolist()], np.bool_)


KINDS = kinds_of_ids(300)
Changed = tuple[np.ndarray, np.ndarray]
"""Ids of a layer, int64 [n], all different, and which of them are deleted, bool [n]."""


def fill_filter(ids: np.ndarray, words: np.ndarray) -> None:
    """Sets the bits of ids [n] in a filter: the specification of `index_builder.fill_filter`."""
    at, bits = filter_bits(np.ascontiguousarray(ids), words.size)
    np.bitwise_or.at(words, at, bits)


def fill_marks(ids: np.ndarray, slots: np.ndarray, marks: Marks) -> None:
    """Writes marks, which are zeros, of ids [n], all different, that have these slots [n]: as
    `index_builder.fill_marks`."""
    numbers = ids - np.int64(marks.first)
    order = np.argsort(numbers)
    marks.slots[: ids.size] = slots[order]
    numbers = numbers[order]
    words, starts = np.unique(numbers >> 6, return_index=True)
    each = np.uint64(1) << (numbers & 63).astype(np.uint64)
    marks.bits[words] = np.bitwise_or.reduceat(each, starts) if ids.size else each
    counts = np.zeros(marks.before.size, np.uint32)
    counts[words] = np.diff(starts, append=ids.size)
    np.cumsum(counts[:-1], out=marks.before[1:])


def layer_of(
    base: Table,
    ids: np.ndarray,
    deleted: np.ndarray,
    rows: np.ndarray,
    memory: np.ndarray,
    numbers: tuple[int, int],
) -> OverlayLayer:
    """A layer of these ids. rows: uint8 [n, row_bytes], of each; memory: where they are put, some whole
    rows away from those of `base`, uint8 [slots or more, row_bytes]; numbers: as `Table.row_numbers`, for
    marks, of which (0, 0) has none."""
    index = built(ids, 4)
    slots = rows_in(index, ids)
    memory[slots] = rows
    kept = np.zeros(index.slots, np.int64)
    kept[:] = ids[0] if ids.size else 0
    kept[slots] = ids
    bits = np.zeros((index.slots + 7) // 8, np.uint8)
    set_bits(bits, slots[deleted])
    words = np.zeros(filter_words(ids.size), np.uint64)
    fill_filter(ids, words)
    distance = memory.ctypes.data - base.address
    assert distance % base.row_bytes == 0
    marks = marks_of(*numbers, ids, slots, index.slots) if numbers[1] and ids.size else None
    return OverlayLayer(
        replace(index, ids=kept),
        memory,
        words,
        bits if deleted.any() else None,
        distance // base.row_bytes,
        marks,
    )


def marks_of(
    first: int,
    count: int,
    ids: np.ndarray,
    slots: np.ndarray,
    most: int,
    fill: Callable[..., None] = fill_marks,
) -> Marks:
    """Marks of ids that have these slots, of `most`, over row numbers of [0, count). first: the id of row
    0."""
    words = mark_words(count)
    marks = Marks(
        first, count, np.zeros(words, np.uint64), np.zeros(words, np.uint32), np.zeros(most, np.uint32)
    )
    fill(ids, slots, marks)
    return marks


def overlaid(
    base: Table,
    plain: Table,
    numbers: dict[int, int],
    changes: Sequence[Changed],
    is_above: bool = True,
    is_marked: bool = False,
) -> Overlaid:
    """`base` with a layer for each of `changes`, the newest last. plain, numbers: the oracle of `base`.
    is_above: the layers' rows lie at higher addresses than the table's. is_marked: layers of row numbers
    have marks."""
    default = None if base.row_map is None or base.row_map.default_row is None else len(plain.packed) - 1
    numbers, alignment = dict(numbers), max(base.row_format.alignments(base.dim, base.row_bytes))
    most = sum(ids.size + ids.size // 16 + 8 for ids, _ in changes)
    whole = np.zeros((base.rows + most + 1, base.row_bytes), np.uint8)
    first = 0 if is_above else most + 1
    own = whole[first : first + base.rows]
    own[:] = base.packed
    row_map = base.row_map or RowMap(base.rows)
    if row_map.index is not None and id_at(base.row_format, base.dim) >= 0:
        at, count = id_at(base.row_format, base.dim), row_map.index.slots
        row_map = replace(
            row_map, index=replace(row_map.index, ids=np.ndarray((count,), "<i8", own, at, (own.shape[1],)))
        )
    moved = replace(base, packed=own, row_map=None)
    layers, packed, free = (
        [],
        [plain.packed],
        base.rows + 1 if is_above else 0,
    )  # a row between them is never an id's
    for n, (ids, deleted) in enumerate(changes):
        made = tables.table_of(base.row_format, base.dim, max(2, ids.size), 100 + n, alignment)
        rows = made.packed[: ids.size]
        memory = whole[free : free + ids.size + ids.size // 16 + 8]
        free += len(memory)
        layers.append(layer_of(moved, ids, deleted, rows, memory, base.row_numbers if is_marked else (0, 0)))
        start = sum(map(len, packed))
        packed.append(rows)
        for k, (i, gone) in enumerate(zip(ids.tolist(), deleted.tolist(), strict=True)):
            if gone:
                numbers.pop(i, None)
            else:
                numbers[i] = start + k
    table = replace(moved, row_map=replace(row_map, overlay=Overlay(layers[::-1])))
    return Overlaid(table, replace(plain, packed=np.concatenate(packed)), numbers, default)


def changed(ids: np.ndarray, seed: int, part: int = 3, deleted: bool = True) -> Changed:
    """Some of these ids are overwritten, some deleted, and ids beside them inserted."""
    rng = np.random.default_rng(seed)
    some = rng.permutation(ids)[: ids.size // part]
    some = np.unique(np.concatenate([some, rng.permutation(ids ^ 1)[: ids.size // part]]))
    return some, (rng.random(some.size) < 0.3) & deleted


def raw(
    row_format: RowFormat = RowFormat.INT8, dim: int = 64, ids: np.ndarray = KINDS["random"], **how: Any
) -> Overlaid:
    base = raw_table(ids, row_format, dim)
    return overlaid(base.table, base.plain, base.numbers, [changed(ids, 1), changed(ids, 2, 5)], **how)


def dense(
    row_format: RowFormat = RowFormat.INT8,
    dim: int = 64,
    default: bool = True,
    first: int = 0,
    alignment: int = GPU_ALIGNMENT,
    **how: Any,
) -> Overlaid:
    """Rows [0, 300) of ids from `first` on, and, where `default`, a default row behind them."""
    plain = tables.table_of(row_format, dim, 301 if default else 300, alignment=alignment)
    base = replace(plain, row_map=RowMap(300, 300 if default else None, first=first))
    older, newer = (changed(np.arange(300), n, deleted=default) for n in (1, 2))
    older, newer = ((ids[ids < 300] + first, gone[ids < 300]) for ids, gone in (older, newer))
    if not default:
        base = replace(base, row_map=None)
    return overlaid(base, plain, {first + i: i for i in range(300)}, [older, newer], **how)


def asked_of(made: Overlaid, ids: np.ndarray, count: int = 400) -> np.ndarray:
    pool = np.concatenate([ids, ids ^ 1, KINDS["extremes"], np.arange(-2, 3)])
    if made.default is None:
        pool = np.array(sorted(made.numbers))
    return np.random.default_rng(count).choice(pool, count)
