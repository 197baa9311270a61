"""The features of a version by number, which is the kind of their lookups in its planners."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Features:
    """Names and sizes of a version's features. The states of a version share them. tables: of each feature.
    numbers: by name. is_pooled, is_half, vector_bytes, row_bytes, dims, are_strings (its ids): [features]."""

    model: str
    version: int
    names: tuple[str, ...]
    tables: tuple[str, ...]
    numbers: dict[str, int]
    is_pooled: NDArray[np.bool_]
    is_half: NDArray[np.bool_]
    vector_bytes: Counts
    row_bytes: Counts
    dims: Counts
    are_strings: NDArray[np.bool_]
