"""How a cache decides: policies, sizes, who fetches."""

from dataclasses import dataclass
from enum import Enum

from tableside.quant.cache.kernels import SCORE_UNIT
from tableside.quant.errors import QuantError


class Policy(Enum):
    """Which rows go first."""

    LRU = "lru"
    LFU = "lfu"

    @property
    def is_lfu(self) -> bool:
        return self is Policy.LFU


@dataclass(frozen=True)
class CacheSettings:
    """How a cache decides.

    half_life: tickets after which a use counts half (LFU). page_bytes: None: by the budget. pads: where missing rows arrive, for
    so many tickets at once: `pad_fraction` of the budget in all, at most `pad_bytes` each. row_programs: that fetch rows, enough
    to keep the bus busy, but few, for others run beside them. programs: of the other kernels; few leave more of the GPU to other
    work. gather_threads: of the CPU, which gathers missing rows, from `gather_from` a batch on, where tables span so much that
    the GPU's own reads are slow; 0: the GPU reads them all.
    """

    policy: Policy = Policy.LFU
    half_life: int = 1000
    page_bytes: int | None = None
    pad_fraction: float = 0.2
    pad_bytes: int = 256 << 20
    pads: int = 1
    row_programs: int = 66
    programs: int = 8192
    gather_threads: int = 0
    gather_from: int = 4096

    def __post_init__(self) -> None:
        for name, is_right, expected in (
            ("half_life", 1 <= self.half_life <= SCORE_UNIT, f"1 to {SCORE_UNIT}"),
            (
                "page_bytes",
                self.page_bytes is None or (self.page_bytes >= 64 and self.page_bytes % 16 == 0),
                "a multiple of 16, 64 or more",
            ),
            ("pad_fraction", 0 <= self.pad_fraction < 1, "from 0 to below 1"),
            ("pads", self.pads >= 1, "1 or more"),
            ("pad_bytes", self.pad_bytes >= 0, "0 or more"),
            ("row_programs", self.row_programs >= 1, "1 or more"),
            ("programs", self.programs >= 1, "1 or more"),
            ("gather_threads", 0 <= self.gather_threads <= 64, "0 to 64"),
            ("gather_from", self.gather_from >= 1, "1 or more"),
        ):
            if not is_right:
                raise QuantError(f"{name} of a cache is {getattr(self, name)}; expected {expected}")
