"""Tables with overlays on the GPU backend: the oracle is a dictionary of rows, wherever the table's own
rows live."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tables
import torch
from indexed_tables import raw_table
from overlays import KINDS, Overlaid, asked_of, changed, dense, overlaid, raw
from reference import REFERENCE
from rounding import expect
from tables import expected_of, table_of

from tableside.quant import (
    BadIds,
    Lookup,
    LookupKind,
    Place,
    Pooling,
    Precision,
    QuantError,
    RowFormat,
    RowSource,
    Table,
)
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.contract import Unfound
from tableside.quant.errors import Problem
from tableside.quant.rows.overlay import Overlay

pytest.importorskip("triton")
from tableside.quant.device.interpreter import InterpretedDevice
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.batch import LookupResult
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.residence.layers import DeviceLayer, layer_bytes
from tableside.quant.gpu.residence.residence import InHost
from tableside.quant.gpu.residence.tables import DeviceTable
from tableside.quant.gpu.tensors.calls import TensorInput
from tableside.quant.gpu.tensors.tensors import TensorLookup

pytestmark = pytest.mark.gpu

PLACES = ["hbm", "stashable", "mapped", "cached", "split", "host"]
LAYOUTS = [
    (RowFormat.INT8, 64),
    (RowFormat.INT4, 24),
    (RowFormat.FP16, 32),
]  # the last has no room for ids in its rows


def new_backend() -> GpuBackend:
    backend = GpuBackend(tables.DEVICE, REFERENCE)
    backend.open_cache(60_000, 16, CacheSettings(page_bytes=1024))
    return backend


def placed(backend: GpuBackend, table: Table, where: str) -> DeviceTable:
    rows = None
    if not backend.device.reads_all_memory:
        rows = torch.empty(table.packed.size, dtype=torch.uint8, pin_memory=True)
        rows.numpy()[:] = table.packed.reshape(-1)
    match where:
        case "hbm" | "stashable":
            return backend.to_hbm(table, stashable=where == "stashable")
        case "mapped":
            return backend.map_host(table, rows)
        case "split":
            return backend.split(table, rows, 200)
        case "host":
            return backend.on_host(table)
    return backend.to_cache(table, rows)


def without_layers(table: Table, newest: int = 0) -> Table:
    """The table with the levels from number `newest` on, or none."""
    assert table.row_map is not None and table.row_map.overlay is not None
    levels = table.row_map.overlay.layers[newest:] if newest else ()
    row_map = replace(table.row_map, overlay=Overlay(levels) if levels else None)
    return replace(table, row_map=None if row_map.is_plain and not levels else row_map)


def vectors_of(backend: GpuBackend, table: RowSource, ids: np.ndarray) -> np.ndarray:
    return backend.lookup(table, ids, pooling=Pooling.NONE)


def check_rows(backend: GpuBackend, held: RowSource, made: Overlaid, asked: np.ndarray) -> None:
    np.testing.assert_array_equal(
        vectors_of(backend, held, asked), expected_of(made.plain, made.expected_rows(asked))
    )


@pytest.mark.drawn(8)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("row_format", "dim"), LAYOUTS, ids=lambda x: getattr(x, "label", x))
def test_raw_ids_of_every_layout_and_residence(where: str, row_format: RowFormat, dim: int) -> None:
    """Rows overwritten, inserted and deleted by two levels; a cache answers alike when it is cold and when
    it is warm."""
    made, backend = raw(row_format, dim), new_backend()
    backend.gather_from = 1
    held = placed(backend, made.table, where)
    for count in (400, 400, 3):
        check_rows(backend, held, made, asked_of(made, KINDS["random"], count))
    if where == "stashable":
        assert backend.stash() > 0
        check_rows(backend, held, made, asked_of(made, KINDS["random"]))


@pytest.mark.drawn(5)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("default", [True, False], ids=["default row", "refused"])
def test_row_numbers(where: str, default: bool) -> None:
    """A table without a row map of its own gets one with its overlay; that of the CPU refuses the same
    ids."""
    made, backend = dense(default=default), new_backend()
    held = placed(backend, made.table, where)
    check_rows(backend, held, made, asked_of(made, np.arange(300)))
    if not default:
        for wrong in (300, -1, -(2**63)):
            with pytest.raises(BadIds) as caught:
                vectors_of(backend, held, np.array([7, wrong]))
            error = caught.value
            assert (error.problem, error.position, error.value, error.bound) == (Problem.ID, 1, wrong, 300)


@pytest.mark.parametrize("where", ["hbm", "stashable", "host"])
@pytest.mark.parametrize(("row_format", "dim"), [(RowFormat.INT8, 64), (RowFormat.INT2, 16)])
def test_rows_without_padding_are_padded_as_they_are_copied(
    where: str, row_format: RowFormat, dim: int
) -> None:
    """Those of the table and of its layers, again when a stashed table comes back."""
    made, backend = dense(row_format, dim, alignment=4), new_backend()
    held = placed(backend, made.table, where)
    check_rows(backend, held, made, asked_of(made, np.arange(300)))
    if where == "stashable":
        assert backend.stash() > 0
        check_rows(backend, held, made, asked_of(made, np.arange(300)))


@pytest.mark.parametrize("where", ["mapped", "cached", "split"])
def test_rows_without_padding_are_not_read_in_host_memory(where: str) -> None:
    with pytest.raises(QuantError, match=r"rows of 68 bytes in host memory; .* row_alignment = 16"):
        placed(new_backend(), tables.table_of(RowFormat.INT8, 64, alignment=4), where)


@pytest.mark.parametrize("kind", ["none", "extremes", "one bucket"])
def test_raw_ids_of_other_kinds(kind: str) -> None:
    """An empty table among them, over which all ids are an overlay's."""
    base, new = raw_table(KINDS[kind]), np.setdiff1d(np.arange(50), KINDS[kind])
    made = overlaid(
        base.table, base.plain, base.numbers, [changed(KINDS[kind], 1), (new, np.zeros(new.size, np.bool_))]
    )
    backend = new_backend()
    check_rows(backend, backend.to_hbm(made.table), made, asked_of(made, KINDS[kind]))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("where", ["hbm", "cached", "split"])
