"""Tables of raw ids in Parquet, written by pyarrow."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from keyed_tables import ids_of
from support import rows_of

DIM = 6
IDS, VALUES = ids_of(57), rows_of(57, DIM)


def fixed(values: np.ndarray) -> Any:
    """A column of fixed-size lists."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def lists(values: np.ndarray) -> Any:
    """A column of lists."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))


def write(path: Path, row_group: int = 20, **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group)
    return path
