"""Tells a checkpoint's kind from its name and first bytes, and opens it."""

import os
from pathlib import Path

from tableside.loader.checkpoint import dcp, numpy_files, safetensors, torch_files
from tableside.loader.checkpoint.keyed import folders as keyed_folders
from tableside.loader.checkpoint.keyed.pairs import Pairs
from tableside.loader.checkpoint.rows import Checkpoint
from tableside.loader.checkpoint.scaled import add_scaled
from tableside.loader.errors import CheckpointError
from tableside.loader.files import open_regular

_KINDS = (
    "a .safetensors file or its .index.json, a torch.save file (.pt, .pth, .bin, .ckpt), a folder with "
    ".metadata (torch distributed checkpoint), .npy / .npz, or, for raw ids, .parquet, a DynamicEmb dump, or "
    "a sparse model of HugeCTR"
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads names and places of a checkpoint's tensors. CheckpointError: missing, damaged or of unknown
    kind."""
    if "\0" not in str(path) and not os.path.exists(path):
        raise CheckpointError(f"checkpoint {path} does not exist; expected {_KINDS}")
    try:
        found = _open_folder(path) if os.path.isdir(path) else _open_file(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error
    add_scaled(found)
    if found.ids:
        found.tables = Pairs(found)
    return found


def _open_folder(path: Path) -> Checkpoint:
    if os.path.exists(path / dcp.METADATA):
        return dcp.read(path)
    for name in (safetensors.INDEX, "model.safetensors"):
        if os.path.exists(path / name):
            return _open_file(path / name)
    if found := keyed_folders.dynamicemb(path):
        return found
    if groups := keyed_folders.parquet(path):
        return _parquet(path, groups)
    if found := keyed_folders.hugectr(path):
        return found
    raise CheckpointError(
        f"{path}: a folder with neither {dcp.METADATA} nor {safetensors.INDEX} nor model.safetensors, "
        "Parquet, a DynamicEmb dump "
        "or a sparse model of HugeCTR; a distributed checkpoint without .metadata was not finished"
    )


def _parquet(path: Path, groups: dict[str, list[Path]]) -> Checkpoint:
    try:
        from tableside.loader.checkpoint.keyed import parquet as keyed_parquet
    except ImportError as error:
        raise CheckpointError(
            f"{path}: Parquet is read by pyarrow, which does not import ({error}); install tableside[eval]"
        ) from error
    return keyed_parquet.read(path, groups)


def _open_file(path: Path) -> Checkpoint:
    with open(open_regular(path, "the checkpoint", CheckpointError), "rb") as file:
        magic = os.pread(file.fileno(), 8, 0)
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return safetensors.read(path, file.fileno())
        if path.suffix in (".npy", ".npz"):
            return numpy_files.read(path, file.fileno())
        if path.suffix in (".pt", ".pth", ".bin", ".ckpt") or magic[:4] == b"PK\x03\x04":
            return torch_files.read(path, file.fileno())
    if path.suffix == ".parquet" or magic[:4] == b"PAR1":
        return _parquet(path, {"": [path]})
    raise CheckpointError(f"{path}: begins with {magic!r}, which is no known kind; expected {_KINDS}")