def test_bags_weights_and_precisions(where: str) -> None:
    made, backend = raw(), new_backend()
    held = placed(backend, made.table, where)
    asked = asked_of(made, KINDS["random"], 90)
    rows, lengths = made.expected_rows(asked), np.array([30, 0, 59, 1], np.int32)
    weights = np.random.default_rng(0).standard_normal(90).astype(np.float32)
    for pooling, weighted, half in (
        (Pooling.SUM, None, False),
        (Pooling.MEAN, weights, True),
        (Pooling.SUM, weights, False),
    ):
        found = backend.lookup(held, asked, lengths, pooling=pooling, weights=weighted, half=half)
        precision = Precision.FP16 if half else Precision.FP32
        expect(made.plain, rows, lengths, pooling=pooling, weights=weighted, precision=precision).check(found)


def test_rows_of_an_overlay_are_neither_in_the_cache_nor_counted_by_it() -> None:
    """A cache holds and counts the table's own rows alone."""
    made, backend = raw(), new_backend()
    held = placed(backend, made.table, "cached")
    assert made.table.row_map is not None and backend.cache is not None
    there = np.array(sorted(made.numbers))
    rows = made.table.row_map.find(there)
    own = (rows >= 0) & (rows < made.table.rows)
    for _ in range(2):
        check_rows(backend, held, made, there)
    (counted,) = backend.cache.statistics(wait=True).tables.values()
    assert counted.ids == 2 * own.sum() and counted.hits <= own.sum()
    assert set(held.residence.hot().tolist()) <= set(rows[own].tolist())


