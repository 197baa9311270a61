"""`torch.save` state dicts. The pickle is read by torch with weights_only=True, onto meta: no values, no code of the file's.

Nested dicts ({"state_dict": {...}}) are flattened with dots. The values' places come from torch itself, which records the
offset of a storage that it loads onto meta.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from loader.checkpoint.rows import Checkpoint, Collector, Shard
from loader.errors import CheckpointError

_ZIP_MAGIC = b"PK\x03\x04"


def read(path: Path) -> Checkpoint:
    """Finds the tensors of a torch.save file."""
    found = Collector()
    with path.open("rb") as file:
        loaded = load_on_meta(file, path)
    try:
        for key, tensor in tensors(loaded):
            found.add(key, tuple(tensor.shape), str(tensor.dtype), shard_of(tensor, path, 0))
    except RecursionError:
        raise CheckpointError(f"{path}: a dict in it holds itself; save its state_dict() alone") from None
    return Checkpoint(path, found.matrices, found.skipped)


def load_on_meta(file: IO[bytes], path: Path) -> Any:
    """What torch.save wrote, with tensors on meta. CheckpointError: damaged, or it would run code."""
    import torch

    if file.read(4) != _ZIP_MAGIC:
        raise CheckpointError(
            f"{path}: not a zip archive: damaged, or older than torch 1.6's format; load it with torch, and torch.save it again"
        )
    file.seek(0)
    try:
        return torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0] if "GLOBAL" not in str(error) else _unsafe(str(error))
        raise CheckpointError(
            f"{path}: refused, it holds more than tensors and could run code ({reason}); save its state_dict() alone"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{path}: cannot be read as a torch.save file, it may be half-written ({reason})") from error


def _unsafe(message: str) -> str:
    at = message.find("GLOBAL")
    return message[at : at + 80].split("was not")[0].strip()


def tensors(loaded: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, tensor) of a tensor or of nested dicts of tensors."""
    import torch

    if isinstance(loaded, torch.Tensor):
        yield prefix or "tensor", loaded
    elif isinstance(loaded, dict):
        for key, value in loaded.items():
            yield from tensors(value, f"{prefix}.{key}" if prefix else str(key))


def shard_of(tensor: Any, path: Path, window: int) -> tuple[Shard, ...] | None:
    """Where a meta tensor's values lie: `window` bytes into `path`, plus what torch recorded. None: not row after row."""
    import torch

    if tensor.layout != torch.strided or tensor.dim() != 2 or not tensor.is_contiguous():
        return None
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if offset is None:
        return None
    begin = window + offset + tensor.storage_offset() * tensor.element_size()
    return (Shard(path, begin, 0, tensor.shape[0], 0, tensor.shape[1]),)
