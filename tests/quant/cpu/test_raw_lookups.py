"""Lookups by raw ids give what a dictionary of rows gives, by every backend of the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_backends import BACKENDS, cpu_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_tables import RawTable, kinds_of_ids, part_of, raw_table
from reference import backend_of
from tables import check_vectors, table_of

from tableside.quant import (
    BadIds,
    CpuBackend,
    Lookup,
    LookupKind,
    Place,
    Pooling,
    Precision,
    RowFormat,
    Table,
    choose,
)
from tableside.quant.contract import Unfound
from tableside.quant.cpu.native import gather
from tableside.quant.errors import Problem
from tableside.quant.rows.ids import RowMap

KINDS = kinds_of_ids(300)
# the id in the row's padding, with rows of 1, 2, 3 and more lines of the cache; and beside the rows
LAYOUTS = [
    (RowFormat.INT8, 64), (RowFormat.INT8, 4), (RowFormat.INT8, 128), (RowFormat.INT8, 256), (RowFormat.INT4,
    24),
    (RowFormat.FP16, 32), (RowFormat.INT8, 60), (RowFormat.FP32, 20),
]  # fmt: skip
ODD = [(RowFormat.INT8, 65), (RowFormat.INT8, 5), (RowFormat.FP16, 33)]
SHARED_IDS = 40_000  # of one call: more than `SHARED_IDS` of _execute.h, and more bytes than its SHARED_BYTES


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    yield from cpu_backend(request.param)


def asked_of(ids: np.ndarray, count: int = 180) -> np.ndarray:
    """A request: ids that are there, some of them twice, their neighbours, and the extremes; int64
    [count]."""
    rng = np.random.default_rng(len(ids))
    near = ids ^ 1 if len(ids) else np.arange(3)
    pool = np.concatenate([ids, ids, near, KINDS["extremes"], np.arange(-2, 3)])
    return rng.choice(pool, count)


def check(backend: CpuBackend, raw: RawTable, asked: np.ndarray) -> None:
    check_vectors(backend, raw.table, asked, raw.plain, raw.expected_rows(asked))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.drawn(27)
def test_ids_of_every_kind(backend: CpuBackend, kind: str) -> None:
    """A row for each id that is there, the default row for each that is not: neighbours, extremes, and any
    in an empty table."""
    check(backend, raw_table(KINDS[kind]), asked_of(KINDS[kind]))


@pytest.mark.parametrize(("row_format", "dim"), [*LAYOUTS, *ODD], ids=lambda x: getattr(x, "label", x))
@pytest.mark.drawn(27)
def test_rows_of_every_layout(backend: CpuBackend, row_format: RowFormat, dim: int) -> None:
    """Whether ids lie in the padding or beside the rows, and however many lines of the cache a row has."""
    check(backend, raw_table(KINDS["random"], row_format, dim), asked_of(KINDS["random"]))


@pytest.mark.drawn(2)
def test_requests_of_every_length(backend: CpuBackend) -> None:
    """Around the kernel's blocks of 16 ids and its pieces of 2048."""
    raw = raw_table(KINDS["random"])
    for count in (0, 1, 15, 16, 17, 31, 33, 200, 2047, 2048, 2049, 6000):
        check(backend, raw, asked_of(KINDS["random"], count))


@pytest.mark.parametrize("bucket_ids", [0, 100])
@pytest.mark.parametrize(("first", "owned"), [(0, 8), (0, 1), (3, 2), (7, 1)])
@pytest.mark.drawn(20)
def test_buckets_that_are_ranges_and_parts_of_a_table(
    backend: CpuBackend, first: int, owned: int, bucket_ids: int
) -> None:
    """An id whose bucket is not here is missing like any other."""
    ids = np.random.default_rng(3).permutation(800)[:500].astype(np.int64)
    raw = part_of(raw_table(ids, buckets=8, bucket_ids=bucket_ids), first, owned)
    check(backend, raw, np.concatenate([np.arange(800), asked_of(ids)]))


