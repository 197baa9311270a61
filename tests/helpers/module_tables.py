"""The model `ads` of the modules' tests, in fp32 rows, so that results are exact."""

import numpy as np
from support import rows_of

ROWS, DIMS = 500, {"user": 16, "item": 8, "page": 24}
FEATURES = {
    "user_sum": {"table": "user", "pooling": "sum"},
    "item_mean": {"table": "item", "pooling": "mean"},
    "page_sum": {"table": "page", "pooling": "sum"},
    "user_ids": {"table": "user", "pooling": "none"},
    "item_ids": {"table": "item", "pooling": "none"},
}


def tables_of(seed: int = 0) -> dict[str, np.ndarray]:
    return {name: rows_of(ROWS, dim, seed + n) for n, (name, dim) in enumerate(DIMS.items())}
