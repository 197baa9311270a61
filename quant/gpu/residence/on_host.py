"""Tables that the CPU looks up."""

from typing import Any

import torch

from tableside.quant.contract import Table
from tableside.quant.gpu.residence.residence import Home, Residence


class OnHost(Residence):
    """The CPU looks the rows up."""

    is_on_device = False

    @classmethod
    def of(cls, home: Home | None, table: Table, rows: torch.Tensor | None, **how: Any) -> "OnHost":
        return cls()
