"""What tests of loads of raw ids share: a checkpoint and its model.toml, and what the published table
answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from reference import REFERENCE

from tableside.loader.load.load import Loaded, load
from tableside.loader.load.settings import LoadSettings, Progress
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, Source, Table, choose

Tables = dict[
    str, tuple[np.ndarray | None, np.ndarray]
]  # name -> (ids, or None where they are row numbers; values)


def save_npz(folder: Path, tables: Tables) -> str:
    parts = {f"{n}.ids": i for n, (i, _) in tables.items() if i is not None}
    np.savez(folder / "c.npz", **parts, **{f"{n}.weight": v for n, (_, v) in tables.items()})
    return "c.npz"


def save_safetensors(folder: Path, tables: Tables) -> str:
    from safetensors.numpy import save_file

    parts = {f"{n}.ids": i for n, (i, _) in tables.items() if i is not None}
    save_file(parts | {f"{n}.weight": v for n, (_, v) in tables.items()}, folder / "c.safetensors")
    return "c.safetensors"


def save_parquet(folder: Path, tables: Tables) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, (ids, values) in tables.items():
        (folder / "c" / name).mkdir(parents=True, exist_ok=True)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        table = pa.table({"ids": ids, "weight": vectors})
        pq.write_table(table, folder / "c" / name / "0.parquet", row_group_size=max(1, len(values) // 3))
    return "c"


SAVERS: dict[str, Callable[[Path, Tables], str]] = {
    "npz": save_npz,
    "safetensors": save_safetensors,
    "parquet": save_parquet,
}


def publish_raw(
    folder: Path,
    root: Path,
    tables: Tables,
    of: dict[str, dict[str, Any]] | None = None,
    name: str = "demo",
    saver: str = "npz",
    settings: LoadSettings = LoadSettings(),  # noqa: B008  (frozen)
    row_format: str = "int8",
    progress: Progress | None = None,
    features: dict[str, Any] | None = None,
    **said: Any,
) -> Loaded:
    """Publishes tables through a real checkpoint. of: table -> further keys of its section in model.toml.
    saver: of SAVERS, or the name of a checkpoint that is there. said: other keys of model.toml."""
    checkpoint = SAVERS[saver](folder, tables) if saver in SAVERS else saver
    sections = {}
    for table, (ids, _) in tables.items():
        key = f"{table}/weight" if saver == "parquet" else f"{table}.weight"
        raw = {} if ids is None else {"ids": "raw", "id_key": "ids" if saver == "parquet" else f"{table}.ids"}
        sections[table] = {"key": key, "row_format": row_format, **raw, **(of or {}).get(table, {})}
    raw = {"name": name, "checkpoint": checkpoint, "tables": sections, "features": features or {}, **said}
    return load(
        parse_model(raw, folder),
        root,
        settings,
        progress,
    )


def attached(root: Path, table: str = "t", name: str = "demo", version: int | None = None) -> Table:
    """A table of a published version, whose rows were compared with their checksums."""
    return Model(root, name).attach(version).tables[table]


def vectors_of(table: Table, ids: Any) -> np.ndarray:
    """fp32 [n, dim] of ids, unpooled."""
    return choose("native").lookup(table, np.asarray(ids, np.int64), pooling=Pooling.NONE)


def quantized(values: np.ndarray, table: Table) -> np.ndarray:
    """What rows of these values dequantize to in the table's row format, fp32 [n, dim]."""
    packed = np.zeros((len(values), table.row_bytes), np.uint8)
    REFERENCE.quantize(np.ascontiguousarray(values, np.float32), Source.FP32, table.row_format, packed)
    return REFERENCE.dequantize(Table(packed, table.row_format, table.dim))