def test_found_masks_and_counts_of_states_in_one_batch() -> None:
    """The state without changes, one with and the newest answer beside a table that has none; each request
    by its own state."""
    ids = KINDS["random"]
    base = raw_table(ids, backfilled=np.arange(ids.size) % 2 == 0)
    changes = [changed(ids, 1), changed(ids, 2, 5)]
    states = [overlaid(base.table, base.plain, base.numbers, changes[:n]) for n in (1, 2)]
    backend = new_backend()
    plain = backend.to_hbm(table_of(RowFormat.INT8, 64))
    held = [backend.to_hbm(base.table), *(backend.to_hbm(state.table) for state in states)]
    dictionaries = [base.numbers, *(state.numbers for state in states)]
    requests, wanted = [], []
    for n, table in enumerate(held):
        asked = np.random.default_rng(n).choice(np.concatenate([ids, ids ^ 1]), 50)
        lookups = [
            Lookup(plain, Pooling.NONE, 0, 2, 0),
            Lookup(table, Pooling.NONE, 16, 50, 512, found_at=512 + 50 * 256),
        ]
        requests.append((backend.plan(lookups), np.array([3, 4]).tobytes() + asked.tobytes()))
        found = np.array([i in dictionaries[n] for i in asked.tolist()])
        old = [base.numbers.get(i) == dictionaries[n].get(i) is not None for i in asked.tolist()]
        backfilled = sum(o and base.numbers[i] % 2 == 0 for o, i in zip(old, asked.tolist(), strict=True))
        wanted.append((found, Unfound(int((~found).sum()), backfilled)))
    for result, (found, unfound) in zip(backend.batches.run(requests)[0], wanted, strict=True):
        assert isinstance(result, LookupResult) and result.unfound == [Unfound(0, 0), unfound]
        np.testing.assert_array_equal(result.outputs[512 + 50 * 256 :].astype(bool), found)
    assert [request.layout.resolved[0].is_overlaid for request, _ in requests] == [False, True, True]


def test_a_refused_id_is_told() -> None:
    """One that an overlay deleted, from a batch whose other request is answered."""
    made, backend = raw(), new_backend()
    assert made.table.row_map is not None
    held = backend.to_hbm(replace(made.table, row_map=replace(made.table.row_map, default_row=None)))
    there = np.array(sorted(made.numbers))
    gone = next(i for i in KINDS["random"].tolist() if i not in made.numbers)
    plan = backend.plan([Lookup(held, Pooling.SUM, 0, there.size, 0, bags=1, bag_length=there.size)])
    wrong = there.copy()
    wrong[20] = gone
    right, refused = tables.run_batch(backend, [(plan, there.tobytes()), (plan, wrong.tobytes())])
    assert isinstance(right, np.ndarray) and isinstance(refused, BadIds)
    assert (refused.problem, refused.position, refused.value) == (Problem.MISSING, 20, gone)


@pytest.mark.parametrize("where", ["hbm", "cached", "split"])
def test_a_planner_gives_what_plans_give(where: str) -> None:
    """Through the C routine."""
    made, backend = raw(), new_backend()
    held = placed(backend, made.table, where)
    asked = asked_of(made, KINDS["random"], 40)
    places = np.array([Place(0, 0, 40, -1, 4, 10, -1, 0), Place(1, 0, 40, -1, 0, 0, -1, 2560)], np.int64)
    planner = backend.planner([LookupKind(held, Pooling.SUM), LookupKind(held, Pooling.NONE)])
    out = np.zeros(2560 + 40 * 256, np.uint8)
    unfound = planner.plan(places.tobytes()).run(asked.tobytes(), out)
    rows, vectors = made.expected_rows(asked), out.view(np.float32).reshape(-1, 64)
    expect(made.plain, rows, np.full(10, 4, np.int32), pooling=Pooling.SUM).check(vectors[:10])
    np.testing.assert_array_equal(vectors[10:], expected_of(made.plain, rows))
    assert unfound == [Unfound(int((~made.expected_found(asked)).sum()), 0)] * 2


