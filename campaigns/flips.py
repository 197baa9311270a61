"""Flips: one bit of a checkpoint or of a segment changes, or the file ends early. Nothing but the true rows
may be served.

For each kind of file a child process writes the file anew with one bit turned (or its end cut off) and loads
it with the real loader. Half of the flips fall anywhere, half near the ends of a file, where names, sizes and
offsets stand. Outcomes:

    found      an error of one line
    harmless   loaded, and every row is the original's, bit for bit: a name or a tensor that no table uses,
               padding
    silent     loaded, and a row differs                         must be 0
    broken     another exception, an error of several lines, a signal, no answer   must be 0
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from campaigns.common import console, folders, random_of
from tableside.loader.errors import LoaderError
from tableside.loader.load.load import load
from tableside.loader.load.manifest import write_manifest
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment import layout
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model

OUTCOMES = ("found", "harmless", "silent", "broken")
_TRUNCATED = 10  # each tenth change cuts the file
_EDGE_BYTES = 2048
_DEADLINE_S = 60
_SHAPES = {"user": (700, 17), "item": (90, 40)}
Rows = dict[str, bytes]


def _values() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in _SHAPES.items()}


# ---- files, each as its own library writes it ----


def _safetensors(folder: Path) -> Path:
    from safetensors.numpy import save_file

    save_file({**_values(), "bias": np.zeros(9, np.float32)}, folder / "c.safetensors")
    write_manifest(folder / "c.safetensors")
    return folder / "c.safetensors"


def _npz(folder: Path) -> Path:
    np.savez(folder / "c.npz", **_values())
    return folder / "c.npz"


def _pt(folder: Path) -> Path:
    import torch

    values = {name: torch.from_numpy(rows) for name, rows in _values().items()}
    torch.save({"epoch": 3, **values, "bias": torch.zeros(9)}, folder / "c.pt")
    return folder / "c.pt"


def _dcp(folder: Path) -> Path:
    """Two tables, each of two shards in files of their own, by row and by column."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.state_dict_saver import save

    values = {name: torch.from_numpy(rows) for name, rows in _values().items()}
    parts = {"user": values["user"].split(350, 0), "item": values["item"].split(20, 1)}
    for rank in (0, 1):
        save(
            {name: p[rank].contiguous() for name, p in parts.items()},
            checkpoint_id=folder / str(rank),
            no_dist=True,
        )
    found = [FileSystemReader(folder / str(rank)).read_metadata() for rank in (0, 1)]
    for rank in (0, 1):
        shutil.copy(folder / str(rank) / "__0_0.distcp", folder / f"__{rank}_0.distcp")
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, p in parts.items():
        offsets = [torch.Size([0, 0]), torch.Size([350, 0] if name == "user" else [0, 20])]
        chunks = [ChunkStorageMetadata(o, part.size()) for o, part in zip(offsets, p, strict=True)]
        of_first = found[0].state_dict_metadata[name]
        assert isinstance(of_first, TensorStorageMetadata)
        tensors[name] = TensorStorageMetadata(of_first.properties, values[name].size(), chunks)
        for rank, metadata in enumerate(found):
            place = next(v for k, v in metadata.storage_data.items() if k.fqn == name)
            place.relative_path = f"__{rank}_0.distcp"
            places[MetadataIndex(name, offsets[rank])] = place
    merged = found[0]
    merged.state_dict_metadata, merged.storage_data = tensors, places
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(merged))
    for rank in (0, 1):
        shutil.rmtree(folder / str(rank))
    return folder


def _segment(folder: Path) -> Path:
    np.savez(folder / "c.npz", **_values())
    root = folder / "root"
    load(_spec(folder / "c.npz"), root)
    for file in (root / "flips").glob("1.*"):
        shutil.copy(file, folder / f"c{file.name[1:]}")
    shutil.rmtree(root)
    (folder / "c.npz").unlink()
    return folder / "c.segment"


def _table_files(folder: Path) -> Path:
    """A segment whose tables have files of their own."""
    with patch.object(layout, "LARGE_PAGES", 0):
        return _segment(folder)


KINDS: dict[str, Callable[[Path], Path]] = {
    "safetensors": _safetensors,
    "pt": _pt,
    "npz": _npz,
    "dcp": _dcp,
    "segment": _segment,
    "table files": _table_files,
}


# ---- one change ----


def _spec(checkpoint: Path) -> Any:
    tables = {name: {"key": name, "row_format": "fp32"} for name in _SHAPES}
    return parse_model({"name": "flips", "checkpoint": str(checkpoint), "tables": tables}, Path())


