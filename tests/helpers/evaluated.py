"""A model with a scorer and data for `tableside eval`, what it must give for them, and the command."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scorers import Ctr, exported
from support import LONGEST_S, rows_of, run_tableside

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model

TABLES = {"user": rows_of(500, 8), "item": rows_of(300, 4, 1)}
ROWS = 5000


class Sharp(Ctr):
    """A scorer that is sure of itself, so that coarse rows cost it something."""

    def forward(self, user: torch.Tensor, clicked: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return super().forward(20 * user, 20 * clicked, context)


def model(folder: Path, row_format: str = "fp32", **change: Any) -> Path:
    """Writes a checkpoint, a scorer and their model.toml."""
    np.savez(folder / "c.npz", **TABLES)
    (folder / "scorer.pt2").write_bytes(exported(Sharp(8, 4, 3), user=8, clicked=4, context=3))
    text = f"""
name = "ctr"
checkpoint = "c.npz"
[tables.user]
key = "user"
row_format = "{row_format}"
[tables.item]
key = "item"
row_format = "{row_format}"
[features.user]
[features.clicked]
table = "item"
pooling = "mean"
[scorer]
program = "{change.get("program", "scorer.pt2")}"
[eval]
label = "label"
[eval.columns]
user = "user_id"
context = ["a", "b", "c"]
"""
    path = folder / f"{row_format}.toml"
    path.write_text(text)
    return path


def publish(root: Path, folder: Path, row_format: str = "fp32", **change: Any) -> None:
    import tomllib

    load(parse_model(tomllib.loads(model(folder, row_format, **change).read_text()), folder), root)


def data(rows: int = ROWS) -> dict[str, Any]:
    """One id a row, lists of ids with empty and missing ones, numbers, a kind, and labels that follow the
    model's scores."""
    rng = np.random.default_rng(0)
    clicked = [rng.integers(0, 300, rng.integers(0, 6)).tolist() for _ in range(rows)]
    clicked[3] = None
    columns: dict[str, Any] = {"user_id": rng.integers(0, 500, rows).tolist(), "clicked": clicked}
    columns |= {name: rng.standard_normal(rows).astype(np.float32).tolist() for name in "abc"}
    columns["kind"] = [("new", "old", None)[n] for n in rng.integers(0, 3, rows)]
    columns["label"] = (rng.random(rows) < scores_of(columns)).astype(int).tolist()
    return columns


def vectors_of(
    columns: dict[str, Any], tables: dict[str, np.ndarray] = TABLES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the model's scorer takes, from the original rows."""
    item, user = tables["item"].astype(np.float64), tables["user"][columns["user_id"]]
    clicked = np.stack([item[ids].mean(0) if ids else np.zeros(4) for ids in columns["clicked"]]).astype(
        np.float32
    )
    return user, clicked, np.stack([columns[name] for name in "abc"], 1).astype(np.float32)


def scores_of(columns: dict[str, Any], tables: dict[str, np.ndarray] = TABLES) -> np.ndarray:
    """What the model gives, from the original rows."""
    user, clicked, context = vectors_of(columns, tables)
    with torch.inference_mode():
        found: np.ndarray = (
            Sharp(8, 4, 3).eval()(*map(torch.from_numpy, (user, clicked, context))).numpy()[:, 0]
        )
    return found


def write(folder: Path, columns: dict[str, Any], kind: str = "parquet") -> Path:
    """Two files, of several row groups or lines."""
    path = folder / f"data-{kind}"
    path.mkdir()
    half = len(columns["label"]) // 2
    for n, part in enumerate((slice(0, half), slice(half, None))):
        cut = {name: values[part] for name, values in columns.items()}
        if kind == "parquet":
            pq.write_table(pa.table(cut), path / f"{n}.parquet", row_group_size=400)
        else:
            lines = [json.dumps(dict(zip(cut, row, strict=True))) for row in zip(*cut.values(), strict=True)]
            (path / f"{n}.jsonl").write_text("\n".join(lines) + ("\n" if n else ""))
    return path


def evaluate(root: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_tableside("eval", *arguments, "--root", root, timeout_s=LONGEST_S)


def parts(out: Path) -> Any:
    return pa.concat_tables([pq.read_table(p) for p in sorted((out / "parts").glob("*.parquet"))])
