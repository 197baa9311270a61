"""Small scorers, exported as a user would."""

import io
from pathlib import Path

import numpy as np
import torch
from support import rows_of
from torch.export import Dim, export, save

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model


class Ctr(torch.nn.Module):
    """Two features and a dense tensor -> one score a row, with weights that are the same each time."""

    def __init__(self, user: int, item: int, context: int, scores: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.deep = torch.nn.Sequential(
            torch.nn.Linear(user + item + context, 16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, scores),
            torch.nn.Sigmoid(),
        )

    def forward(self, user: torch.Tensor, clicked: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.deep(torch.cat([user, clicked, context], 1))
        return scores


def exported(module: torch.nn.Module, **widths: int) -> bytes:
    """A .pt2 file of a module that takes fp32 [batch, width] by name."""
    batch = Dim("batch")
    inputs = tuple(torch.zeros(2, width) for width in widths.values())
    program = export(module.eval(), inputs, dynamic_shapes={name: {0: batch} for name in widths})
    out = io.BytesIO()
    save(program, out)
    return out.getvalue()


def publish_scored(root: Path, folder: Path, program: bytes) -> None:
    """Loads a model `demo` of one table and feature `user`, dim 8, with a .pt2 file as its scorer, through
    a real checkpoint."""
    np.savez(folder / "c.npz", user=rows_of(100, 8))
    (folder / "s.pt2").write_bytes(program)
    raw = {
        "name": "demo",
        "checkpoint": "c.npz",
        "tables": {"user": {"key": "user"}},
        "features": {"user": {"table": "user"}},
        "scorer": {"program": "s.pt2"},
    }
    load(parse_model(raw, folder), root)
