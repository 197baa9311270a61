"""Tables with some rows in HBM and the others in host memory."""

import bisect
from collections.abc import Iterable, Sequence

import torch

from tableside.quant.contract import Table
from tableside.quant.errors import QuantError
from tableside.quant.gpu.kernels.job import SPLIT_BLOCK, split_rows
from tableside.quant.gpu.residence.in_host_memory import InHostMemory
from tableside.quant.gpu.residence.memory import allocate
from tableside.quant.gpu.residence.plan import without_deltas
from tableside.quant.gpu.residence.residence import Home, Planned, Room, TableSize


class Split(InHostMemory):
    """The first `share` rows of each SPLIT_BLOCK, dense in HBM; the others in host memory."""

    def __init__(self, home: Home, table: Table, rows: torch.Tensor | None, share: int) -> None:
        """Copies the HBM rows, and waits for it. share: rows of each SPLIT_BLOCK in HBM. QuantError: it
        splits nothing, or there is no room."""
        if not 0 < share < SPLIT_BLOCK:
            raise QuantError(
                f"a share of {share} of {SPLIT_BLOCK} rows; expected 1 to {SPLIT_BLOCK - 1}; "
                "copy the whole table (hbm), or read it in place (zero_copy)"
            )
        super().__init__(home, table, rows)
        assert self.host_rows is not None, "they are in host memory"
        self._memory = allocate(
            split_rows(table.rows, share) * table.row_bytes, home.device, f"{share} of {SPLIT_BLOCK} rows"
        )
        self.hbm_rows, self.hbm_share = self._memory.data_ptr(), share
        self._fill(table, self.host_rows)
        home.device.current_stream().synchronize()

    @classmethod
    def fits(cls, tables: Sequence[TableSize], budget: int, home: Home) -> bool:
        indexes = sum(t.index_bytes + t.id_bytes for t in tables)
        return _largest_share(tables, without_deltas(budget) - indexes) > 0

    @classmethod
    def takes_rest(cls, home: Home) -> bool:
        return True

    @classmethod
    def plan(cls, tables: Sequence[TableSize], room: Room) -> Planned:
        share = _largest_share(tables, room.budget)
        return Planned(
            _bytes(tables, share), lambda name, table, rows: cls.of(room.home, table, rows, share=share)
        )

    def _fill(self, table: Table, source: torch.Tensor) -> None:
        blocks, size = table.rows // SPLIT_BLOCK, table.row_bytes
        whole = blocks * SPLIT_BLOCK * size
        of_blocks, rest = (
            self._memory[: blocks * self.hbm_share * size],
            self._memory[blocks * self.hbm_share * size :],
        )
        every_block = source[:whole].view(blocks, SPLIT_BLOCK * size)
        of_blocks.view(blocks, self.hbm_share * size).copy_(every_block[:, : self.hbm_share * size])
        rest.copy_(source[whole : whole + rest.numel()])


def _largest_share(tables: Sequence[TableSize], budget: int) -> int:
    """Returns the largest share, below SPLIT_BLOCK, with which the tables' HBM rows fit."""
    shares = range(SPLIT_BLOCK)
    return max(0, bisect.bisect_right(shares, budget, key=lambda share: _bytes(tables, share)) - 1)


def _bytes(tables: Iterable[TableSize], share: int) -> int:
    return sum(split_rows(t.rows, share) * t.row_bytes for t in tables)
