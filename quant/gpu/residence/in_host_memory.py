"""Tables with rows in host memory that the device reads there: the base of several kinds."""

from typing import Any, Self

import torch

from tableside.quant.contract import Table
from tableside.quant.errors import QuantError
from tableside.quant.gpu.residence.memory import array_bytes
from tableside.quant.gpu.residence.residence import Home, Residence
from tableside.quant.row_format import GPU_ALIGNMENT


class InHostMemory(Residence):
    """Rows in host memory that the device reads there."""

    reads_host = True
    host_alignment = GPU_ALIGNMENT

    def __init__(self, home: Home, table: Table, rows: torch.Tensor | None) -> None:
        """rows: as `of`. QuantError: the device does not read that memory, or rows of that size there."""
        if rows is None and not home.device.reads_all_memory:
            raise QuantError(
                "a GPU reads registered memory alone; pass the view that a registration of the memory gives"
            )
        if table.row_bytes % self.host_alignment:
            raise QuantError(
                f"a GPU does not read rows of {table.row_bytes} bytes in host memory; expected a multiple of "
                f"{self.host_alignment}: load the table with row_alignment = {GPU_ALIGNMENT}, or copy it to "
                "HBM"
            )
        self._table = table  # keeps the memory of `host_rows` alive
        self.host_rows = array_bytes(table.packed) if rows is None else rows
        self.address = self.host_rows.data_ptr()

    @classmethod
    def of(cls, home: Home, table: Table, rows: torch.Tensor | None, **how: Any) -> Self:
        """how: as the kind's constructor."""
        return cls(home, table, rows, **how)
