"""Tables that the device reads in host memory."""

from typing import Any

import torch

from tableside.quant.contract import Table
from tableside.quant.gpu.residence.in_host_memory import InHostMemory
from tableside.quant.gpu.residence.residence import Home


class Mapped(InHostMemory):
    """Rows are read in host memory, or gathered there by the CPU."""

    is_gathered = True

    @classmethod
    def of(cls, home: Home, table: Table, rows: torch.Tensor | None, **how: Any) -> "Mapped":
        return cls(home, table, rows)