def test_tensors() -> None:
    """Tensors of each feature, and packed ones; a feature without an overlay beside."""
    made, backend = raw(), new_backend()
    held, plain = placed(backend, made.table, "cached"), backend.to_hbm(table_of(RowFormat.INT8, 64))
    asked = asked_of(made, KINDS["random"], 12)
    rows, lengths = made.expected_rows(asked), np.array([4, 8], np.int32)
    expected = expect(made.plain, rows, lengths, pooling=Pooling.SUM)
    lookup = TensorLookup(
        backend,
        ["a", "b"],
        [LookupKind(held, Pooling.SUM), LookupKind(plain, Pooling.SUM)],
        reports := Reports(backend.launcher),
    )
    ids, ends, one = (torch.tensor(x, device=backend.device.torch_device) for x in (asked, [0, 4], [3]))
    each = lookup(lookup.stage_each([TensorInput(ids, ends, 0, 2, None), TensorInput(one, None, 1, 1, None)]))
    expected.check(each[:2].cpu().numpy())
    together = torch.cat([ids, one, one])
    packed = lookup(
        lookup.stage_packed(
            together, torch.tensor([0, 4, 12, 13, 14], device=backend.device.torch_device), 2, (0, 1), None
        )
    )
    expected.check(packed[:, :64].cpu().numpy())
    assert reports.take() is None
    assert lookup.unfound.tolist() == [[2 * int((~made.expected_found(asked)).sum()), 0], [0, 0]]


def test_a_refused_id_of_a_tensor_is_told() -> None:
    """As of a table whose ids are row numbers, also where it has an overlay."""
    made, backend = dense(default=False), new_backend()
    reports = Reports(backend.launcher)
    lookup = TensorLookup(backend, ["a"], [LookupKind(backend.to_hbm(made.table), Pooling.SUM)], reports)
    ids = torch.tensor([5, 300], device=backend.device.torch_device)
    found = lookup(lookup.stage_each([TensorInput(ids, None, 1, 2, None)])).view(2, 64).cpu().numpy()
    np.testing.assert_array_equal(found[0], expected_of(made.plain, made.expected_rows(np.array([5])))[0])
    reports.wait()
    wrong = reports.take()
    assert wrong is not None and wrong.cause is not None
    assert (wrong.cause.problem, wrong.cause.position, wrong.cause.value, wrong.cause.bound) == (
        Problem.ID,
        1,
        300,
        300,
    )


@pytest.mark.drawn(3)
@pytest.mark.parametrize("where", ["hbm", "cached", "split", "mapped", "host"])
def test_states_share_the_table_and_the_layers(where: str) -> None:
    """A state that adds a level copies that one alone, and finds what the cache held; the states before it
    answer as ever."""
    made, backend = raw(), new_backend()
    base = placed(backend, without_layers(made.table), where)
    older, table = without_layers(made.table, 1), made.table
    first = backend.overlay(base, older)
    vectors = [vectors_of(backend, held, np.array(sorted(made.numbers))) for held in (base, first)]
    hot = base.residence.hot()
    before = backend.overlay_bytes(base, table)
    second = backend.overlay(base, table)
    check_rows(backend, second, made, asked_of(made, KINDS["random"]))
    if where != "host":
        assert table.row_map is not None and table.row_map.overlay is not None
        assert before == layer_bytes(table.row_map.overlay.layers[0]) == second.layers[0].bytes
        assert first.residence is second.residence and second.layers[1:] == first.layers
        assert backend.overlay_bytes(base, table) == 0
    assert set(hot.tolist()) <= set(second.residence.hot().tolist()) and (hot.size > 0) == (where == "cached")
    for held, expected in zip((base, first), vectors, strict=True):
        np.testing.assert_array_equal(vectors_of(backend, held, np.array(sorted(made.numbers))), expected)
    assert not base.is_overlaid and backend.overlay(base, without_layers(table)).layers == ()


