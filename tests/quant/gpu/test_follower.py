"""What follows lookups on the device: its matrices hold the vectors and tensors of every request, whatever
the requests are."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tables
import torch
from cached_tables import registered
from rounding import expect
from tables import gpu_backend, placed, table_of

from tableside.quant import BadIds, Lookup, LookupKind, Pooling, Precision, RowFormat, choose
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.contract import MatrixPlace, place_of
from tableside.quant.cpu import _native
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.buffers import Buffers
from tableside.quant.gpu.batch.follower import FILL_BLOCK, Fills, FollowerInputs, Matrices, StagedTensor
from tableside.quant.gpu.batch.moves import Move, as_bytes
from tableside.quant.gpu.kernels.job import FillField

pytestmark = pytest.mark.gpu

DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
WIDE, NARROW = table_of(RowFormat.INT8, 32), table_of(RowFormat.INT4, 12, seed=1)
CONTEXT = 5  # numbers of a row's dense tensor


class Gathers:
    """A follower that takes, of each request, the vectors of both features and a dense tensor, to three
    matrices.

    precision: of the matrices.
    """

    def __init__(
        self,
        rows: Sequence[int],
        parts: Sequence[Any],
        stays: Sequence[bool],
        precision: Precision = Precision.FP32,
    ) -> None:
        backend: Any = gpu_backend()
        self.widths = (WIDE.dim, NARROW.dim, CONTEXT)
        self.matrices = [
            torch.full((sum(rows), w), -1.0, dtype=DTYPES[precision], device=backend.device.torch_device)
            for w in self.widths
        ]
        self._taken = []
        start = 0
        for count, own, one in zip(rows, parts, stays, strict=True):
            targets = [
                m.data_ptr() + precision.bytes * start * w
                for m, w in zip(self.matrices, self.widths, strict=True)
            ]
            self._taken.append(
                FollowerInputs(
                    Matrices(np.array(own, np.int64), count, precision), np.array(targets, np.int64), one
                )
            )
            start += count
        self.seen: list[np.ndarray] = []

    def takes(self, number: int) -> FollowerInputs | None:
        return self._taken[number]

    def run(self) -> None:
        self.seen = [m.float().cpu().numpy() for m in self.matrices]


class Asked:
    """One request: bags of ids of both features, behind each other or, as a kjt's, side by side; and a
    dense tensor."""

    def __init__(
        self, rng: np.random.Generator, bags: int, together: bool = False, found: bool = False
    ) -> None:
        self.bags = bags
        self.lengths = rng.integers(0, 4, bags, dtype=np.int32)
        self.ids = rng.integers(0, 200, int(self.lengths.sum()))
        self.context = rng.standard_normal((bags, CONTEXT)).astype(np.float32)
        # The dense tensor lies between ids and lengths, so that its place among the staged ones is another.
        self.context_at = self.ids.nbytes
        lengths_at = self.context_at + self.context.nbytes
        precisions = (Precision.FP32, Precision.FP32 if together else Precision.FP16)
        self.lookups: list[Lookup] = []
        at, row_bytes = 0, 4 * (WIDE.dim + NARROW.dim) if together else None
        for table, precision in zip((WIDE, NARROW), precisions, strict=True):
            lk = Lookup(
                placed(table),
                Pooling.SUM,
                0,
                self.ids.size,
                at,
                precision,
                bags,
                lengths_at,
                out_row_bytes=row_bytes,
            )
            self.lookups.append(lk)
            at += lk.vector_bytes if together else bags * lk.vector_bytes
        self.out_bytes = at if not together else bags * (row_bytes or 0)
        self.parts: list[Any] = [
            MatrixPlace(
                1,
                lk.out_at,
                row_bytes or lk.vector_bytes,
                int(lk.precision is Precision.FP16),
                lk.table.dim,
            )
            for lk in self.lookups
        ]
        self.parts.append(MatrixPlace(0, self.context_at, 4 * CONTEXT, 0, CONTEXT))

    @property
    def inputs(self) -> bytes:
        return self.ids.tobytes() + self.context.tobytes() + self.lengths.tobytes()

    def plan(self, planned: bool) -> Any:
        backend: Any = gpu_backend()
        if not planned:
            return backend.plan(self.lookups, out_bytes=self.out_bytes)
        kinds = [LookupKind(lk.table, lk.pooling, lk.precision) for lk in self.lookups]
        places = np.array([place_of(lk, n) for n, lk in enumerate(self.lookups)], np.int64)
        return backend.planner(kinds).plan(places, self.out_bytes)

    def check(self, matrices: Sequence[np.ndarray], start: int) -> None:
        rows = slice(start, start + self.bags)
        for table, lk, found in zip((WIDE, NARROW), self.lookups, matrices, strict=False):
            expect(table, self.ids, self.lengths, pooling=Pooling.SUM, precision=lk.precision).check(
                found[rows]
            )
        np.testing.assert_array_equal(matrices[2][rows], self.context)


def look_up(
    asked: Sequence[Asked],
    stays: Sequence[bool],
    planned: bool = False,
    precision: Precision = Precision.FP32,
) -> tuple[list[Any], Gathers]:
    """planned: requests are laid out by a planner, as a server's are, and not one by one."""
    backend: Any = gpu_backend()
    follower = Gathers([a.bags for a in asked], [a.parts for a in asked], stays, precision)
    requests = [(a.plan(planned), a.inputs) for a in asked]
    found, _ = backend.batches.run(requests, timed=True, follower=follower)
    return found, follower


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.drawn(2)
def test_matrices_hold_every_request(together: bool, planned: bool) -> None:
    """Vectors of two precisions and dense tensors of requests of several sizes, one of none; all outputs
    come to the host too."""
    rng = np.random.default_rng(0)
    asked = [Asked(rng, bags, together) for bags in (3, 1, 0, 70)]
    found, follower = look_up(asked, [False] * 4, planned)
    start = 0
    for a, answer in zip(asked, found, strict=True):
        a.check(follower.seen, start)
        start += a.bags
        if not together:
            wide = answer.outputs[: a.bags * 4 * WIDE.dim].view(np.float32).reshape(-1, WIDE.dim)
            expect(WIDE, a.ids, a.lengths, pooling=Pooling.SUM).check(wide)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
