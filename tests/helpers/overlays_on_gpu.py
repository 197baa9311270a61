"""Tables with overlays on the GPU backend, wherever their own rows live."""

from dataclasses import replace

import numpy as np
import tables
import torch
from overlays import Overlaid
from reference import REFERENCE
from tables import expected_of

from tableside.quant import Pooling, RowSource, Table
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.residence.tables import DeviceTable
from tableside.quant.rows.overlay import Overlay


def new_backend() -> GpuBackend:
    backend = GpuBackend(tables.DEVICE, REFERENCE)
    backend.open_cache(60_000, 16, CacheSettings(page_bytes=1024))
    return backend


def placed(backend: GpuBackend, table: Table, where: str) -> DeviceTable:
    rows = None
    if not backend.device.reads_all_memory:
        rows = torch.empty(table.packed.size, dtype=torch.uint8, pin_memory=True)
        rows.numpy()[:] = table.packed.reshape(-1)
    match where:
        case "hbm" | "stashable":
            return backend.place("hbm", table, stashable=where == "stashable")
        case "mapped":
            return backend.place("zero_copy", table, rows)
        case "split":
            return backend.place("hybrid", table, rows, share=200)
        case "host":
            return backend.place("host", table)
    return backend.place("cached", table, rows)


def without_layers(table: Table, newest: int = 0) -> Table:
    """The table with the levels from number `newest` on, or none."""
    assert table.row_map is not None and table.row_map.overlay is not None
    levels = table.row_map.overlay.layers[newest:] if newest else ()
    row_map = replace(table.row_map, overlay=Overlay(levels) if levels else None)
    return replace(table, row_map=None if row_map.is_plain and not levels else row_map)


def vectors_of(backend: GpuBackend, table: RowSource, ids: np.ndarray) -> np.ndarray:
    return backend.lookup(table, ids, pooling=Pooling.NONE)


def check_rows(backend: GpuBackend, held: RowSource, made: Overlaid, asked: np.ndarray) -> None:
    np.testing.assert_array_equal(
        vectors_of(backend, held, asked), expected_of(made.plain, made.expected_rows(asked))
    )
