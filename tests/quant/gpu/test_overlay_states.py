"""States of one table on the GPU backend: they share the table and the levels of its overlays."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from overlays import KINDS, asked_of, dense, raw

from tableside.quant import Lookup, Pooling, QuantError, RowFormat

pytest.importorskip("triton")
from overlays_on_gpu import check_rows, new_backend, placed, vectors_of, without_layers

from tableside.quant.device.interpreter import InterpretedDevice
from tableside.quant.gpu.residence.layers import DeviceLayer, layer_bytes
from tableside.quant.gpu.residence.memory import InHost

pytestmark = pytest.mark.gpu


@pytest.mark.drawn(1)
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
@pytest.mark.drawn(1)
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


@pytest.mark.drawn(0.5)
def test_a_level_goes_with_the_last_state_that_has_it() -> None:
    made, backend = raw(), new_backend()
    base = backend.place("hbm", without_layers(made.table))
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
    base = backend.place("hbm", without_layers(made.table))
    lookups: Any = [Lookup(base, Pooling.NONE, 0, 3, 0)]
    assert backend.plan(lookups).layout.resolved == []
    over = backend.overlay(base, made.table)
    layout = backend.plan([Lookup(over, Pooling.NONE, 0, 3, 0)]).layout
    assert layout.resolved == [0] and layout.native.is_overlaid
    default = backend.place("hbm", without_layers(dense().table))
    layout = backend.plan([Lookup(default, Pooling.NONE, 0, 3, 0)]).layout
    assert layout.resolved == [0] and not layout.native.is_overlaid


def test_a_level_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that were there answer on."""
    made, backend = raw(), new_backend()
    base = backend.place("hbm", without_layers(made.table))

    def full(*size: Any, **how: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        with pytest.raises(QuantError, match=r"a delta of a table of [0-9,]+ bytes does not fit on"):
            backend.overlay(base, made.table)
    check_rows(backend, backend.overlay(base, made.table), made, asked_of(made, KINDS["random"]))
