"""Tells a checkpoint's kind from its name and first bytes, and opens it."""

import os
from pathlib import Path

from tableside.loader.checkpoint import dcp, numpy_files, safetensors, torch_files
from tableside.loader.checkpoint.rows import Checkpoint
from tableside.loader.errors import CheckpointError
from tableside.loader.files import open_regular

_KINDS = (
    "a .safetensors file or its .index.json, a torch.save file (.pt, .pth, .bin, .ckpt), "
    "a folder with .metadata (torch distributed checkpoint), or .npy / .npz"
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads what tensors a checkpoint has, and where; no values. CheckpointError: it is missing, damaged or of no known kind."""
    if "\0" not in str(path) and not os.path.exists(path):
        raise CheckpointError(f"checkpoint {path} does not exist; expected {_KINDS}")
    try:
        return _open_folder(path) if os.path.isdir(path) else _open_file(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error


def _open_folder(path: Path) -> Checkpoint:
    if os.path.exists(path / dcp.METADATA):
        return dcp.read(path)
    for name in (safetensors.INDEX, "model.safetensors"):
        if os.path.exists(path / name):
            return _open_file(path / name)
    raise CheckpointError(
        f"{path}: a folder with neither {dcp.METADATA} nor {safetensors.INDEX} nor model.safetensors; "
        "a distributed checkpoint without .metadata was not finished"
    )


def _open_file(path: Path) -> Checkpoint:
    with open(open_regular(path, "the checkpoint", CheckpointError), "rb") as file:
        magic = os.pread(file.fileno(), 8, 0)
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return safetensors.read(path, file.fileno())
        if path.suffix in (".npy", ".npz"):
            return numpy_files.read(path, file.fileno())
        if path.suffix in (".pt", ".pth", ".bin", ".ckpt") or magic[:4] == b"PK\x03\x04":
            return torch_files.read(path, file.fileno())
    raise CheckpointError(f"{path}: begins with {magic!r}, which is no known kind; expected {_KINDS}")
