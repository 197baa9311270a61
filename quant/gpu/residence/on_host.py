"""Tables that the CPU looks up. Imports no torch: a worker without a GPU has them, too."""

from typing import TYPE_CHECKING, Any

from tableside.quant.contract import Table
from tableside.quant.gpu.residence.residence import Home, Residence

if TYPE_CHECKING:
    import torch


class OnHost(Residence):
    """The CPU looks the rows up."""

    is_on_device = False

    @classmethod
    def of(cls, home: Home, table: Table, rows: "torch.Tensor | None", **how: Any) -> "OnHost":
        return cls()
