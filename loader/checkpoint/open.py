"""Tells a checkpoint's kind from its name and first bytes, and opens it."""

from collections.abc import Callable
from pathlib import Path

from loader.checkpoint import dcp, numpy_files, safetensors, torch_files
from loader.checkpoint.rows import Checkpoint
from loader.errors import CheckpointError

_KINDS = (
    "a .safetensors file or its .index.json, a torch.save file (.pt, .pth, .bin, .ckpt), "
    "a folder with .metadata (torch distributed checkpoint), or .npy / .npz"
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads what tensors a checkpoint has, and where; no values. CheckpointError: it is missing, damaged or of no known kind."""
    if not path.exists():
        raise CheckpointError(f"checkpoint {path} does not exist; expected {_KINDS}")
    try:
        return _reader(path)(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error


def _reader(path: Path) -> Callable[[Path], Checkpoint]:
    if path.is_dir():
        if (path / dcp.METADATA).exists():
            return dcp.read
        for name in (safetensors.INDEX, "model.safetensors"):
            if (path / name).exists():
                return lambda folder: safetensors.read(folder / name)
        raise CheckpointError(
            f"{path}: a folder with neither {dcp.METADATA} nor {safetensors.INDEX} nor model.safetensors; "
            "a distributed checkpoint without .metadata was not finished"
        )
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return safetensors.read
    if path.suffix in (".npy", ".npz"):
        return numpy_files.read
    with path.open("rb") as file:
        magic = file.read(8)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt") or magic[:4] == b"PK\x03\x04":
        return torch_files.read
    raise CheckpointError(f"{path}: begins with {magic!r}, which is no known kind; expected {_KINDS}")
