"""Host tables of random bytes that go through a cache, and checks of what a batch finds there."""

from typing import Any

import numpy as np
import tables
import torch
from cache_check import check

from tableside.quant import choose
from tableside.quant.cache.jobs import PROBE_BLOCK
from tableside.quant.cache.kernels.state import ProbeField
from tableside.quant.cache.settings import CacheSettings, Policy
from tableside.quant.cache.tickets import Ticket
from tableside.quant.device.launch import Jobs
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.row_format import device_row_bytes

SIZES = {"a": (100, 48), "b": (1000, 144), "c": (30, 44)}  # rows, bytes of a row


class CachedTables:
    """Host tables of random bytes, cached.

    `prefetch` begins a batch of ids of some of them, and `check` compares what lies at each id's location
    with the row. Inputs and jobs of all batches are kept: the cache reads them on its own stream, long after
    `prefetch` returned, and memory that was given back could be written by the next batch before that.
    """

    def __init__(
        self, budget: int, settings: CacheSettings, sizes: dict[str, tuple[int, int]] = SIZES
    ) -> None:
        fused = GpuBackend(tables.DEVICE, choose())
        self.cache = fused.open_cache(budget, min(size for _, size in sizes.values()), settings)
        self.rows: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self.numbers = {name: self.add(*size) for name, size in sizes.items()}

    def add(self, rows: int, row_bytes: int) -> int:
        memory = torch.empty((rows, row_bytes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        memory.copy_(
            torch.from_numpy(np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), dtype=np.uint8))
        )
        number = self.cache.register(memory.data_ptr(), rows, row_bytes)
        self.rows[number] = memory
        return number

    def prefetch(
        self, ids: dict[int, np.ndarray], admit_all: bool = False
    ) -> tuple[Ticket, dict[int, np.ndarray]]:
        """A ticket, and the ids as `check` takes them. ids: by the tables' numbers."""
        device = self.cache.device.torch_device
        values = np.concatenate([np.zeros(1, np.int64), *ids.values()])
        inputs = torch.from_numpy(values).to(device).view(torch.uint8)
        written, jobs = jobs_of(ids, self.cache.device.block(PROBE_BLOCK))
        memory = torch.frombuffer(bytearray(written + bytes(8)), dtype=torch.uint8).to(device)
        self._kept += [inputs, memory]
        self.cache.device.synchronize()
        return self.cache.prefetch(jobs.placed(memory.data_ptr()), inputs, admit_all), ids

    def check(self, ticket: Ticket, ids: dict[int, np.ndarray]) -> None:
        """What lies at each location is the row."""
        self.cache.device.synchronize()
        arena, locations = self.cache._memory.arena.cpu().numpy(), ticket.locations.cpu().numpy()
        at = 0
        for number, wanted in ids.items():
            rows = self.rows[number].numpy()
            for id in wanted:
                place, size = int(locations[at]), rows.shape[1]
                start = (
                    place * device_row_bytes(size)
                    if place >= 0
                    else ticket.staging - self.cache.slots_address + 16 * (-2 - place)
                )
                found = rows[id] if place == -1 else arena[start : start + size]
                assert (found == rows[id]).all(), f"id {id} of table {number}, at {place}"
                at += 1

    def look_up(self, ids: dict[int, np.ndarray], admit_all: bool = False) -> None:
        ticket, ids = self.prefetch(ids, admit_all)
        self.check(ticket, ids)
        ticket.release()

    def check_integrity(self) -> None:
        check(self.cache, lambda number, id: padded(self.rows[number][id].numpy()))

    def mean_chain(self) -> float:
        """Mean length of the index's chains that are not empty."""
        occupied = self.cache.statistics(wait=True).occupied
        return occupied / int((self.cache._memory.heads != -1).sum())

    def hits(self) -> int:
        return sum(t.hits for t in self.cache.statistics(wait=True).tables.values())


def registered(table: Any) -> torch.Tensor:
    """A table's rows where the GPU reads them."""
    memory = torch.empty(table.packed.size, dtype=torch.uint8, pin_memory=True)
    memory.numpy()[:] = table.packed.reshape(-1)
    return memory


def padded(row: np.ndarray) -> bytes:
    """What a slot has of a row, uint8 [bytes]."""
    return row.tobytes().ljust(device_row_bytes(row.size), b"\0")


def jobs_of(ids: dict[int, np.ndarray], block: int) -> tuple[bytes, Jobs]:
    """Jobs of a batch whose ids begin at byte 8 of its inputs. ids: by the tables' numbers."""
    rows: list[list[int]] = []
    of_block: list[int] = []
    at = 0
    for number, wanted in ids.items():
        job: dict[Any, int] = dict.fromkeys(ProbeField, 0) | {
            ProbeField.TABLE: number,
            ProbeField.IDS_AT: 8 + 8 * at,
            ProbeField.IDS: wanted.size,
            ProbeField.LOCATIONS_AT: 4 * at,
            ProbeField.FIRST_BLOCK: len(of_block),
        }
        of_block += [len(rows)] * -(-wanted.size // block)
        rows.append([job[field] for field in ProbeField])
        at += wanted.size
    jobs = np.array(rows, np.int64)
    return jobs.tobytes() + np.array(of_block, np.int32).tobytes(), Jobs(0, jobs.nbytes, len(of_block), at)


def settings(policy: Policy = Policy.LRU, **more: Any) -> CacheSettings:
    return CacheSettings(policy, **{"page_bytes": 1024, **more})


def run(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int64)