@pytest.mark.drawn(1)
def test_matrices_are_written_in_their_precision(precision: Precision) -> None:
    """Each value is rounded once, to the nearest; in Triton's interpreter, which cuts, bf16 is towards
    zero."""
    rng = np.random.default_rng(5)
    asked = [Asked(rng, bags) for bags in (5, 2, 40)]
    _, wide = look_up(asked, [True] * 3)
    _, narrow = look_up(asked, [True] * 3, precision=precision)
    for exact, found in zip(wide.seen, narrow.seen, strict=True):
        if precision is Precision.BF16 and tables.DEVICE == "interpreter":
            expected = (exact.view(np.uint32) & 0xFFFF0000).view(np.float32)
        else:
            expected = torch.from_numpy(exact).to(DTYPES[precision]).float().numpy()
        np.testing.assert_array_equal(found, expected)


def test_outputs_that_stay_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gets those of the others alone, each its own, wherever it stands in the batch."""
    rng = np.random.default_rng(1)
    asked = [Asked(rng, bags) for bags in (4, 8, 5, 9)]
    backend: Any = gpu_backend()
    sizes: list[int] = []
    pinned = backend.device.pinned
    monkeypatch.setattr(backend.device, "pinned", lambda size: sizes.append(size) or pinned(size))
    found, follower = look_up(asked, [True, False, True, False])
    assert sizes[-1] == sum((a.out_bytes + 15) // 16 * 16 for a in asked[1::2])
    start = 0
    for n, (a, answer) in enumerate(zip(asked, found, strict=True)):
        a.check(follower.seen, start)
        start += a.bags
        assert answer.outputs.size == a.out_bytes
        if n % 2:
            wide = answer.outputs[: a.bags * 4 * WIDE.dim].view(np.float32).reshape(-1, WIDE.dim)
            expect(WIDE, a.ids, a.lengths, pooling=Pooling.SUM).check(wide)
    found, _ = look_up(asked[:1], [True])
    assert sizes[-1] == 0 and found[0].outputs.size == asked[0].out_bytes


@pytest.mark.parametrize("what", ["id", "lengths"])
@pytest.mark.drawn(1)
def test_rows_of_refused_requests_are_finite_and_disturb_no_others(what: str) -> None:
    """Also where the lookup writes no vector at all, and memory holds whatever was there."""
    rng = np.random.default_rng(2)
    asked = [Asked(rng, bags) for bags in (6, 7, 8)]
    backend: Any = gpu_backend()
    look_up(asked, [True] * 3)
    backend.batches._free[0].device_out.fill_(255)  # NaN, read as numbers
    if what == "id":
        asked[1].ids[0] = 10**9
    else:
        asked[1].lengths[0] += 1
    found, follower = look_up(asked, [True, True, False])
    assert [isinstance(f, BadIds) for f in found] == [False, True, False]
    asked[0].check(follower.seen, 0)
    asked[2].check(follower.seen, 13)
    assert all(np.isfinite(matrix).all() for matrix in follower.seen)


@pytest.mark.thorough
def test_batches_begin_before_others_are_finished() -> None:
    """Through a cache, of which each of them has a ticket: every one reads its own ids, and gives its own
    buffers back."""
    backend = GpuBackend(tables.DEVICE, choose())
    rng = np.random.default_rng(4)
    backend.open_cache(40_000, 48, CacheSettings(staging_buffers=3))
    table = table_of(RowFormat.INT8, 40)
    cached = backend.place("cached", table, None if backend.device.reads_all_memory else registered(table))
    drawn = [rng.integers(0, 200, 30) for _ in range(5)]
    lk = Lookup(cached, Pooling.SUM, 0, 30, 0, bags=6, bag_length=5)
    begun: list[Any] = []
    for n, ids in enumerate(drawn):
        begun.append(backend.batches.begin([(backend.plan([lk]), ids.tobytes())], launches=False))
        if n >= 2:
            check_sums(backend.batches.wait(begun[n - 2])[0], table, drawn[n - 2])
    for one, ids in zip(begun[3:], drawn[3:], strict=True):
        check_sums(backend.batches.wait(one)[0], table, ids)
    assert len({id(b) for b in backend.batches._free}) == len(backend.batches._free) == 3


def check_sums(found: Any, table: Any, ids: np.ndarray) -> None:
    """Of bags of 5 ids."""
    vectors = found[0].outputs.view(np.float32).reshape(6, -1)
    expect(table, ids, np.full(6, 5, np.int32), pooling=Pooling.SUM).check(vectors)


def test_a_single_request_again_and_again() -> None:
    """Its header stays on the device from its second run on; what fills matrices is sent each time."""
    rng = np.random.default_rng(3)
    a = Asked(rng, 5)
    backend: Any = gpu_backend()
    plan = backend.plan(a.lookups, out_bytes=a.out_bytes)
    for _ in range(3):
        follower = Gathers([5], [a.parts], [True])
        backend.batches.run([(plan, a.inputs)], follower=follower)
        a.check(follower.seen, 0)


WIDTH = 8  # values of a vector, in what follows


def written(
    fills: Fills, inputs: list[int], outputs: list[int], failed: list[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """The jobs [n, fields of FillField] and the job of each program."""
    room = np.zeros(fills.size // 8 + 1, np.int64).view(np.uint8)[: fills.size]
    fills.write(room, inputs, outputs, failed)
    jobs = room[: fills.programs_at].view(np.int64).reshape(-1, len(FillField))
    return jobs, room[fills.programs_at :].view(np.int32)[: fills.programs]


def test_jobs_of_many_programs() -> None:
    """Each program knows its job, and how many programs of the job come before it; of failed requests
    zeros are taken."""
    direct: Any = SimpleNamespace(is_direct=True)
    rows = 2 * FILL_BLOCK // WIDTH + 1
    three = np.array([(0, 40, 12, 0, 3), (1, 0, 4 * WIDTH, 0, WIDTH), (0, 7, 20, 0, 5)])
    of_half = Matrices(np.array([(1, 16, 18, 1, 4)]), FILL_BLOCK // 4, Precision.BF16)
    taken = [
        FollowerInputs(Matrices(three, rows), np.array([200, 100, 300]), True),
        None,
        FollowerInputs(of_half, np.array([400]), False),
    ]
    fills = Fills([direct] * 3, taken, FILL_BLOCK)
    staged = -(-4 * 3 * rows // 16) * 16  # the second tensor lies behind the first one
    assert fills.tensors == [StagedTensor(0, 40, 0, 12 * rows), StagedTensor(0, 7, staged, 20 * rows)]
    assert fills.input_bytes == [staged + -(-20 * rows // 16) * 16, 0, 0]
    jobs, of_program = written(fills, [2000, 0, 0], [1000, 0, 3000], [False, False, True])
    np.testing.assert_array_equal(jobs[:, FillField.SOURCE], [2000, 1000, 2000 + staged, 0])
    np.testing.assert_array_equal(jobs[:, FillField.TARGET], [200, 100, 300, 400])
    np.testing.assert_array_equal(jobs[:, FillField.IS_HALF], [0, 0, 0, 1])
    np.testing.assert_array_equal(jobs[:, FillField.VALUES], [3 * rows, WIDTH * rows, 5 * rows, FILL_BLOCK])
    np.testing.assert_array_equal(
        jobs[:, [FillField.WIDTH, FillField.STEP]], [(3, 3), (WIDTH, WIDTH), (5, 5), (4, 9)]
    )
    programs = [-(-values // FILL_BLOCK) for values in (3 * rows, WIDTH * rows, 5 * rows, FILL_BLOCK)]
    np.testing.assert_array_equal(jobs[:, FillField.FIRST_PROGRAM], np.cumsum([0, *programs[:-1]]))
    np.testing.assert_array_equal(
        jobs[:, FillField.PRECISION], [Precision.FP32, Precision.FP32, Precision.FP32, Precision.BF16]
    )
    np.testing.assert_array_equal(of_program, np.repeat(np.arange(4), programs))
    assert fills.programs == sum(programs) and max(programs) == 3


def test_vectors_that_the_host_brings_together_are_found_where_they_are_staged() -> None:
    """In whichever order moves and matrices come; a vector may begin within what is moved."""
    moves = [Move(64, 16, 16), Move(0, 40, 16), Move(128, 4096, 64)]
    for order in ([16, 40, 4096], [40, 4100, 16], [4096, 16, 44]):
        sources = np.array([(1, at, 16, 0, 4) for at in order])
        layout: Any = SimpleNamespace(is_direct=False, moves_out=as_bytes(moves))
        taken = FollowerInputs(Matrices(sources, 1), np.array([1, 2, 3]), True)
        jobs, _ = written(Fills([layout], [taken], FILL_BLOCK), [0], [10_000], [False])
        expected = [10_000 + {16: 64, 40: 0, 44: 4, 4096: 128, 4100: 132}[at] for at in order]
        assert jobs[:, FillField.SOURCE].tolist() == expected
        assert jobs[:, FillField.STEP].tolist() == [4] * 3
    nothing: Any = SimpleNamespace(is_direct=False, moves_out=b"")
    taken = FollowerInputs(Matrices(np.array([(1, 16, 16, 0, 4)]), 0), np.array([1]), True)
    jobs, of_program = written(Fills([nothing], [taken], FILL_BLOCK), [0], [10_000], [False])
    assert jobs[:, FillField.SOURCE].tolist() == [10_000] and not of_program.size


def test_what_are_no_matrices_is_refused() -> None:
    right = np.array([(1, 16, 16, 0, 4)])
    room = np.zeros(64 + 8, np.uint8)
    targets = np.array([8])

    def write(*one: Any, jobs: int = 1, programs: int = 1, room: np.ndarray = room) -> None:
        _native.write_fills([one], FILL_BLOCK, jobs, programs, room)

    write(right, None, targets, 1, 0, 0, 0)
    for wrong in (right.tobytes()[:-8], np.array([(1, -1, 16, 0, 4)]), np.array([(1, 0, 16, 0, -4)])):
        with pytest.raises(ValueError, match="these are no matrices"):
            write(wrong, None, targets, 1, 0, 0, 0)
        with pytest.raises(ValueError, match="these are no matrices"):
            _native.size_fills([(wrong, 1)], FILL_BLOCK)
    for rows in (-1, 1 << 62):
        with pytest.raises(ValueError, match="these are no matrices"):
            write(right, None, targets, rows, 0, 0, 0)
    with pytest.raises(ValueError, match="not as many targets"):
        write(right, None, targets[:0], 1, 0, 0, 0)
    with pytest.raises(ValueError, match="too little room"):
        write(right, None, targets, 1, 0, 0, 0, programs=0)
    with pytest.raises(ValueError, match="too little room"):
        write(right, None, targets, 1, 0, 0, 0, jobs=0)
    with pytest.raises(ValueError, match="the jobs do not fit"):
        write(right, None, targets, 1, 0, 0, 0, room=room[:66])


def test_answers_of_no_bytes_take_no_room() -> None:
    """As those of a batch have of which only scores are sent."""

    def take(size: int) -> Any:
        assert size
        return np.zeros(size, np.uint8)

    backend: Any = gpu_backend()
    buffers = Buffers(backend.device, take)
    assert not buffers.answer(0).size and buffers.answer(8).size == 8
