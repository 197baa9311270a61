"""Rows that the CPU gathers for a device: which ones, where they go, and when, in the order of a stream."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tables
import torch
from cached_tables import CachedTables, run, settings
from gates import gate, is_held, let_others_run

from tableside.quant.cache.settings import Policy
from tableside.quant.device.gather import HostGather

pytestmark = pytest.mark.gpu

ON_GPU = "__import__('tables').DEVICE != 'interpreter'"
needs_gpu = pytest.mark.skipif(f"not ({ON_GPU})", reason="needs a GPU's streams")
HEAD = 2


class Rows:
    """Rows of 4 to 64 bytes of random bytes, and the list that names them: each behind the one before in the
    staging buffer, padded to 16 bytes."""

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rows = [rng.integers(1, 256, 4 * int(n), dtype=np.uint8) for n in rng.integers(1, 17, count)]
        self.places = np.cumsum([0, *(row.size + -row.size % 16 for row in self.rows)])
        self.bytes = int(self.places[-1])

    def list(self, gather: HostGather) -> torch.Tensor:
        """What the kernel `list_rows` writes, int64, as long as the gather's."""
        listed = np.zeros(gather.list.numel(), np.int64)
        listed[:HEAD] = len(self.rows), self.bytes
        for n, row in enumerate(self.rows):
            listed[HEAD + n] = row.ctypes.data | row.size // 4 << 48
        units = listed[HEAD + gather.rows :].view(np.int32)
        units[: len(self.rows)] = self.places[:-1] // 16
        return torch.from_numpy(listed)

    def all(self) -> np.ndarray:
        return np.concatenate([np.pad(row, (0, -row.size % 16)) for row in self.rows])


def gather_of(rows: int, size: int, threads: int = 2) -> HostGather:
    return HostGather(rows, size, threads, tables.gpu_backend().device)


def gathered(gather: HostGather, likely: int, rows: Rows) -> bytes:
    """The staging buffer after every chunk was gathered."""
    gather.staging.fill_(0)
    gather.list.copy_(rows.list(gather))
    stream = None if tables.DEVICE == "interpreter" else torch.cuda.current_stream().cuda_stream
    for _, _, request in gather.requests(likely):
        gather(stream, request)
    if stream is not None:
        torch.cuda.synchronize()
    return gather.staging.numpy().tobytes()


@pytest.mark.parametrize("likely", [0, 16, 5 << 20], ids=["nothing expected", "a row", "four chunks"])
def test_each_listed_row_goes_to_its_place(likely: int) -> None:
    """Whatever the host expects: one chunk or four, cut anywhere. Nothing is written behind the last row."""
    rows = Rows(3000, 1)
    gather = gather_of(4000, 8 << 20)
    found = gathered(gather, likely, rows)
    assert found[: rows.bytes] == rows.all().tobytes()
    assert not any(found[rows.bytes :])
    assert gather.last_bytes == rows.bytes


def test_chunks_are_cut_between_units_and_reach_the_end() -> None:
    """Each begins where the one before ends, at a multiple of 16; the last one takes what is beyond the
    expected bytes."""
    gather = gather_of(10, 8 << 20)
    for likely, count in ((0, 1), (1 << 20, 1), (5 << 20, 4), ((5 << 20) + 1000, 4)):
        cuts = [(first, end) for first, end, _ in gather.requests(likely)]
        assert len(cuts) == count and cuts[0][0] == 0 and cuts[-1][1] == 8 << 20
        assert all(before[1] == after[0] for before, after in pairwise(cuts))
        assert all(first % 16 == 0 for first, _ in cuts)


def test_a_list_of_no_rows_gathers_nothing() -> None:
    gather = gather_of(100, 1 << 20)
    assert not any(gathered(gather, 0, Rows(0, 1)))


@needs_gpu
def test_the_cpu_gathers_when_the_stream_comes_to_it() -> None:
    """Not before what the stream has to do first, which writes the list, and before what it does next,
    which reads the rows."""
    rows = Rows(3000, 2)
    gather = gather_of(4000, 1 << 20)
    device = torch.device(tables.DEVICE)
    gathered(gather, 0, Rows(1, 3))
    stream, listed = torch.cuda.Stream(device), rows.list(gather).to(device)
    found = torch.zeros(gather.staging.numel(), dtype=torch.uint8, device=device)
    gather.staging.fill_(0)
    gather.list.zero_()
    ((_, _, request),) = gather.requests(0)
    let_others_run(device)
    torch.cuda.synchronize()
    with gate() as closed:
        closed.hold(stream)
        with torch.cuda.stream(stream):
            gather.list.copy_(listed, non_blocking=True)
        gather(stream.cuda_stream, request)
        with torch.cuda.stream(stream):
            found.copy_(gather.staging, non_blocking=True)
        assert is_held(stream)
        assert not gather.staging.any(), "gathered before its turn"
        closed.open()
        torch.cuda.synchronize()
    assert found[: rows.bytes].cpu().numpy().tobytes() == rows.all().tobytes()


@needs_gpu
@pytest.mark.parametrize("held", ["main", "side", "copies"])
def test_a_batchs_rows_are_listed_then_gathered_then_copied(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever stream is held back when a batch is launched, the others wait for it, and the lookup for all
    of them.

    So each row is the one that the batch misses, and not what lay in the gather's list and buffer before.
    """
    t = CachedTables(
        1 << 20, settings(Policy.LRU, gather_threads=2, gather_from=1, page_bytes=None), {"a": (4000, 144)}
    )
    for first in (0, 1000):  # compiles everything, and the host learns how many bytes to expect
        t.look_up({0: run(400, first)})
    gather: Any = t.cache._pipeline._gather
    assert gather.last_bytes == 400 * 144
    stream = getattr(t.cache._streams, held)
    let_others_run(t.cache.device.torch_device)
    prefetch = t.cache.prefetch
    with gate() as closed:

        def held_back(*arguments: Any) -> Any:
            gather.staging.fill_(0xEE)
            closed.hold(stream)
            return prefetch(*arguments)

        monkeypatch.setattr(t.cache, "prefetch", held_back)
        ticket, ids = t.prefetch({0: run(400, 2000)})
        ticket.wait()
        assert is_held(t.cache.device.current_stream()), "the lookup does not wait for the rows"
        closed.open()
    t.check(ticket, ids)
    ticket.release()
    t.check_integrity()
