"""Tables of raw ids on the GPU backend: the answer is the same wherever rows and ids lie."""

from typing import Any

import numpy as np
import pytest
from raw_on_gpu import ARRAY, PADDED, Case, asked, backend_with_cache, made, placed
from tables import expected_of, table_of

from tableside.quant import Lookup, Pooling, RowFormat, choose
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.rows.ids import DirectoryField, pilots_for

pytestmark = pytest.mark.gpu

DIRECTORY_BYTES = 8 * len(DirectoryField._fields)

needs_interpreter = pytest.mark.skipif(
    "__import__('tables').DEVICE != 'interpreter'", reason="reads host memory that is not registered"
)

PLACES = ["hbm", "stashable", "mapped", "split", "cached"]
NOT_IN_HBM = [
    pytest.param(f"{place}, {what} in host", marks=needs_interpreter)
    for place in ("mapped", "split", "cached")
    for what in ("ids", "index")
]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("case", [PADDED, ARRAY], ids=["in padding", "in an array"])
@pytest.mark.parametrize("how", [*PLACES, *NOT_IN_HBM])
def test_wherever_rows_and_ids_lie_the_answer_is_the_same(how: str, case: Case) -> None:
    """More ids than would be gathered of a table without a row map; a cache answers alike when it is cold
    and when it is warm."""
    table, known = made(case)
    backend = backend_with_cache()
    backend.gather_from = 1
    held = placed(backend, table, how)
    for seed in (0, 1, 0):
        ids = asked(known, True, seed=seed)
        np.testing.assert_array_equal(
            backend.lookup(held, ids, pooling=Pooling.NONE), expected_of(known.twin, known.twins(ids))
        )
    if how == "stashable":
        assert backend.stash() > 0
        np.testing.assert_array_equal(
            backend.lookup(held, ids, pooling=Pooling.NONE), expected_of(known.twin, known.twins(ids))
        )


@pytest.mark.parametrize(
    ("case", "how", "copies_ids"),
    [(PADDED, "hbm", False), (ARRAY, "hbm", True), (PADDED, "mapped", True), (PADDED, "mapped, ids in host",
     False),
     (ARRAY, "cached", True), (ARRAY, "cached, ids in host", False)],
)  # fmt: skip
@needs_interpreter
def test_ids_are_copied_only_where_no_rows_in_hbm_hold_them(case: Case, how: str, copies_ids: bool) -> None:
    """An entry for each bucket, pilots and bits always are."""
    table, _ = made(case)
    held: Any = placed(backend_with_cache(), table, how)
    assert table.row_map is not None
    index = table.row_map.index
    assert index is not None
    least = DIRECTORY_BYTES * index.buckets + pilots_for(index.slots, index.buckets) + -(-index.slots // 8)
    assert held.device_map.bytes == least + 8 * index.slots * copies_ids


@needs_interpreter
def test_rows_of_raw_ids_are_not_gathered() -> None:
    """The CPU gathers by row numbers, which the device alone makes; rows of other tables in the request
    are gathered as ever."""
    table, _ = made(PADDED)
    backend = GpuBackend("interpreter", choose(), gather_from=5)
    raw, plain = (
        backend.place("zero_copy", table, None),
        backend.place("zero_copy", table_of(RowFormat.INT8, 64), None),
    )

    def gathered(raw_ids: int, plain_ids: int) -> int:
        lookups = [
            Lookup(raw, Pooling.NONE, 0, raw_ids, 0),
            Lookup(plain, Pooling.NONE, 0, plain_ids, 256 * raw_ids),
        ]
        return backend.plan(lookups).layout.rows_bytes

    assert gathered(10, 4) == 0
    assert gathered(10, 5) == 5 * table.row_bytes
