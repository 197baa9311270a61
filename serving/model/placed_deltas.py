"""A state's deltas in HBM, or in host memory if the budget does not hold them."""

import logging
from collections.abc import Mapping

from tableside.loader.segment.segment import Segment
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.residence.memory import InHost
from tableside.quant.gpu.residence.tables import DeviceTable

logger = logging.getLogger("tableside")

_WHAT = {InHost.SOME: "rows of", InHost.ALL: "rows and indexes of"}


def going_bytes(replaced: Mapping[str, DeviceTable], segment: Segment) -> int:
    """Returns the HBM of replaced tables' deltas that `segment` does not share."""
    kept = {
        id(v.index)
        for t in segment.tables.values()
        if t.row_map and t.row_map.overlay
        for v in t.row_map.overlay.layers
    }
    layers = {layer for table in replaced.values() for layer in table.layers}
    return sum(layer.bytes for layer in layers if id(layer.index) not in kept)


def with_deltas(
    gpu: GpuBackend, segment: Segment, tables: Mapping[str, DeviceTable], left_bytes: int
) -> dict[str, DeviceTable]:
    """Returns a version's tables in the state `segment`. left_bytes: HBM for new deltas. QuantError: neither
    the GPU nor the host has room."""
    changed = {name: tables[name] for delta in segment.deltas for name in delta.tables}
    sizes = {
        grade: sum(
            gpu.overlay_bytes(table, segment.tables[name], in_host=grade) for name, table in changed.items()
        )
        for grade in InHost
    }
    in_host = next(grade for grade in InHost if sizes[grade] <= left_bytes or grade is InHost.ALL)
    if in_host:
        logger.warning(
            "%s %s are read in host memory: in HBM they take %d bytes, and the budget leaves %d "
            "(--hbm-budget)",
            _WHAT[in_host],
            segment.deltas[0].path,
            sizes[InHost.NOTHING] - sizes[in_host],
            left_bytes,
        )
    overlays = {n: gpu.overlay(table, segment.tables[n], in_host=in_host) for n, table in changed.items()}
    return {**tables, **overlays}
