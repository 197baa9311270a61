"""Tables of raw ids in shared memory for benchmarks, loaded as a user loads them, from an npz file of ids and vectors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from tableside.loader.load import LoadSettings, load
from tableside.loader.model import parse_model
from tableside.loader.segment import Segment
from tableside.loader.versions import Model

_ROWS_AT_ONCE = 1 << 18


def distinct_ids(count: int, seed: int) -> NDArray[np.int64]:
    """Ids that look random and are different: a bijection of 0, 1, …"""
    ids = np.arange(count, dtype=np.uint64) + np.uint64(seed << 40)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        ids ^= ids >> np.uint64(shift)
        ids *= np.uint64(factor)
    return (ids ^ (ids >> np.uint64(33))).view(np.int64)


def raw_table_in_shm(root: Path, folder: Path, name: str, ids: Sequence[NDArray[np.int64]], dim: int) -> Segment:
    """Publishes int8 tables t00, t01, … of these ids as model `name` under `root`. An id without a row yields zeros.

    folder: on a disk, for the arrays, fp16 [ids, dim] each, which go when they are loaded.
    """
    pool = np.random.default_rng(0).standard_normal((_ROWS_AT_ONCE + 4096, dim)).astype(np.float16)
    checkpoint, tables = folder / name, {}
    checkpoint.mkdir(parents=True)
    arrays: dict[str, Any] = {}
    for n, of_table in enumerate(ids):
        table, path = f"t{n:02}", checkpoint / f"t{n:02}.npy"
        weights = open_memmap(path, "w+", np.float16, (of_table.size, dim))
        for at in range(0, of_table.size, _ROWS_AT_ONCE):
            shift = (at * 37 + n) % 4096
            weights[at : at + _ROWS_AT_ONCE] = pool[shift : shift + min(_ROWS_AT_ONCE, of_table.size - at)]
        arrays |= {f"{table}.ids": of_table, f"{table}.weight": weights}
        tables[table] = {
            "key": f"{table}.weight",
            "row_format": "int8",
            "ids": "raw",
            "id_key": f"{table}.ids",
            "missing": "zero",
        }
    np.savez(checkpoint / "tables.npz", **arrays)
    spec = {"name": name, "checkpoint": "tables.npz", "tables": tables, "features": {}}
    load(parse_model(spec, checkpoint), root, LoadSettings())
    for path in checkpoint.iterdir():
        path.unlink()
    return Model(root, name).attach(verify="header")
