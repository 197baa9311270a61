"""What every backend checks of a lookup's arrays before it reads them."""

from typing import Any

import numpy as np
import pytest
from tables import table_of

from tableside.quant import Pooling, QuantError, RowFormat, choose

pytestmark = pytest.mark.quick
IDS, LENGTHS = np.array([1, 2, 3], np.int64), np.array([2, 1], np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": IDS.astype(np.int32)}, r"ids are int32 \[3\]; expected int64 \[n\]"),
        ({"ids": IDS.reshape(1, 3)}, r"ids are int64 \[1, 3\]"),
        ({"lengths": None}, r"lengths are None; expected int32 \[bags\] for pooling sum"),
        ({"lengths": LENGTHS.astype(np.int64)}, r"lengths are int64 \[2\]"),
        ({"lengths": LENGTHS.reshape(2, 1)}, r"lengths are int32 \[2, 1\]"),
        ({"weights": np.ones(3)}, r"weights are float64 \[3\]; expected float32 \[3\]"),
        ({"weights": np.ones(2, np.float32)}, r"weights are float32 \[2\]"),
        ({"pooling": Pooling.NONE}, "an unpooled lookup takes neither lengths nor weights"),
        (
            {"pooling": Pooling.NONE, "lengths": None, "weights": np.ones(3, np.float32)},
            "an unpooled lookup takes neither lengths nor weights",
        ),
    ],
)
def test_arrays_of_other_types_or_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {"ids": IDS, "lengths": LENGTHS, "pooling": Pooling.SUM, "weights": None, **changes}
    table = table_of(RowFormat.INT8, 64, rows=5)
    with pytest.raises(QuantError, match=message):
        choose("native").lookup(table, given.pop("ids"), given.pop("lengths"), **given)
