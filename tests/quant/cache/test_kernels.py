"""The cache's kernels, one by one: each does what its reference does, compiles for GPUs, and reads its
records by name.
"""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import cache_reference as reference
import numpy as np
import pytest
import torch
from cache_contents import Contents, read
from cached_tables import CachedTables, padded, settings

from tableside.quant.cache.kernels import state
from tableside.quant.cache.kernels.state import ID_BITS, UNIT_BYTES, BatchArray, BatchState
from tableside.quant.cache.settings import Policy
from tableside.quant.cache.tickets import InFlightBatch, Ticket

pytestmark = pytest.mark.gpu

Ids = dict[int, np.ndarray]


class Steps:
    """Holds every launch of a cache's kernels against the reference. launched: the kernels that were."""

    def __init__(self, held: CachedTables, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.cache = held, held.cache
        self.launched: set[str] = set()
        self.ids: Ids = {}
        self.locations: list[int] = []
        kernels = self.cache._pipeline.kernels
        for name, kernel in list(vars(kernels).items()):
            if callable(kernel):
                monkeypatch.setattr(kernels, name, self.watched(name, kernel))

    def prefetch(self, ids: Ids, admit_all: bool) -> Ticket:
        self.ids, self.locations = ids, [0] * sum(wanted.size for wanted in ids.values())
        return self.held.prefetch(ids, admit_all)[0]

    def watched(self, name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def launch(programs: int, stream: None, *arguments: int) -> None:
            expected = self.read()
            kernel(programs, stream, *arguments)
            self.apply(name, expected, arguments)
            found = self.read()
            for part in vars(expected):
                assert getattr(found, part) == getattr(expected, part), f"{part} after {name}"
            self.launched.add(name)

        return launch

    def read(self) -> Contents:
        cache = self.cache
        return read(cache._memory, cache._pages, cache._tables, cache.settings)

    def batch(self, record: int) -> InFlightBatch:
        return next(b for b in self.cache._batches.all if b.record.data_ptr() == record)

    def row_of(self, key: int) -> bytes:
        return padded(self.held.rows[key >> ID_BITS][key & ((1 << ID_BITS) - 1)].numpy())

    def apply(self, name: str, c: Contents, arguments: tuple[int, ...]) -> None:
        """What the reference says of a launch, to `c`; and of what is not in `c`: locations, staging buffers,
        the CPU's list.
        """
        match name:
            case "begin":
                reference.begin(c, self.batch(arguments[1]).record.tolist()[state.TicketField.PLACE])
            case "probe":
                self.locations = self.located(lambda n, ids, _: reference.probe(c, n, ids), arguments)
            case "resolve":
                self.locations = self.located(
                    lambda n, ids, was: reference.resolve(c, n, ids, was), arguments
                )
            case "enumerate_misses":
                reference.enumerate_misses(c, self.batch(arguments[1]).staging.numel() // UNIT_BYTES)
            case "choose_threshold":
                reference.choose_threshold(c, bool(arguments[1]))
            case "evict" | "evict_any":
                reference.evict(c, name == "evict_any")
            case "rank_admitted" | "unlink" | "insert" | "end":
                getattr(reference, name)(c)
            case "fetch_misses":
                staging = self.staging(arguments[1])
                reference.fetch_misses(c, self.row_of, expected := bytearray(staging))
                assert staging == bytes(expected), "the staging buffer"
            case "fetch_rest":
                reference.fetch_rest(c, self.row_of)
            case "fill_slots":
                reference.fill_slots(c, bytearray(self.staging(arguments[1])))
            case "release":
                reference.release(c, self.batch(arguments[1]).record.tolist()[state.TicketField.PLACE])
            case "list_rows":
                self.check_list(
                    reference.list_rows(c, self.cache.settings.gather_from, self.room(arguments[1]))
                )
            case "copy_gathered":
                pass  # what it copies must be there after `fetch_misses`
            case _:
                raise AssertionError(f"{name} has no reference")

    def staging(self, record: int) -> bytes:
        return self.batch(record).staging.cpu().numpy().tobytes()

    def room(self, record: int) -> int:
        gather = self.cache._pipeline._gather
        assert gather is not None
        return min(gather.staging.numel(), self.batch(record).staging.numel()) // UNIT_BYTES

    def check_list(self, rows: list[tuple[int, int]]) -> None:
        """The CPU's list names these rows, by address and words, each with the unit where it goes."""
        gather = self.cache._pipeline._gather
        assert gather is not None
        entries, units = gather.list.tolist()[2:], gather.list[2 + gather.rows :].view(torch.int32).tolist()
        count = int(gather.list[0])
        found = [
            (entries[n] & ((1 << 48) - 1), entries[n] >> 48, units[n]) for n in range(count) if entries[n]
        ]
        expected = []
        for key, unit in rows:
            table = self.held.rows[key >> ID_BITS]
            address = table.data_ptr() + (key & ((1 << ID_BITS) - 1)) * table.shape[1]
            expected.append((address, table.shape[1] // 4, unit))
        assert found == expected

    def located(
        self, step: Callable[[int, list[int], list[int]], list[int]], arguments: tuple[int, ...]
    ) -> list[int]:
        """The locations of all ids by the reference, which the device's must equal."""
        expected: list[int] = []
        for number, ids in self.ids.items():
            expected += step(number, ids.tolist(), self.locations[len(expected) :][: ids.size])
        found = np.frombuffer(
            ctypes.string_at(self.batch(arguments[1]).locations.data_ptr(), 4 * len(expected)), np.int32
        )
        assert found.tolist() == expected, "locations"
        return expected


@pytest.mark.drawn(0.5)
@pytest.mark.skipif(
    "__import__('tables').DEVICE != 'interpreter'", reason="reads what kernels wrote at its address"
)
@pytest.mark.parametrize("gather_threads", [0, 2])
@pytest.mark.parametrize(
    ("policy", "budget", "staging_fraction"),
    [
        (Policy.LRU, 7_600, 0.2),
        (Policy.LFU, 7_600, 0.2),
        (Policy.LFU, 20_000, 0.05),
        (Policy.LRU, 20_000, 0.0),
        (Policy.LFU, 40_000, 0.3),
    ],
)
def test_each_kernel_does_what_its_reference_does(
    policy: Policy, budget: int, staging_fraction: float, gather_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every launch of seeded batches, one of them in flight, all state is the reference's: rows of
    three sizes, duplicates, ids out of range, a batch of which every row is admitted, fewer and more
    misses than a staging buffer holds, scores that wrap."""
    more = {"staging_buffers": 2, "staging_fraction": staging_fraction, "half_life": 5}
    sizes = {"a": (300, 48), "b": (600, 144), "c": (40, 28)}
    held = CachedTables(
        budget, settings(policy, gather_threads=gather_threads, gather_from=20, **more), sizes
    )
    if budget == 20_000:
        held.cache._memory.state[BatchState.NOW] = 2**31 // held.cache.settings.score_rate - 3
    steps = Steps(held, monkeypatch)
    rng = np.random.default_rng(budget)
    earlier = None
    for number in range(7):
        ids = {n: rng.zipf(1.3, rng.integers(0, 60)) % len(rows) for n, rows in held.rows.items()}
        if number == 2:
            ids[0] = np.concatenate([ids[0], [-1, 2**40, 300]])
        ticket = steps.prefetch(ids, admit_all=number == 5)
        if earlier is not None:
            earlier.release()
        earlier = ticket
    kernels = {name for name, kernel in vars(held.cache._pipeline.kernels).items() if callable(kernel)}
    assert kernels - steps.launched == (set() if gather_threads else {"list_rows", "copy_gathered"})
    found = held.cache.statistics(wait=True)
    assert min(found.inserted, found.evicted, found.locked_out if budget == 7_600 else 1) > 0, found
    assert (found.padded > 0 or policy is Policy.LRU) is (staging_fraction > 0 or policy is Policy.LRU), found


@pytest.mark.parametrize(
    ("prefix", "fields", "first"),
    [
        ("ROOT", state.Root, 0),
        ("ARRAY", BatchArray, len(state.Root)),
        ("TABLE", state.TableField, 0),
        ("CLASS", state.ClassField, 0),
        ("STATE", BatchState, 0),
        ("CLASS_STATE", state.ClassState, 0),
        ("COUNTER", state.TableCounter, 0),
        ("PROBE", state.ProbeField, 0),
        ("TICKET", state.TicketField, 0),
    ],
)
def test_kernels_read_fields_by_name(prefix: str, fields: type[IntEnum], first: int) -> None:
    """Each constant is the place of the field whose name it has, so that fields can be put in another
    order."""
    assert [f.value for f in fields] == [*range(len(fields))]
    for field in fields:
        assert getattr(state, f"{prefix}_{field.name}").value == first + field
    assert getattr(state, f"{prefix}_SIZE").value == len(fields)


COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from tableside.quant.cache.kernels import admit, batch, evict, fetch, find

TILE = dict(ROWS=128, WORDS=64)
KERNELS = [
    (batch.begin, dict(CLASS_LANES=64), 1), (batch.release, {}, 1), (batch.end, dict(BLOCK=256), 4),
    *((find.probe, dict(LFU=lfu, BLOCK=128), 1) for lfu in (True, False)),
    *((find.enumerate_misses, dict(LFU=lfu, FLAGS=1), 4) for lfu in (True, False)),
    *((admit.choose_threshold, dict(LFU=lfu, SAMPLE=1024, CLASS_LANES=64), 8) for lfu in (True, False)),
    *((admit.rank_admitted, dict(LFU=lfu, BLOCK=256), 4) for lfu in (True, False)),
    *((admit.insert, dict(LFU=lfu, BLOCK=512), 4) for lfu in (True, False)),
    *((evict.evict, dict(ANY=any_, LFU=lfu, BLOCK=512, CLASS_LANES=64), 1)
      for any_ in (True, False) for lfu in (True, False)),
    (evict.unlink, dict(BLOCK=1024), 4), (evict.link_all, dict(BLOCK=1024), 4),
    (evict.forget, dict(BLOCK=1024), 4), (fetch.list_rows, dict(BLOCK=256), 4),
    (fetch.copy_gathered, dict(CHUNKS=2048), 8), (fetch.fill_slots, TILE, 8),
    *((fetch.fetch_misses, dict(GATHERS=g, REST=r, TIGHT=t, **TILE), 8)
      for t in (False, True) for g, r in ((True, False), (False, False), (False, True))),
    (find.resolve, dict(BLOCK=128), 1),
]
launched = {k for m in (admit, batch, evict, fetch, find) for k in vars(m).values()
            if isinstance(k, JITFunction) and k.fn.__module__ == m.__name__
            and k.arg_names[0] == "root" and k.do_not_specialize}
assert launched == {k for k, _, _ in KERNELS}, "not every kernel is compiled here"
for kernel, constants, warps in KERNELS:
    name = kernel.fn.__name__
    arguments = [a for a in kernel.arg_names if a not in constants]
    signature = {**dict.fromkeys(arguments, "i64"), **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    ptx = triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
    assert ".local" not in ptx, f"{name}: registers spill, or arrays are in local memory"
    if name in ("copy_gathered", "fetch_misses", "fill_slots"):
        assert "st.global.v4" in ptx, "rows are not written 16 bytes at a time"
        assert "ld.global.v4" in ptx or constants.get("TIGHT"), "rows are not read 16 bytes at a time"
print("compiled")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, for sm_80 and sm_90, without a GPU: no local memory, wide loads and stores."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "compiled"
