"""Torch distributed checkpoints (DCP), as TorchRec writes them: a folder with `.metadata` and `__R_N.distcp` files.

`.metadata` is a pickle. It is read by an unpickler that knows the names in `_ALLOWED`, each bound to an inert stand-in of ours,
and those of dtypes, nothing else: no code of the file's, of torch's or of pathlib's runs. Each stored item is a torch.save
archive inside a .distcp file, read like any other (`torch_files`). Joined on (name, offsets), tensors may be sharded by row, by
column or both.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from loader.checkpoint.rows import Checkpoint, Collector, Shard, file_size
from loader.checkpoint.torch_files import load_on_meta, shard_of
from loader.errors import CheckpointError

METADATA = ".metadata"


class _Record:
    """Stands in for one of torch's classes: keeps its state, does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Index(_Record): ...


class _Storage(_Record): ...


def _size(values: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(values)


@dataclass(frozen=True)
class _Dtype:
    name: str


def _ignored(*arguments: Any) -> None:
    return None


_DCP = "torch.distributed.checkpoint."
_ALLOWED: dict[str, Callable[..., Any] | _Dtype] = {
    f"{_DCP}metadata.Metadata": _Metadata,
    f"{_DCP}metadata.MetadataIndex": _Index,
    f"{_DCP}metadata.TensorStorageMetadata": _Tensor,
    f"{_DCP}metadata.TensorProperties": _Record,
    f"{_DCP}metadata.ChunkStorageMetadata": _Record,
    f"{_DCP}metadata.BytesStorageMetadata": _Record,
    f"{_DCP}metadata.StorageMeta": _Record,
    f"{_DCP}metadata._MEM_FORMAT_ENCODING": _ignored,
    f"{_DCP}filesystem._StorageInfo": _Storage,
    "torch.Size": _size,
    "torch.serialization._get_layout": _ignored,
    "pathlib.PosixPath": _ignored,
    "pathlib._local.PosixPath": _ignored,
    "pathlib.WindowsPath": _ignored,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _ALLOWED:
            return _ALLOWED[full]
        if module == "torch" and name in _DTYPES:
            return _Dtype(name)
        raise CheckpointError(f"refused: .metadata names {full}, which a checkpoint does not need and which could run code")


_DTYPES = frozenset(
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "complex64",
        "complex128",
    ]
)


def read(path: Path) -> Checkpoint:
    """Finds the tensors of a distributed checkpoint."""
    metadata = _read_metadata(path / METADATA)
    found = Collector()
    try:
        items = _items(metadata)
        for key, entry in metadata["state_dict_metadata"].items():
            if isinstance(entry, _Tensor):
                _add(found, path, str(key), entry, items)
            else:
                found.skipped[str(key)] = "not a tensor"
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path / METADATA}: not the metadata of a distributed checkpoint ({error!r})") from error
    return Checkpoint(path, found.matrices, found.skipped)


def _read_metadata(path: Path) -> _Metadata:
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (
        pickle.UnpicklingError,
        EOFError,
        IndexError,
        KeyError,
        ValueError,
        AttributeError,
        TypeError,
        ImportError,
        MemoryError,
        OverflowError,
    ) as error:
        raise CheckpointError(f"{path}: damaged or half-written ({error!r})") from error
    if not isinstance(metadata, _Metadata) or not isinstance(metadata.state, dict):
        raise CheckpointError(f"{path}: not the metadata of a distributed checkpoint")
    return metadata


def _items(metadata: _Metadata) -> dict[tuple[str, tuple[int, ...]], _Storage]:
    """(tensor, offsets of the chunk) -> where its bytes are."""
    storage = metadata["storage_data"]
    return {(str(i["fqn"]), tuple(i["offset"] or ())): place for i, place in storage.items()}


def _add(
    found: Collector,
    folder: Path,
    key: str,
    entry: _Tensor,
    items: dict[tuple[str, tuple[int, ...]], _Storage],
) -> None:
    shape = tuple(int(n) for n in entry["size"])
    properties = entry["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    name = dtype.name if isinstance(dtype, _Dtype) else str(dtype)
    if len(shape) != 2:
        found.add(key, shape, name, None)
        return
    shards: list[Shard] = []
    for chunk in entry["chunks"]:
        offsets, sizes = tuple(map(int, chunk["offsets"])), tuple(map(int, chunk["sizes"]))
        if 0 in sizes:
            continue
        place = items.get((key, offsets))
        if place is None:
            raise CheckpointError(f"{folder / METADATA}: {key!r} has a chunk at {list(offsets)} that no file holds")
        shards.append(_shard(folder, key, place, offsets, sizes))
    found.add(key, shape, name, tuple(shards))


def _shard(folder: Path, key: str, place: _Storage, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Shard:
    relative = str(place["relative_path"])
    if Path(relative).name != relative:
        raise CheckpointError(f"{folder / METADATA}: file {relative!r} of {key!r} lies outside the checkpoint's folder")
    if place.state.get("transform_descriptors"):
        raise CheckpointError(f"{folder / relative}: {key!r} is stored transformed (compressed?); save it without extensions")
    path, begin, length = folder / relative, int(place["offset"]), int(place["length"])
    if begin < 0 or begin + length > (size := file_size(path)):
        raise CheckpointError(f"{path}: {key!r} ends at byte {begin + length}, the file at {size}; it was truncated")
    with path.open("rb") as file:
        tensor = load_on_meta(cast(BinaryIO, _Window(file, begin, length)), path)
    found = shard_of(tensor, path, begin) if hasattr(tensor, "untyped_storage") else None
    if found is None or tuple(tensor.shape) != sizes:
        raise CheckpointError(f"{path}: the chunk of {key!r} at {list(offsets)} is not a contiguous tensor {list(sizes)}")
    return Shard(path, found[0].offset, offsets[0], sizes[0], offsets[1], sizes[1])


class _Window(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        super().__init__()
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._begin + self._at)
        data = self._file.read(count)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
