"""Tables of raw ids in shared memory for benchmarks, loaded as a user loads them, from an npz file of ids
and vectors."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.lib.format import dtype_to_descr, write_array_header_1_0
from numpy.typing import NDArray

from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model

_ROWS_AT_ONCE = 1 << 18


def distinct_ids(count: int, seed: int) -> NDArray[np.int64]:
    """Ids that look random and are different: a bijection of 0, 1, …"""
    ids = np.arange(count, dtype=np.uint64) + np.uint64(seed << 40)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        ids ^= ids >> np.uint64(shift)
        ids *= np.uint64(factor)
    return (ids ^ (ids >> np.uint64(33))).view(np.int64)


def raw_table_in_shm(
    root: Path, folder: Path, name: str, ids: Sequence[NDArray[np.int64]], dim: int
) -> Segment:
    """Publishes int8 tables t00, t01, … of these ids as model `name` under `root`. An id without a row yields
    zeros.

    folder: for the npz file, fp16 [ids, dim] and the ids, which goes when it is loaded.
    """
    pool = np.random.default_rng(0).standard_normal((_ROWS_AT_ONCE + 4096, dim)).astype(np.float16)
    path, tables = folder / f"{name}.npz", {}
    with ZipFile(path, "w") as archive:
        for n, of_table in enumerate(ids):
            table = f"t{n:02}"
            starts = range(0, of_table.size, _ROWS_AT_ONCE)
            shifts = ((at * 37 + n) % 4096 for at in starts)
            rows = (
                pool[at : at + min(_ROWS_AT_ONCE, of_table.size - start)]
                for start, at in zip(starts, shifts, strict=True)
            )
            _write(archive, f"{table}.ids", of_table.shape, of_table.dtype, [of_table])
            _write(archive, f"{table}.weight", (of_table.size, dim), pool.dtype, rows)
            how = {"row_format": "int8", "ids": "raw", "id_key": f"{table}.ids", "missing": "zero"}
            tables[table] = {"key": f"{table}.weight", **how}
    spec = {"name": name, "checkpoint": path.name, "tables": tables, "features": {}}
    load(parse_model(spec, folder), root, LoadSettings())
    path.unlink()
    return Model(root, name).attach(verify="header")


def _write(
    archive: ZipFile, name: str, shape: tuple[int, ...], dtype: Any, parts: Iterable[NDArray[Any]]
) -> None:
    """An array of an npz file, part by part: `numpy.savez` would want it whole."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        write_array_header_1_0(
            entry, {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        )
        for part in parts:
            entry.write(part.data)