@pytest.mark.parametrize("in_host", [InHost.SOME, InHost.ALL])
def test_a_level_in_host_memory(in_host: InHost) -> None:
    """Its rows, or all of it, take no HBM; states share such a level too."""
    made, backend = raw(), new_backend()
    base = placed(backend, without_layers(made.table), "cached")
    held = backend.overlay(base, made.table, in_host=in_host)
    check_rows(backend, held, made, asked_of(made, KINDS["random"]))
    again = backend.overlay(base, made.table)
    assert again.layers == held.layers and all(level.in_host is in_host for level in held.layers)
    assert made.table.row_map is not None and made.table.row_map.overlay is not None
    for level, kept in zip(held.layers, made.table.row_map.overlay.layers, strict=True):
        rows = (kept.index.slots + 1) * made.table.row_bytes
        assert (
            level.bytes
            == layer_bytes(kept, in_host)
            == (0 if in_host is InHost.ALL else layer_bytes(kept) - rows)
        )


def test_a_level_goes_with_the_last_state_that_has_it() -> None:
    made, backend = raw(), new_backend()
    base = backend.to_hbm(without_layers(made.table))
    first, second = backend.overlay(base, without_layers(made.table, 1)), backend.overlay(base, made.table)
    older, newer = weakref.ref(second.layers[1]), weakref.ref(second.layers[0])
    del second
    gc.collect()
    assert newer() is None and older() is not None
    del first
    gc.collect()
    assert older() is None and backend.overlay_bytes(base, made.table) > 0


@pytest.mark.parametrize("is_above", [True, False], ids=["above", "below"])
@pytest.mark.parametrize("dim", [64, 100])  # rows of 80 bytes and of 112
def test_numbers_lead_to_the_rows_of_a_level(is_above: bool, dim: int) -> None:
    """They are negative, and never -1, wherever table and level lie."""
    made = raw(RowFormat.INT8, dim)
    assert made.table.row_map is not None and made.table.row_map.overlay is not None
    level, row_bytes = made.table.row_map.overlay.layers[0], made.table.row_bytes
    for table_at in (16 if is_above else 2**47, made.table.address):
        held = DeviceLayer(level, table_at, InterpretedDevice())
        for slot in (0, level.index.slots - 1):
            number = held.native.first_row + slot
            assert -(2**63) <= number < -(2**62)
            at = (table_at + number * row_bytes) % 2**64 - held._rows.data_ptr()
            np.testing.assert_array_equal(held._rows[at : at + row_bytes].numpy(), level.packed[slot])


def test_nothing_more_is_launched_without_overlays() -> None:
    """A table's state without one, and a batch of such, take the kernels that they took before there were
    any."""
    made, backend = dense(default=False), new_backend()
    base = backend.to_hbm(without_layers(made.table))
    lookups: Any = [Lookup(base, Pooling.NONE, 0, 3, 0)]
    assert backend.plan(lookups).layout.resolved == ()
    over = backend.overlay(base, made.table)
    (resolved,) = backend.plan([Lookup(over, Pooling.NONE, 0, 3, 0)]).layout.resolved
    assert resolved.is_overlaid
    default = backend.to_hbm(without_layers(dense().table))
    (resolved,) = backend.plan([Lookup(default, Pooling.NONE, 0, 3, 0)]).layout.resolved
    assert not resolved.is_overlaid


def test_a_level_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that were there answer on."""
    made, backend = raw(), new_backend()
    base = backend.to_hbm(without_layers(made.table))

    def full(*size: Any, **how: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        with pytest.raises(QuantError, match=r"a delta of a table of [0-9,]+ bytes does not fit on"):
            backend.overlay(base, made.table)
    check_rows(backend, backend.overlay(base, made.table), made, asked_of(made, KINDS["random"]))