def _rows(path: Path, root: Path) -> Rows:
    """The rows that would be served from a checkpoint, or from a segment."""
    if path.suffix == ".segment":
        return {name: table.packed.tobytes() for name, table in Segment(path).tables.items()}
    try:
        load(_spec(path), root, LoadSettings(threads=1))
        return {name: table.packed.tobytes() for name, table in Model(root, "flips").attach().tables.items()}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def change(files: dict[str, bytes], rng: random.Random, cut: bool) -> tuple[str, bytes, str]:
    """(file, its bytes after one change, what was changed)."""
    names = sorted(files)
    anywhere = rng.random() < 0.5
    name = rng.choices(names, [len(files[n]) for n in names] if anywhere else None)[0]
    data = bytearray(files[name])
    if cut:
        end = rng.randrange(len(data))
        return name, bytes(data[:end]), f"{name} cut at {end}"
    used = len(data.rstrip(b"\0"))  # zeros to the end of a page are padding
    near = min(used, _EDGE_BYTES)
    at = (
        rng.randrange(used) if anywhere else rng.choice([rng.randrange(near), used - 1 - rng.randrange(near)])
    )
    bit = rng.randrange(8)
    data[at] ^= 1 << bit
    return name, bytes(data), f"{name} byte {at} bit {bit}"


def _outcome(path: Path, root: Path, true: Rows) -> tuple[str, str]:
    try:
        rows = _rows(path, root)
    except LoaderError as error:
        return (
            ("found", str(error))
            if "\n" not in str(error)
            else ("broken", f"an error of several lines: {error}")
        )
    except Exception as error:  # noqa: BLE001  (what it is, is what the campaign reports)
        return "broken", f"{type(error).__name__}: {error}"
    return ("harmless", "") if rows == true else ("silent", "rows differ")


def child(kind: str, folder: Path, root: Path, seed: int, first: int, end: int) -> None:
    """Makes changes [first, end) of a kind; prints a line of JSON for each."""
    path = KINDS[kind](folder)
    base = folder if path.is_dir() else path.parent
    files = {p.name: p.read_bytes() for p in sorted(base.iterdir()) if p.is_file()}
    true = _rows(path, root)
    for number in range(first, end):
        rng = random_of(seed, kind, number)
        name, data, what = change(files, rng, cut=number % _TRUNCATED == _TRUNCATED - 1)
        print(json.dumps({"number": number, "what": what, "outcome": None}), flush=True)
        (base / name).write_bytes(data)
        outcome, why = _outcome(path, root, true)
        (base / name).write_bytes(files[name])
        print(json.dumps({"number": number, "what": what, "outcome": outcome, "why": why}), flush=True)


def run(flips: int, seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> dict[str, Any]:
    """Makes `flips` changes of each kind. "KIND.OUTCOME" -> how many; "failures": what was silent or
    broken, with its why."""
    figures: dict[str, Any] = {}
    failures: list[str] = []
    for kind in kinds:
        counts: Counter[str] = Counter()
        first = 0
        while first < flips:
            with (
                folders() as (root, _),
                TemporaryDirectory(dir="/dev/shm", prefix="tableside-flips-") as folder,
            ):
                first = _batch(kind, Path(folder), root / "m", (seed, first, flips), counts, failures)
        figures |= {f"{kind}.{outcome}": counts[outcome] for outcome in OUTCOMES}
    return {**figures, "failures": failures}


def _batch(
    kind: str, folder: Path, root: Path, what: tuple[int, int, int], counts: Counter[str], failures: list[str]
) -> int:
    """Runs a child until it is done or dies; returns the next change's number."""
    seed, first, end = what
    command = [
        sys.executable,
        "-m",
        "campaigns.flips",
        "--child",
        kind,
        str(folder),
        str(root),
        *map(str, (seed, first, end)),
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S + (end - first),
            check=False,
            cwd=Path(__file__).parent.parent,
        )
        text, how = done.stdout, f"exit code {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired as error:
        text, how = (error.stdout or b"").decode(), "no answer"
    lines = [json.loads(line) for line in text.splitlines()]
    if not lines:
        raise RuntimeError(f"the child of {kind} did not begin: {how}")
    for line in lines:
        if line["outcome"]:
            counts[line["outcome"]] += 1
            if line["outcome"] in ("silent", "broken"):
                failures.append(f"{kind} {line['number']}: {line['what']}: {line['outcome']}, {line['why']}")
    if lines[-1]["outcome"] is None:
        counts["broken"] += 1
        failures.append(f"{kind} {lines[-1]['number']}: {lines[-1]['what']}: {how}")
    return int(lines[-1]["number"]) + 1


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, folder, root, *numbers = sys.argv[2:]
        child(kind, Path(folder), Path(root), *map(int, numbers))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=1000, help="changes of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    figures = run(given.flips, given.seed)
    from rich.table import Table

    table = Table("file", *OUTCOMES, box=None)
    for kind in KINDS:
        table.add_row(kind, *(str(figures[f"{kind}.{outcome}"]) for outcome in OUTCOMES))
    console.print(table)
    for failure in figures["failures"]:
        console.print(failure, markup=False)
    sys.exit(1 if figures["failures"] else 0)


if __name__ == "__main__":
    main()
