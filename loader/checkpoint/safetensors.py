"""safetensors files, single or sharded over several by `model.safetensors.index.json`.

Format (github.com/huggingface/safetensors): uint64 N, N bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}},
then the values; offsets count from the end of the JSON.
"""

import json
import math
from pathlib import Path
from typing import Any

from loader.checkpoint.rows import Checkpoint, Collector, file_size, whole
from loader.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}


def read(path: Path) -> Checkpoint:
    """Finds the tensors of a file or of an index's files."""
    found = Collector()
    if path.name.endswith(".index.json"):
        weight_map = _index(path)
        for name in sorted(set(weight_map.values())):
            tensors = _header(path.parent / name)
            wanted = {key for key, file in weight_map.items() if file == name}
            if missing := sorted(wanted - set(tensors)):
                raise CheckpointError(f"{path.parent / name}: the index says it holds {missing[0]!r}, but it does not")
            _collect(found, path.parent / name, {key: tensors[key] for key in wanted})
    else:
        _collect(found, path, _header(path))
    return Checkpoint(path, found.matrices, found.skipped)


def _index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        names = {str(k): str(v) for k, v in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: expected JSON with a weight_map of tensor to file ({error!r})") from error
    for name in names.values():
        if Path(name).name != name:
            raise CheckpointError(f"{path}: file {name!r} lies outside the checkpoint's folder")
    return names


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """name -> (dtype, shape, absolute offset), every offset checked against the file's size."""
    size = file_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_HEADER_LIMIT_BYTES, size - 8):
            raise CheckpointError(f"{path}: {size} bytes cannot hold a header of {length}; it is truncated or not safetensors")
        try:
            raw = json.loads(file.read(length))
            entries = {k: _entry(v) for k, v in raw.items() if k != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path}: the header is not safetensors' JSON ({error!r})") from error
    start, tensors = 8 + length, {}
    for name, (dtype, shape, begin, end) in entries.items():
        expected = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
        if begin < 0 or end < begin or (expected and end - begin != expected):
            raise CheckpointError(
                f"{path}: {name!r} of {dtype} {list(shape)} needs {expected} bytes, its offsets span {end - begin}"
            )
        if start + end > size:
            raise CheckpointError(
                f"{path}: {name!r} ends at byte {start + end}, the file at {size}; it was truncated or is still being written"
            )
        tensors[name] = (dtype, shape, start + begin)
    return tensors


def _entry(raw: Any) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = raw["data_offsets"]
    shape = tuple(raw["shape"]) if isinstance(raw["shape"], list) else (-1,)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape {raw['shape']!r}")
    return str(raw["dtype"]), shape, int(begin), int(end)


def _collect(found: Collector, path: Path, tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
    for name, (dtype, shape, offset) in sorted(tensors.items()):
        found.add(name, shape, dtype, whole(path, offset, shape))
