"""Tables with overlays on the GPU backend: the oracle is a dictionary of rows, wherever the table's own
rows live."""

from dataclasses import replace

import numpy as np
import pytest
import tables
import torch
from indexed_tables import raw_table
from overlays import KINDS, asked_of, changed, dense, overlaid, raw
from rounding import expect
from tables import expected_of, table_of

from tableside.quant import BadIds, Lookup, LookupKind, Place, Pooling, Precision, QuantError, RowFormat
from tableside.quant.contract import Unfound
from tableside.quant.errors import Problem

pytest.importorskip("triton")
from overlays_on_gpu import check_rows, new_backend, placed, vectors_of

from tableside.quant.gpu.batch.batch import LookupResult
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.tensors.calls import TensorInput
from tableside.quant.gpu.tensors.tensors import TensorLookup

pytestmark = pytest.mark.gpu

PLACES = ["hbm", "stashable", "mapped", "cached", "split", "host"]
LAYOUTS = [
    (RowFormat.INT8, 64),
    (RowFormat.INT4, 24),
    (RowFormat.FP16, 32),
]  # the last has no room for ids in its rows


@pytest.mark.drawn(4)
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


@pytest.mark.parametrize("where", ["hbm", "stashable", "cached", "host"])
@pytest.mark.parametrize(("row_format", "dim"), [(RowFormat.INT8, 64), (RowFormat.INT2, 16)])
@pytest.mark.drawn(3)
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


@pytest.mark.parametrize("where", ["mapped", "split"])
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
    check_rows(backend, backend.place("hbm", made.table), made, asked_of(made, KINDS[kind]))


@pytest.mark.drawn(0.5)
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


@pytest.mark.drawn(0.5)
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
    plain = backend.place("hbm", table_of(RowFormat.INT8, 64))
    held = [backend.place("hbm", base.table), *(backend.place("hbm", state.table) for state in states)]
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
    assert [request.layout.native.is_overlaid for request, _ in requests] == [False, True, True]


@pytest.mark.drawn(0.5)
def test_a_refused_id_is_told() -> None:
    """One that an overlay deleted, from a batch whose other request is answered."""
    made, backend = raw(), new_backend()
    assert made.table.row_map is not None
    held = backend.place("hbm", replace(made.table, row_map=replace(made.table.row_map, default_row=None)))
    there = np.array(sorted(made.numbers))
    gone = next(i for i in KINDS["random"].tolist() if i not in made.numbers)
    plan = backend.plan([Lookup(held, Pooling.SUM, 0, there.size, 0, bags=1, bag_length=there.size)])
    wrong = there.copy()
    wrong[20] = gone
    right, refused = tables.run_batch(backend, [(plan, there.tobytes()), (plan, wrong.tobytes())])
    assert isinstance(right, np.ndarray) and isinstance(refused, BadIds)
    assert (refused.problem, refused.position, refused.value) == (Problem.MISSING, 20, gone)


@pytest.mark.parametrize("where", ["hbm", "cached", "split"])
@pytest.mark.drawn(1)
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


@pytest.mark.drawn(0.5)
def test_tensors() -> None:
    """Tensors of each feature, and packed ones; a feature without an overlay beside."""
    made, backend = raw(), new_backend()
    held, plain = placed(backend, made.table, "cached"), backend.place("hbm", table_of(RowFormat.INT8, 64))
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
    lookup = TensorLookup(
        backend, ["a"], [LookupKind(backend.place("hbm", made.table), Pooling.SUM)], reports
    )
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
