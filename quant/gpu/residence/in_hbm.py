"""Tables that were copied to HBM."""

from collections.abc import Sequence
from typing import Any

import torch

from tableside.quant.contract import Table
from tableside.quant.device.memory import GRANULARITY
from tableside.quant.gpu.residence.memory import allocate, array_bytes, copy_rows, device_bytes
from tableside.quant.gpu.residence.residence import Home, Planned, Residence, Room, TableSize
from tableside.quant.gpu.residence.stashable import StashableRows


class InHbm(Residence):
    """All rows were copied to HBM: uint8 [bytes] in `memory`. rows: what gives that memory back; None: it
    stays."""

    is_whole = True

    def __init__(self, memory: torch.Tensor, rows: StashableRows | None = None) -> None:
        self._memory, self._rows = memory, rows
        self.address = self.hbm_address = memory.data_ptr()

    @classmethod
    def needs(cls, tables: Sequence[TableSize]) -> int:
        return sum(t.whole_bytes for t in tables)

    @classmethod
    def registers(cls, is_stashable: bool) -> bool:
        """Rows that are copied once are read in the segment."""
        return is_stashable

    @classmethod
    def plan(cls, tables: Sequence[TableSize], room: Room) -> Planned:
        """A table that is in HBM already, out of the very file, is shared."""
        stashable = room.is_stashable

        def make(name: str, table: Table, rows: torch.Tensor | None) -> Residence:
            same = room.same.get(name)
            if isinstance(same, InHbm) and not stashable:
                return same
            return cls.of(room.home, table, rows, stashable=stashable)

        lost = sum(-t.hbm_bytes % GRANULARITY for t in tables) if stashable else 0
        return Planned(sum(t.hbm_bytes for t in tables) + lost, make)

    @classmethod
    def of(cls, home: Home, table: Table, rows: torch.Tensor | None, **how: Any) -> "InHbm":
        """Copies a table and waits; faster with `rows`. stashable: `GpuBackend.stash` gives its memory back.
        QuantError: it does not fit."""
        if how.get("stashable"):
            held = StashableRows(table, home.device, rows)
            home.stashable.all.add(held)
            return cls(held.tensor, held)
        memory = allocate(device_bytes(table), home.device, "a table")
        source = array_bytes(table.packed) if rows is None else rows
        copy_rows(memory, source, table.row_bytes, is_pinned=rows is not None)
        return cls(memory)
