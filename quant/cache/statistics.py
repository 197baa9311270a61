"""What a cache counted, from copies of the numbers that its kernels keep."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tableside.quant.cache.kernels import Counter, State, occupied_at


@dataclass(frozen=True)
class TableStatistics:
    """Of a table since it was registered. fetched: rows that came over the bus, each once a batch; in_place: ids read over it."""

    name: str
    ids: int
    hits: int
    fetched: int
    in_place: int
    row_bytes: int

    @property
    def bus_bytes(self) -> int:
        return (self.fetched + self.in_place) * self.row_bytes


@dataclass(frozen=True)
class Statistics:
    """Of a cache. locked_out: rows that found every slot in use. tables: by their numbers."""

    tickets: int
    slots: int
    occupied: int
    inserted: int
    evicted: int
    padded: int
    locked_out: int
    tables: dict[int, TableStatistics]


def statistics_of(
    state: torch.Tensor, counters: torch.Tensor, names: Mapping[int, tuple[str, int]], classes: int, slots: int
) -> Statistics:
    """state, counters: on the host, int64. names: number of each table -> its name, and bytes of its rows."""
    s, c = state.tolist(), counters.view(-1, len(Counter)).tolist()
    occupied = sum(s[occupied_at(n)] for n in range(classes))
    return Statistics(
        tickets=s[State.NOW],
        slots=slots,
        occupied=occupied,
        inserted=s[State.INSERTED],
        evicted=s[State.INSERTED] - occupied - s[State.FREED],
        padded=s[State.PADDED],
        locked_out=s[State.LOCKED_OUT],
        tables={
            number: TableStatistics(name, *c[number], row_bytes)  # type: ignore[call-arg]
            for number, (name, row_bytes) in names.items()
            if number < len(c)
        },
    )
