"""A small model of two towers, whose products are probabilities: scores without torch."""

from pathlib import Path
from typing import Any

import numpy as np
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model


def publish_towers(root: Path, folder: Path) -> None:
    """Publishes `towers`: user [50, 8], item [40, 8], scored by their dot product, in [0, 1]."""
    user, item = np.abs(rows_of(50, 8)), np.abs(rows_of(40, 8, 1))
    tables = {"user": user / user.sum(1, keepdims=True), "item": item / item.max()}
    np.savez(folder / "towers.npz", **tables)
    raw: dict[str, Any] = {
        "name": "towers",
        "checkpoint": "towers.npz",
        "tables": {t: {"key": t, "row_format": "fp32"} for t in tables},
        "features": {t: {} for t in tables},
        "scorer": {"kind": "dot", "features": ["user", "item"]},
        "eval": {"label": "label"},
    }
    load(parse_model(raw, folder), root)
