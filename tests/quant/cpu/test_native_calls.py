"""How the native kernel runs a call: its checks, its parts on several threads, and what it prefetches; no
result depends on it"""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from fetched_tables import fetched_table
from tables import table_of

from tableside.quant import BadIds, Lookup, LookupKind, Pooling, RowFormat, choose
from tableside.quant.cpu import _native, native
from tableside.quant.cpu.native import gather

SHARED_BYTES = 2 << 20  # _execute.h: a call with fewer bytes is not shared


@pytest.fixture(params=sorted(_native.prefetches()))
def prefetch(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.prefetches()[0]
    _native.prefetch(request.param)
    yield request.param
    _native.prefetch(before)


def request_of(seed: int, jobs: int, bags: int, longest: int) -> tuple[list[Lookup], np.ndarray, int]:
    """Lookups of all formats and poolings, with bags of 0 to `longest` ids; their inputs; the bytes of
    their vectors."""
    rng = np.random.default_rng(seed)
    lookups, parts, at, out_at = [], [], 0, 0
    for n in range(jobs):
        table = table_of(list(RowFormat)[n % len(RowFormat)], (64, 20, 128)[n % 3], rows=997)
        pooling = list(Pooling)[n % 3]
        lengths = rng.integers(0, longest + 1, bags).astype(np.int32)
        if n % 4 == 1:
            lengths[:] = longest
        lengths[n % bags] = (
            40 * longest
        )  # a bag longer than rows are prefetched ahead, and empty ones at an end
        lengths[-3:] = 0
        ids = int(lengths.sum())
        fixed = n % 8 == 5
        if fixed:
            lengths[:] = longest
            ids = bags * longest
        arrays = [rng.integers(0, table.rows, ids), lengths, rng.standard_normal(ids).astype(np.float32)]
        starts = []
        for array in arrays:
            starts.append(at)
            parts.append(array.tobytes())
            at += len(parts[-1])
        weighted = pooling is not Pooling.NONE and n % 5 < 2
        lookup = Lookup(
            table,
            pooling,
            ids_at=starts[0],
            ids=ids,
            out_at=out_at,
            bags=bags,
            lengths_at=None if fixed else starts[1],
            bag_length=longest,
            weights_at=starts[2] if weighted else None,
        )
        lookups.append(lookup)
        out_at += lookup.outputs * lookup.vector_bytes
    return lookups, np.frombuffer(b"".join(parts), np.uint8), out_at


@pytest.mark.parametrize("threads", [2, 3, 8, 64])
@pytest.mark.parametrize(
    ("jobs", "bags", "longest"), [(1, 9000, 20), (36, 40, 20), (36, 4, 200), (7, 900, 5)]
)
@pytest.mark.drawn(4)
def test_parts_on_several_threads_give_what_one_thread_gives(
    jobs: int, bags: int, longest: int, threads: int
) -> None:
    """A call is cut between bags, anywhere in its jobs; each part has its own ids, lengths, weights and
    vectors. Bit for bit."""
    lookups, inputs, out_bytes = request_of(jobs, jobs, bags, longest)
    read = sum(lookup.ids * lookup.table.row_bytes for lookup in lookups)
    assert read > SHARED_BYTES, "the call is too small to be cut"
    backend = choose("native")
    one, several = np.full(out_bytes, 0xEE, np.uint8), np.full(out_bytes, 0xEE, np.uint8)
    backend.plan(lookups).run(inputs, one)
    backend.plan(lookups, threads=threads).run(inputs, several)
    np.testing.assert_array_equal(several, one)


def test_a_gather_in_parts_copies_every_row(prefetch: str) -> None:
    """Rows of several tables, copied as they are packed by three threads."""
    rng = np.random.default_rng(3)
    tables = [table_of(RowFormat.INT8, 64, rows=500), table_of(RowFormat.INT4, 256, rows=300)]
    ids = [rng.integers(0, t.rows, 20_000) for t in tables]
    lookups = [
        Lookup(tables[0], Pooling.SUM, 0, 20_000, 0),
        Lookup(tables[1], Pooling.SUM, 160_000, 20_000, 20_000 * tables[0].row_bytes),
    ]
    out = np.zeros(20_000 * sum(t.row_bytes for t in tables), np.uint8)
    gather(lookups, threads=3).run(np.concatenate(ids), out)
    expected = np.concatenate([t.packed[i].reshape(-1) for t, i in zip(tables, ids, strict=True)])
    np.testing.assert_array_equal(out, expected)


def test_a_plan_of_many_small_lookups_gives_what_each_gives(prefetch: str) -> None:
    """Rows are prefetched over lookups, some of which have no ids, into either cache; the sums are those
    of single lookups."""
    rng = np.random.default_rng(4)
    tables = [table_of(f, dim, rows=200) for f in RowFormat for dim in (64, 20)]
    counts = [0, 3, 1, 0, 70, 2, 0, 5, 200, 1, 1, 0, 4, 0, 1, 90, 2, 1]
    lookups, ids, at, out_at = [], [], 0, 0
    for table, count in zip(tables, counts, strict=True):
        ids.append(rng.integers(0, table.rows, count))
        lookups.append(Lookup(table, Pooling.SUM, at, count, out_at, bags=1, bag_length=count))
        at, out_at = at + 8 * count, out_at + 4 * table.dim
    out = np.full(out_at, 0xEE, np.uint8)
    backend = choose("native")
    backend.plan(lookups).run(np.concatenate(ids), out)
    for lookup, table, its in zip(lookups, tables, ids, strict=True):
        expected = backend.lookup(table, its, np.array([its.size], np.int32))
        found = out[lookup.out_at : lookup.out_at + 4 * table.dim].view(np.float32)
        np.testing.assert_array_equal(found, expected[0])


@pytest.mark.parametrize("bad", [-1, -(2**63), 1000, 2**31, 2**32, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 30])
def test_every_id_that_is_not_a_row_is_named(bad: int, position: int) -> None:
    """Below 0 and from `rows` on, at any place of the checked vectors; the last row is one."""
    table = table_of(RowFormat.INT8, 64, rows=1000)
    ids = np.full(31, 999)
    out = choose("native").lookup(table, ids, np.array([31], np.int32))
    ids[position] = bad
    with pytest.raises(BadIds) as found:
        choose("native").lookup(table, ids, np.array([31], np.int32), out=out)
    assert (found.value.position, found.value.value) == (position, bad)


def test_a_way_to_prefetch_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch 'L3': there is none"):
        _native.prefetch("L3")


@pytest.mark.parametrize(("dim", "rows"), [(8, 3), (20, 7), (64, 5000), (256, 999)])
@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
@pytest.mark.drawn(18)
def test_prefetches_are_measured_on_rows_of_any_kind(row_format: RowFormat, dim: int, rows: int) -> None:
    """Nothing but the table is read, which a run under AddressSanitizer shows."""
    table = table_of(row_format, dim, rows=rows)
    times = _native.measure_prefetches(table.address, table.rows, table.row_bytes, table.dim, row_format)
    assert set(times) == set(_native.prefetches())
    assert all(t > 0 for t in times.values())


@pytest.mark.parametrize(
    "of", [(0, 80, 64, 2), (5, 0, 64, 2), (5, 80, 0, 2), (5, 80, 64, -1), (5, 80, 64, 9), (5, 80, 48, 7)]
)
def test_prefetches_are_measured_on_a_table_alone(of: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no table"):
        _native.measure_prefetches(4096, *of)


def test_the_way_that_takes_a_twentieth_less_time_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the largest table, and again only on one that is twice as large; never on one that is fetched, since
    its random rows would be read from a disk."""
    measured: list[int] = []
    times = {"L2, then L1": 1.0, "L2": 0.96, "L1": 2.0}

    def measure(address: int, rows: int, *of: int) -> dict[str, float]:
        measured.append(rows)
        return times

    before = _native.prefetches()[0]
    monkeypatch.setattr(native, "_MEASURED_FROM", 1000)
    monkeypatch.setattr(native, "_measured", 0)
    monkeypatch.setattr(_native, "measure_prefetches", measure)
    try:
        _native.prefetch("L2, then L1")
        plan(8, 100)
        assert (measured, _native.prefetches()[0]) == ([100], "L2, then L1")
        times["L2"] = 0.94
        plan(199)
        assert (measured, _native.prefetches()[0]) == ([100], "L2, then L1")
        plan(20, 200)
        assert (measured, _native.prefetches()[0]) == ([100, 200], "L2")
        fetched = fetched_table(table_of(RowFormat.INT8, 64, rows=900))
        choose("native").planner([LookupKind(fetched, Pooling.SUM)])
        assert measured == [100, 200]
    finally:
        _native.prefetch(before)


def plan(*rows: int) -> None:
    """A planner over tables of so many rows of 80 bytes."""
    tables = [table_of(RowFormat.INT8, 64, rows=n) for n in rows]
    choose("native").planner([LookupKind(t, Pooling.SUM) for t in tables])


_HELPERS = """
import os, numpy as np
from tableside.quant import RowFormat, Source, Table, choose
backend = choose("native")
packed = np.zeros((1000, 80), np.uint8)
table = Table(packed, RowFormat.INT8, 64)
def call(bags):
    backend.lookup(table, np.zeros(bags * 20, np.int64), np.full(bags, 20, np.int32), threads=4)
    return len(os.listdir("/proc/self/task"))
before = len(os.listdir("/proc/self/task"))
print(call(256) - before, call(4096) - before)
"""


def test_a_small_call_takes_no_other_thread() -> None:
    """256 bags of 20 ids run on the caller's thread, whatever `threads` says, as waking another takes as
    long; 4096 are shared"""
    done = subprocess.run([sys.executable, "-c", _HELPERS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "3"]
