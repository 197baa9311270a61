"""The default row, last in a table, read for missing ids: zeros, the rows' mean, a vector, or an older
version's.

The mean is that of the checkpoint's values before quantization, in fp64, without backfilled rows.
"""

from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import ModelError
from tableside.loader.load.backfill import Backfill
from tableside.loader.model.specs import TableSpec
from tableside.loader.segment.stored import StoredTable
from tableside.loader.segment.writer import SegmentWriter
from tableside.quant import CpuBackend, RowFormat, Source
from tableside.quant.contract import Bytes
from tableside.quant.errors import NotRepresentable


class DefaultRow:
    """The default row of a table. Any thread may call `add`. is_used: missing ids read it; else they are
    refused. ModelError: the policy's vector has another dim."""

    def __init__(self, spec: TableSpec, dim: int, backfill: Backfill | None) -> None:
        self._spec, self._dim, self._older = spec, dim, None if backfill is None else backfill.default_row
        policy = spec.missing.policy
        self.is_used = self._older is not None if policy == "backfill" else policy != "error"
        if policy == "constant" and len(spec.missing.vector) != dim:
            raise ModelError(
                f"[tables.{spec.name}]: missing has {len(spec.missing.vector)} numbers; the table's dim is "
                f"{dim}"
            )
        self._sum, self._rows, self._lock = np.zeros(dim, np.float64), 0, Lock()

    def add(self, values: NDArray[Any], source: Source, backend: CpuBackend) -> None:
        """Takes rows of the table into the mean, where that is the policy: as for `CpuBackend.quantize`."""
        if self._spec.missing.policy != "mean":
            return
        if source is Source.BF16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        elif source.packed is not None:
            packed, values = values, np.empty((len(values), self._dim), np.float32)
            backend.quantize(packed, source, RowFormat.FP32, values.view(np.uint8))
        total = values.sum(0, dtype=np.float64)
        with self._lock:
            self._sum += total
            self._rows += len(values)

    def write(self, writer: SegmentWriter, table: StoredTable, backend: CpuBackend) -> None:
        """Writes the row, if used, as the last one of a zeroed table. ModelError: see `pack`."""
        if self.is_used:
            self.pack(writer.rows(table, table.rows - 1, table.rows)[0], backend)

    def pack(self, to: Bytes, backend: CpuBackend) -> None:
        """Packs the row into zeros, uint8 [row_bytes]. ModelError: the format cannot represent the vector."""
        policy, vector = self._spec.missing.policy, np.zeros(self._dim, np.float32)
        if self._older is not None:
            to[: self._older.size] = self._older
            return
        if policy == "mean" and self._rows:
            vector = (self._sum / self._rows).astype(np.float32)
        elif policy == "constant":
            vector = np.array(self._spec.missing.vector, np.float32)
        if not vector.any():
            return  # zeros in every row format
        try:
            backend.quantize(vector.reshape(1, -1), Source.FP32, self._spec.row_format, to.reshape(1, -1))
        except NotRepresentable as error:
            raise ModelError(f"[tables.{self._spec.name}]: missing: {error}") from error
