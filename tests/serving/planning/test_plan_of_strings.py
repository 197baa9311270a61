"""`tableside plan` over columns of strings: as over those of the hashed ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from string_tables import hashes, publish_strings, texts
from support import rows_of

from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.serving.evaluation.data import DataError
from tableside.serving.planning.plan import Goals, plan

TEXTS = texts(500)


def planned(root: Path, folder: Path, name: str, **columns: Any) -> Any:
    pq.write_table(pa.table(columns), folder / "requests.parquet", row_group_size=100)
    segment = attach_state(Model(root, name), None, "full")
    return plan(segment, folder / "requests.parquet", Goals(most_rows=1000), batch_rows=50)


def test_strings_are_planned_as_their_hashes(root: Path, tmp_path: Path) -> None:
    """Lists and single ones, some without a row; integers are refused for them, and they for integers."""
    rng = np.random.default_rng(0)
    asked = [*TEXTS, "nobody"]
    lists = [[asked[i] for i in rng.integers(0, 501, 3)] for _ in range(1000)]
    single = [asked[i] for i in rng.integers(0, 501, 1000)]
    features = {"many": {"table": "t"}, "one": {"table": "t"}}
    for name, ids in (("demo", TEXTS), ("hashed", hashes(TEXTS))):
        publish_strings(tmp_path, root, {"t": (ids, rows_of(500, 8))}, name=name, features=features)
    as_numbers = {"many": [hashes(bag) for bag in lists], "one": hashes(single)}
    found = planned(root, tmp_path, "demo", many=lists, one=pa.array(single).dictionary_encode())
    expected = planned(root, tmp_path, "hashed", **as_numbers)
    assert (found.ids, found.without_row) == (expected.ids, expected.without_row)
    assert found.ids == 4000 and found.without_row
    np.testing.assert_array_equal(found.lru, expected.lru)
    with pytest.raises(DataError, match=r"holds list.*int64.*; expected ids \(strings\)"):
        planned(root, tmp_path, "demo", **as_numbers)
    with pytest.raises(DataError, match=r"expected ids \(int64\).*else load the table with ids = .string"):
        planned(root, tmp_path, "hashed", many=lists, one=single)
