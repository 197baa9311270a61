"""The deltas of a state, where a worker's GPU reads them: in HBM, or, where the budget does not hold their rows, with these in
memory of the host."""

import logging
from collections.abc import Mapping

from tableside.loader.segment import Segment
from tableside.quant.errors import QuantError
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.tables import DeviceTable
from tableside.serving.errors import NoRoomYet, ServingError

logger = logging.getLogger("tableside")


def with_deltas(gpu: GpuBackend, segment: Segment, tables: Mapping[str, DeviceTable], left_bytes: int) -> dict[str, DeviceTable]:
    """The tables of a version, as they were placed without deltas, in the state `segment`.

    left_bytes: of HBM that new deltas may take. ServingError: it does not hold what finds their rows, or there is no room.
    """
    changed = {name for delta in segment.deltas for name in delta.tables}
    in_host = _leaves_rows_in_host(gpu, segment, {name: tables[name] for name in changed}, left_bytes)
    found = dict(tables)
    try:
        for name in changed:
            found[name] = gpu.overlay(tables[name], segment.tables[name], rows_in_host=in_host)
    except QuantError as error:
        raise ServingError(f"{error} (--hbm-budget and --placement say what lies in the GPU's memory)") from error
    return found


def _leaves_rows_in_host(gpu: GpuBackend, segment: Segment, tables: Mapping[str, DeviceTable], left_bytes: int) -> bool:
    """Whether the rows of new deltas do not fit. NoRoomYet: what finds them does not."""
    whole, least = (
        sum(gpu.overlay_bytes(table, segment.tables[name], rows_in_host=in_host) for name, table in tables.items())
        for in_host in (False, True)
    )
    path = segment.deltas[0].path
    if least > left_bytes:
        raise NoRoomYet(
            f"{path} needs {least:,} bytes of HBM beside the version; the budget of this worker leaves {left_bytes:,}; "
            "raise --hbm-budget, or publish the changes as a version"
        )
    if whole > left_bytes:
        logger.warning(
            "rows of %s are read in host memory: they take %d bytes of HBM, and the budget leaves %d (--hbm-budget)",
            path,
            whole - least,
            left_bytes,
        )
    return whole > left_bytes
