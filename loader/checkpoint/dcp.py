"""Torch distributed checkpoints (DCP) as TorchRec writes them: a folder with `.metadata` and `__R_N.distcp`
files.

`.metadata` is a pickle, read with inert stand-ins (`pickles`). Each item is a torch.save archive inside a
.distcp file (`torch_files`). Items are joined by (name, offsets), so tensors may be sharded by row, column or
both. Items must not share bytes: a changed name or offset would serve another tensor's rows.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tableside.loader.checkpoint import torch_files
from tableside.loader.checkpoint.pickles import (
    LIMIT_BYTES,
    ForbiddenGlobal,
    Name,
    PickledObject,
    PickleError,
    unpickle,
)
from tableside.loader.checkpoint.rows import Checkpoint, RowShard
from tableside.loader.checkpoint.torch_files import DTYPE_BYTES, FileTensor
from tableside.loader.checkpoint.window import FileWindow
from tableside.loader.errors import CheckpointError
from tableside.loader.files import open_regular, read_regular

METADATA = ".metadata"


class _Metadata(PickledObject):
    __slots__ = ()


class _Tensor(PickledObject):
    __slots__ = ()


_DCP = "torch.distributed.checkpoint."
_PLAIN = ("TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata", "StorageMeta")
_MAKES: dict[str, Callable[..., Any]] = {
    f"{_DCP}metadata.Metadata": _Metadata,
    f"{_DCP}metadata.MetadataIndex": PickledObject,
    f"{_DCP}metadata.TensorStorageMetadata": _Tensor,
    **{f"{_DCP}metadata.{kind}": PickledObject for kind in _PLAIN},
    f"{_DCP}metadata._MEM_FORMAT_ENCODING": torch_files.dropped,
    f"{_DCP}filesystem._StorageInfo": PickledObject,
    "torch.Size": tuple,
    "torch.serialization._get_layout": torch_files.dropped,
    **dict.fromkeys(
        ("pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.WindowsPath"), torch_files.dropped
    ),
}
_NAMES = {full: Name(full, make) for full, make in _MAKES.items()} | {
    f"torch.{dtype}": Name(f"torch.{dtype}", None, dtype) for dtype in DTYPE_BYTES
}
_Key = tuple[str, tuple[int, ...]]  # (tensor, offsets of the chunk)


def read(path: Path) -> Checkpoint:
    metadata = _read_metadata(path / METADATA)
    found = Checkpoint(path)
    try:
        items = _items(metadata, path)
        for key, entry in metadata["state_dict_metadata"].items():
            if isinstance(entry, _Tensor):
                _add(found, path, str(key), entry, items)
            else:
                found.skip(str(key), "not a tensor")
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path / METADATA}: not the metadata of a distributed checkpoint ({type(error).__name__}: "
            f"{error})"
        ) from error
    return found


def _read_metadata(path: Path) -> _Metadata:
    data = read_regular(path, LIMIT_BYTES, "the metadata", CheckpointError)
    try:
        metadata = unpickle(data, _NAMES)
    except ForbiddenGlobal as error:
        name = str(error).removeprefix("GLOBAL ")
        raise CheckpointError(
            f"{path}: refused: .metadata names {name}, which a checkpoint does not need and which could run "
            "code"
        ) from None
    except PickleError as error:
        raise CheckpointError(f"{path}: damaged or half-written ({error})") from error
    if not isinstance(metadata, _Metadata) or not isinstance(metadata.state, dict):
        raise CheckpointError(f"{path}: not the metadata of a distributed checkpoint")
    return metadata


def _whole(value: Any) -> int:
    """Returns a whole number that can be a size or an offset; ValueError otherwise."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a whole number from 0, found {value!r:.100}")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list):
        raise ValueError(f"expected a list of numbers, found {values!r:.100}")
    return tuple(map(_whole, values))


def _items(metadata: _Metadata, folder: Path) -> dict[_Key, PickledObject]:
    """(tensor, offsets of the chunk) -> where its bytes are; CheckpointError where two share bytes."""
    items = {
        (str(i["fqn"]), _wholes(i["offset"] or ())): place for i, place in metadata["storage_data"].items()
    }
    if len(items) != len(metadata["storage_data"]):
        raise CheckpointError(
            f"{folder / METADATA}: two items are the same chunk of the same tensor; the metadata is damaged"
        )
    places = [(key[0], p["relative_path"], p["offset"], p["length"]) for key, p in items.items()]
    spans = sorted((str(path), _whole(offset), _whole(length), key) for key, path, offset, length in places)
    for (file, begin, length, name), (other_file, other_begin, _, other_name) in pairwise(spans):
        if file == other_file and other_begin < begin + length:
            raise CheckpointError(
                f"{folder / METADATA}: {name!r} and {other_name!r} share bytes of {file!r}; the metadata is "
                "damaged"
            )
    return items


def _add(found: Checkpoint, folder: Path, key: str, entry: _Tensor, items: dict[_Key, PickledObject]) -> None:
    shape = _wholes(entry["size"])
    properties = entry["properties"].state
    dtype = (properties[0] if isinstance(properties, tuple) else properties["dtype"]).value
    if len(shape) != 2 and not (len(shape) == 1 and dtype in ("int64", "int32")):  # neither a matrix nor ids
        found.add(key, shape, dtype, None)
        return
    shards: list[RowShard] = []
    for chunk in entry["chunks"]:
        offsets, sizes = _wholes(chunk["offsets"]), _wholes(chunk["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"{key!r} has a chunk of {len(sizes)} dimensions at {list(offsets)}")
        if 0 in sizes:
            continue
        place = items.get((key, offsets))
        if place is None:
            raise CheckpointError(
                f"{folder / METADATA}: {key!r} has a chunk at {list(offsets)} that no file holds"
            )
        shards.append(_shard(folder, key, dtype, place, offsets, sizes))
    found.add(key, shape, dtype, tuple(shards))


def _shard(
    folder: Path, key: str, dtype: str, place: PickledObject, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> RowShard:
    relative = str(place["relative_path"])
    if Path(relative).name != relative or "\0" in relative:
        raise CheckpointError(
            f"{folder / METADATA}: file {relative!r} of {key!r} lies outside the checkpoint's folder"
        )
    path = folder / relative
    if place.state.get("transform_descriptors"):
        raise CheckpointError(
            f"{path}: {key!r} is stored transformed (compressed?); save it without extensions"
        )
    begin, length = _whole(place["offset"]), _whole(place["length"])
    with open(open_regular(path, "a file of the checkpoint", CheckpointError), "rb") as file:
        tensor = torch_files.load(FileWindow(file.fileno(), path, begin, length))
    if (
        not isinstance(tensor, FileTensor)
        or not tensor.contiguous
        or (tensor.shape, tensor.dtype) != (sizes, dtype)
    ):
        raise CheckpointError(
            f"{path}: the chunk of {key!r} at {list(offsets)} is not a contiguous {dtype} tensor "
            f"{list(sizes)}"
        )
    (row, column), (rows, columns) = (*offsets, 0)[:2], (*sizes, 1)[:2]
    return RowShard(path, tensor.begin, row, rows, column, columns, tensor.storage.record)
