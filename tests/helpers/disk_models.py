"""A model of two tables, of which one is large enough for a file of its own on a disk."""

from pathlib import Path

import numpy as np

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model

ROWS, DIM = 20_000, 32
VALUES = np.random.default_rng(3).standard_normal((ROWS, DIM)).astype(np.float32)
SMALL = np.random.default_rng(4).standard_normal((10, 8)).astype(np.float32)


def load_floats(disk: Path, folder: Path, values: np.ndarray, **more: object) -> None:
    np.savez(folder / "c.npz", big=values, small=SMALL)
    raw = {
        "name": "m",
        "checkpoint": "c.npz",
        "tables": {t: {"key": t, "row_format": "fp32"} for t in ("big", "small")},
        "features": {t: {"table": t, "pooling": "none"} for t in ("big", "small")},
        **more,
    }
    load(parse_model(raw, folder), disk)
