"""A published model whose score is a dot product, and requests for it."""

from pathlib import Path

import numpy as np
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.request import FeatureInput, Request
from tableside.serving.model.version import ServedVersion
from tableside.serving.settings import ServerSettings

VALUES = {"user": rows_of(100, 8), "item": rows_of(100, 8, 1)}


def attach(root: Path, folder: Path, device: str | None) -> tuple[ServedVersion, Placer]:
    """A model with two features whose dot product is the score, on a device or on the CPU; and an unpooled
    feature."""
    np.savez(folder / "c.npz", **VALUES)
    raw = {
        "name": "demo",
        "checkpoint": "c.npz",
        "tables": {t: {"key": t, "row_format": "fp32"} for t in VALUES},
        "features": {**{t: {"table": t} for t in VALUES}, "words": {"table": "item", "pooling": "none"}},
        "scorer": {"kind": "dot", "features": ["user", "item"]},
    }
    load(parse_model(raw, folder), root)
    placer = Placer(ServerSettings(devices=(device,) if device else ()), choose())
    placer.open()
    engine = Engine(Model(root, "demo"), ServerSettings(), placer)
    return engine.attach(), placer


def scored(version: ServedVersion, bags: int) -> tuple[Request, bytes, np.ndarray]:
    """A request for scores of one id a bag, its inputs, and its expected scores."""
    ids = np.arange(bags, dtype=np.int64)
    inputs = [FeatureInput("user", 0, bags, bags, 1), FeatureInput("item", 8 * bags, bags, bags, 1)]
    expected = (VALUES["user"][ids] * VALUES["item"][ids]).sum(1)
    return version.lay_out(inputs, score=True), ids.tobytes() * 2, expected