@pytest.mark.parametrize("missing", [False, True], ids=["refused", "default row"])
@pytest.mark.drawn(5)
def test_calls_that_threads_share(backend: CpuBackend, missing: bool) -> None:
    """More ids than one thread resolves alone, of a table that refuses missing ids and of one that does
    not."""
    ids = np.random.default_rng(1).permutation(30_000).astype(np.int64) * 12_345_678_901
    raw = raw_table(ids, RowFormat.INT4, 64, buckets=64)
    asked = np.random.default_rng(2).choice(ids, SHARED_IDS)
    if missing:
        asked[::7] += 1
    else:
        raw = replace(raw, table=raw.refusing())
    lengths = np.full(SHARED_IDS // 20, 20, np.int32)
    expected = backend.lookup(raw.plain, raw.expected_rows(asked), lengths)
    for threads in (1, 2, 4):
        np.testing.assert_array_equal(
            backend.lookup(raw.table, asked, lengths, threads=threads), expected, f"{threads} threads"
        )


# ---- plans ----


class Request:
    """Lookups laid out in one input and one output buffer, at odd places, each with a found mask."""

    def __init__(self) -> None:
        self.kinds: list[LookupKind] = []
        self.places: list[Place] = []
        self.inputs, self.out_bytes = b"xyz", 1

    def add(self, table: Table, ids: np.ndarray, lengths: np.ndarray | int | None,
            weights: np.ndarray | None = None,
            pooling: Pooling = Pooling.SUM, precision: Precision = Precision.FP32,
        is_found: bool = True) -> None:  # fmt: skip
        """lengths: int32 [bags], or how many ids every bag has, or None where it is not pooled."""
        fixed = lengths if isinstance(lengths, int) else 0
        bags = 0 if lengths is None else len(ids) // fixed if fixed else np.size(lengths)
        at = {"ids": len(self.inputs)}
        self.inputs += ids.tobytes()
        for name, part in (("lengths", None if fixed else lengths), ("weights", weights)):
            at[name] = -1 if part is None else len(self.inputs)
            self.inputs += b"" if part is None else np.asarray(part).tobytes()
        outputs = len(ids) if lengths is None else bags
        found_at = self.out_bytes + outputs * table.dim * precision.bytes if is_found else -1
        self.kinds.append(LookupKind(table, pooling, precision))
        where = (at["ids"], len(ids), at["lengths"], fixed, bags, at["weights"], self.out_bytes)
        self.places.append(Place(len(self.places), *where, found_at=found_at))
        self.out_bytes += outputs * table.dim * precision.bytes + is_found * len(ids)

    def run(self, backend: CpuBackend, threads: int = 1) -> tuple[bytearray, list[Unfound] | None]:
        out = bytearray(b"\xee" * self.out_bytes)
        plan = backend.planner(self.kinds, threads).plan(np.array(self.places, np.int64))
        unfound = plan.run(self.inputs, out)
        return out, None if unfound is None else list(unfound)

    def found(self, out: bytearray, job: int) -> list[int]:
        place = self.places[job]
        return list(out[place.found_at : place.found_at + place.ids])

    def vectors(self, out: bytearray, job: int) -> bytes:
        place, kind = self.places[job], self.kinds[job]
        outputs = place.ids if kind.pooling is Pooling.NONE else place.bags
        return bytes(out[place.out_at : place.out_at + outputs * kind.table.dim * kind.precision.bytes])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.drawn(0.25)
def test_plans_of_raw_and_other_tables_together(data: st.DataObject) -> None:
    """Vectors, found masks and counts of each lookup, by every backend: raw ids with a default row and
    without, row numbers, row numbers with a default row; fixed lengths and others; no byte beside them is
    written."""
    request, expected = Request(), []
    for _ in range(data.draw(st.integers(1, 5))):
        raw = raw_table(KINDS[data.draw(st.sampled_from(["random", "extremes", "none", "a dense run"]))],
                        *data.draw(st.sampled_from(LAYOUTS)))  # fmt: skip
        sort = data.draw(st.sampled_from(["raw", "refusing", "rows", "rows and default"]))
        n = data.draw(st.sampled_from([0, 5, 40]))
        ids = asked_of(np.array(list(raw.numbers), np.int64), n)
        table, rows, found = raw.table, raw.expected_rows(ids), raw.expected_found(ids)
        if sort == "refusing":
            ids = ids[found]
            table, rows, found = raw.refusing(), rows[found], found[found]
        elif sort == "rows":
            ids = rows
            table, found = raw.plain, np.ones(n, np.bool_)
        elif sort == "rows and default":
            table = replace(raw.plain, row_map=RowMap(len(raw.numbers), len(raw.numbers)))
            found = (ids >= 0) & (ids < len(raw.numbers))
            rows = np.where(found, ids, len(raw.numbers))
        n = len(ids)
        pooling = data.draw(st.sampled_from(list(Pooling)))
        lengths: Any = None if pooling is Pooling.NONE else np.array([n // 2, 0, n - n // 2], np.int32)
        fixed = 5 if pooling is not Pooling.NONE and n % 5 == 0 and n and data.draw(st.booleans()) else None
        weights = (
            np.linspace(-1, 1, n, dtype=np.float32)
            if lengths is not None and data.draw(st.booleans())
            else None
        )
        precision = data.draw(st.sampled_from([Precision.FP32, Precision.FP16]))
        request.add(table, ids, fixed or lengths, weights, pooling, precision, data.draw(st.booleans()))
        lengths = np.full(n // fixed, fixed, np.int32) if fixed else lengths
        expected.append((raw.plain, rows, lengths, weights, pooling, precision is Precision.FP16, found))
    for name in ("native", "reference", "fbgemm"):
        out, unfound = request.run(backend_of(name), data.draw(st.sampled_from([1, 2, 4])))
        missing = [int(np.count_nonzero(~found)) for *_, found in expected]
        assert unfound == ([Unfound(n, 0) for n in missing] if any(missing) else None)
        assert out[0] == 0xEE
        for job, (plain, rows, lengths, weights, pooling, half, found) in enumerate(expected):
            vectors = backend_of(name).lookup(
                plain, rows, lengths, pooling=pooling, weights=weights, half=half
            )
            assert request.vectors(out, job) == vectors.tobytes()
            if request.places[job].found_at >= 0:
                assert request.found(out, job) == found.astype(int).tolist()


@pytest.mark.drawn(2)
def test_found_masks_and_counts_of_calls_that_threads_share(backend: CpuBackend) -> None:
    """Of a table with a default row, and of one that refuses ids: a byte for each id, and sums over all
    threads."""
    ids = np.arange(20_000, dtype=np.int64) * 31 - 7
    mask = np.arange(20_000) % 3 == 0
    raw = raw_table(ids, RowFormat.INT4, 64, 16, backfilled=mask)
    asked = np.random.default_rng(2).choice(ids, SHARED_IDS)
    some = asked.copy()
    some[::7] += 1
    rows, rows_of_some = raw.expected_rows(asked), raw.expected_rows(some)
    request = Request()
    request.add(raw.table, some, 20)
    request.add(raw.refusing(), asked, 20)
    request.add(raw.plain, rows, 20)
    older = mask[rows]
    is_missing = np.arange(SHARED_IDS) % 7 == 0
    bags = np.full(SHARED_IDS // 20, 20, np.int32)
    expected = [backend.lookup(raw.plain, of, bags).tobytes() for of in (rows_of_some, rows, rows)]
    for threads in (1, 2, 4):
        out, unfound = request.run(backend, threads)
        assert unfound == [
            Unfound(int(is_missing.sum()), int((older & ~is_missing).sum())),
            Unfound(0, int(older.sum())),
            Unfound(0, 0),
        ]
        assert request.found(out, 0) == (~is_missing).astype(int).tolist()
        assert request.found(out, 1) == request.found(out, 2) == [1] * SHARED_IDS
        assert [request.vectors(out, job) for job in range(3)] == expected


def test_backfilled_rows_of_a_table_of_row_numbers_are_counted(backend: CpuBackend) -> None:
    """Those from `own` on; the default row is not among them."""
    plain = table_of(RowFormat.INT8, 64, 11)
    request = Request()
    request.add(replace(plain, row_map=RowMap(10, 10, None, 0, 6)), np.array([0, 5, 6, 9, 10, -1, 9]), 7)
    out, unfound = request.run(backend)
    assert unfound == [Unfound(2, 3)]
    assert request.found(out, 0) == [1, 1, 1, 1, 0, 0, 1]


def test_a_missing_id_counts_in_a_mean(backend: CpuBackend) -> None:
    """Like any other row: a bag of one id that is there and one that is not is half of each one's row."""
    raw = raw_table(KINDS["random"], RowFormat.FP32, 20)
    there, default = raw.plain.packed[3].view(np.float32), raw.plain.packed[-1].view(np.float32)
    asked = np.array([list(raw.numbers)[3], 12_345])
    mean = backend.lookup(raw.table, asked, np.array([2], np.int32), pooling=Pooling.MEAN)
    np.testing.assert_allclose(
        mean[0], (there + default) / 2, rtol=2**-22
    )  # a sum and a product, each within 2^-24


# ---- ids that are refused ----


@pytest.mark.parametrize("position", [0, 1, 16, 39])
@pytest.mark.parametrize("kind", ["random", "none", "one"])
@pytest.mark.drawn(30)
def test_a_missing_id_is_refused(backend: CpuBackend, kind: str, position: int) -> None:
    """The error names its position, the id, and how many ids the table has."""
    raw = raw_table(KINDS[kind])
    asked = np.resize(KINDS[kind], 40) if len(KINDS[kind]) else np.zeros(0, np.int64)
    if not len(asked):
        asked, position = np.array([77]), 0
    asked[position] = 77
    with pytest.raises(
        BadIds, match=r"id 77 at position \d+ is not among the table's [\d,]+ ids; send ids that it has"
    ) as caught:
        backend.lookup(raw.refusing(), asked, pooling=Pooling.NONE)
    error = caught.value
    assert (error.problem, error.job, error.position, error.value, error.bound) == (
        Problem.MISSING, 0, position, 77, len(KINDS[kind]))  # fmt: skip


@pytest.mark.parametrize("position", [0, 2047, 2048, 17_000, SHARED_IDS - 1])
@pytest.mark.drawn(12)
def test_nothing_is_written_where_an_id_is_refused(backend: CpuBackend, position: int) -> None:
    """Not by the lookups before it, nor by those of tables that have a default row; the first of two such
    ids is named, by one thread and by several."""
    ids = np.arange(5000, dtype=np.int64) * 11
    raw = raw_table(ids, RowFormat.INT4, 64)
    asked = np.resize(ids, SHARED_IDS)
    asked[position] = asked[-1] = -5
    request = Request()
    request.add(raw.plain, np.arange(200), 20, is_found=False)
    request.add(raw.table, asked, 20, is_found=False)
    request.add(raw.refusing(), asked, 20, is_found=False)
    out = bytearray(b"\xee" * request.out_bytes)
    for threads in (1, 2, 4):
        with pytest.raises(BadIds) as caught:
            backend.planner(request.kinds, threads).plan(np.array(request.places, np.int64)).run(
                request.inputs, out
            )
        error = caught.value
        assert (error.problem, error.job, error.position, error.value) == (
            Problem.MISSING,
            2,
            position,
            -5,
        ), threads
        assert out == b"\xee" * request.out_bytes, threads


@pytest.mark.parametrize(
    ("lengths", "problem", "position"),
    [([5, -1, 6], Problem.LENGTH, 1), ([5, 6], Problem.SUM, 2), ([-1] * 3, Problem.LENGTH, 0)],
)
@pytest.mark.parametrize("is_refusing", [False, True])
def test_lengths_of_raw_ids_are_checked(
    backend: CpuBackend, is_refusing: bool, lengths: list[int], problem: Problem, position: int
) -> None:
    """Before ids are resolved, and like those of any other table."""
    raw = raw_table(KINDS["random"])
    with pytest.raises(BadIds) as caught:
        backend.lookup(
            raw.refusing() if is_refusing else raw.table, KINDS["random"][:10], np.array(lengths, np.int32)
        )
    assert (caught.value.problem, caught.value.position) == (problem, position)


@pytest.mark.parametrize("value", [-1, 200, 2**32 + 5, -(2**63), 2**63 - 1])
def test_row_numbers_with_a_default_row_are_never_outside(backend: CpuBackend, value: int) -> None:
    """A dense table with a policy: an id outside it reads the default row, and no other memory."""
    plain = table_of(RowFormat.INT8, 64, 201)
    table = replace(plain, row_map=RowMap(200, 200))
    found = backend.lookup(table, np.array([3, value]), pooling=Pooling.NONE)
    np.testing.assert_array_equal(found, backend.lookup(plain, np.array([3, 200]), pooling=Pooling.NONE))


def test_rows_of_raw_tables_are_gathered_by_their_numbers() -> None:
    """Slots that no id has and the default row too; a number beyond is refused with the table's rows, not
    with its ids."""
    raw = raw_table(KINDS["random"])
    rows = raw.table.rows
    assert rows > len(raw.numbers) + 1
    plan = gather([Lookup(raw.table, Pooling.NONE, 0, 2, 0)])
    out = bytearray(2 * raw.table.row_bytes)
    plan.run(np.array([3, rows - 1]).tobytes(), out)
    assert bytes(out) == raw.table.packed[[3, rows - 1]].tobytes()
    with pytest.raises(BadIds) as caught:
        plan.run(np.array([3, rows]).tobytes(), out)
    error = caught.value
    assert (error.problem, error.position, error.value, error.bound) == (Problem.ID, 1, rows, rows)


@pytest.mark.parametrize("found_at", [2**62, 1, 2**63 - 1])
def test_a_mask_that_does_not_fit_is_refused(found_at: int) -> None:
    """The native kernel writes no byte outside its outputs."""
    raw = raw_table(KINDS["random"])
    request = Request()
    request.add(raw.table, KINDS["random"][:10], 10, is_found=False)
    place = request.places[0]._replace(
        found_at=found_at + request.out_bytes - 10 if found_at == 1 else found_at
    )
    plan = choose("native").planner(request.kinds).plan(np.array([place], np.int64))
    with pytest.raises(ValueError, match=r"outputs \(found\).*do not lie in a buffer"):
        plan.run(request.inputs, bytearray(request.out_bytes))
