"""A model whose features are asked for in the compact form, ids for them, and answers compared."""

from typing import Any

import numpy as np
from support import rows_of

from tableside.serving.client import Jagged

TABLES = {
    "user": rows_of(400, 8, 1),
    "item": rows_of(300, 8, 2),
    "place": rows_of(200, 4, 3),
    "word": rows_of(50, 16, 4),
}
FEATURES = {
    "clicked": {"table": "item", "pooling": "mean"},
    "user": {"table": "user"},
    "words": {"table": "word", "pooling": "none", "output": "fp16"},
    "near": {"table": "place"},
    "seen": {"table": "item", "pooling": "none", "output": "fp16"},
    "half": {"table": "user", "output": "fp16"},
}
ALL_POOLED = ("clicked", "user", "near")


def draw(
    rng: np.random.Generator, name: str, bags: int, weights: bool = False, dtype: type = np.int64
) -> Jagged:
    lengths = rng.integers(0, 5, bags, dtype=np.int32)
    ids = rng.integers(0, len(TABLES[FEATURES[name]["table"]]), int(lengths.sum())).astype(dtype)
    return Jagged(ids, lengths, rng.random(len(ids)).astype(np.float32) if weights else None)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same names in the same order, types, shapes and bits."""
    assert list(found) == list(expected)
    for name, vectors in expected.items():
        assert type(found[name]) is type(vectors)
        assert (found[name].dtype, found[name].shape) == (vectors.dtype, vectors.shape)
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(vectors))
