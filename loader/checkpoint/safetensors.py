"""safetensors files, single or sharded by `model.safetensors.index.json`.

Format (github.com/huggingface/safetensors): uint64 N, N bytes of JSON {name: {dtype, shape, data_offsets:
[begin, end]}}, then the values; offsets count from the end of the JSON. As in the reference reader, values
have no gaps or overlaps, names are unique and numbers whole. The JSON is read entry by entry, to bound
memory.
"""

import json
import math
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed does not list it
from pathlib import Path
from typing import NamedTuple

import orjson

from tableside.loader.checkpoint.rows import LIMIT_TENSORS, Checkpoint, whole
from tableside.loader.checkpoint.window import FileWindow
from tableside.loader.errors import CheckpointError
from tableside.loader.files import open_regular, read_regular

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
_INDEX_LIMIT_BYTES = 16 << 20
_ENTRY_LIMIT = 4096  # characters of one tensor's description
_ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


_PAIRS = json.JSONDecoder(object_pairs_hook=list)


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read(path: Path, fd: int) -> Checkpoint:
    found = Checkpoint(path)
    if not path.name.endswith(".index.json"):
        _collect(found, path, *_header(FileWindow(fd, path)))
        return found
    by_file: dict[str, list[str]] = {}
    for key, name in _index(path).items():
        by_file.setdefault(name, []).append(key)
    for name, keys in sorted(by_file.items()):
        part = path.parent / name
        with open(open_regular(part, "a file of the checkpoint", CheckpointError), "rb") as file:
            entries, start = _header(FileWindow(file.fileno(), part))
        if missing := sorted(set(keys) - set(entries)):
            raise CheckpointError(f"{part}: the index says it holds {missing[0]!r}, but it does not")
        _collect(found, part, {key: entries[key] for key in keys}, start)
    return found


def _index(path: Path) -> dict[str, str]:
    data = read_regular(path, _INDEX_LIMIT_BYTES, "the index", CheckpointError)
    try:
        raw = orjson.loads(data)
        names = raw["weight_map"]
        if not all(type(k) is str and type(v) is str for k, v in names.items()):
            raise TypeError("a name that is no string")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected JSON with a weight_map of tensor to file ({error!r})"
        ) from error
    for name in names.values():
        if Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{path}: file {name!r} lies outside the checkpoint's folder")
    return dict(names)


def _header(window: FileWindow) -> tuple[dict[str, _Entry], int]:
    """Returns (name -> entry, offset of the values), checked against each other and the file's size."""
    path, size = window.path, window.bytes
    length = int.from_bytes(window.read(0, 8), "little") if size >= 8 else 0
    if size < 8 or length > min(_HEADER_LIMIT_BYTES, size - 8):
        raise CheckpointError(
            f"{path}: {size} bytes cannot hold a header of {length}; it is truncated or not safetensors"
        )
    entries: dict[str, _Entry] = {}
    try:
        for name, entry in _entries(window.read(8, length).decode()):
            if name in entries:
                raise ValueError(f"{name!r} is there twice")
            entries[name] = entry
            if len(entries) > LIMIT_TENSORS:
                raise CheckpointError(f"{path}: more than {LIMIT_TENSORS:,} tensors; save the tables alone")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the header is not safetensors' JSON ({type(error).__name__}: {error})"
        ) from error
    _check(path, entries, size - 8 - length)
    return entries, 8 + length


def _entries(text: str) -> Iterator[tuple[str, _Entry]]:
    """Yields the header's entries, without `__metadata__`. ValueError: it is not the format's JSON."""
    if not text.startswith("{"):
        raise ValueError("it does not begin with '{'")
    for name, at in _members(text, 0):
        if name != "__metadata__":
            yield name, _entry(text, at)


def _members(text: str, at: int) -> Iterator[tuple[str, int]]:
    """Yields (key, start of its value) of the object at `at`, which ends the text and holds flat objects."""
    at = _space(text, at + 1)
    more = text[at : at + 1] != "}"
    while more:
        if text[at : at + 1] != '"':
            raise ValueError(f"expected a name at character {at}")
        name, at = scanstring(text, at + 1, True)
        at = _space(text, at)
        if text[at : at + 1] != ":":
            raise ValueError(f"expected ':' at character {at}")
        at = _space(text, at + 1)
        yield name, at
        at = _space(text, _past(text, at) if name == "__metadata__" else text.index("}", at) + 1)
        if more := text[at : at + 1] == ",":
            at = _space(text, at + 1)
    if text[at : at + 1] != "}" or text[at + 1 :].strip(" \t\r\n"):
        raise ValueError(f"expected '}}' at character {at}, and nothing after it")


def _past(text: str, at: int) -> int:
    """Walks over an object of strings; returns where it ends. Nothing of it is kept."""
    if text[at : at + 1] != "{":
        raise ValueError("__metadata__ is no object")
    at = _space(text, at + 1)
    while text[at : at + 1] == '"':
        for after in ":,":
            if text[at : at + 1] != '"':
                raise ValueError("__metadata__ holds what is no string")
            _, at = scanstring(text, at + 1, True)
            at = _space(text, at)
            if after == "," and text[at : at + 1] == "}":
                return at + 1
            if text[at : at + 1] != after:
                raise ValueError(f"expected {after!r} at character {at}")
            at = _space(text, at + 1)
    if text[at : at + 1] != "}":
        raise ValueError("__metadata__ holds what is no string")
    return at + 1


def _space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n") and at < len(text):
        at += 1
    return at


def _entry(text: str, at: int) -> _Entry:
    end = text.find("}", at, at + _ENTRY_LIMIT)
    if end < 0 or text[at] != "{":
        raise ValueError(f"expected {{dtype, shape, data_offsets}} at character {at}")
    pairs = _PAIRS.decode(text[at : end + 1])
    raw = dict(pairs)
    if len(raw) != len(pairs) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"expected dtype, shape and data_offsets, found {[str(k)[:30] for k, _ in pairs]}")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if dtype not in _ITEM_BITS:
        raise ValueError(f"dtype {dtype!r:.50}")
    for numbers in (shape, offsets):
        if type(numbers) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"expected a list of whole numbers, found {numbers!r:.100}")
    begin, end = offsets
    return _Entry(dtype, tuple(shape), begin, end)


def _check(path: Path, entries: dict[str, _Entry], size: int) -> None:
    """Raises CheckpointError unless the values match their shapes and fill `size` bytes without gaps."""
    at = 0
    for begin, end, name in sorted((e.begin, e.end, name) for name, e in entries.items()):
        dtype, shape = entries[name].dtype, list(entries[name].shape)
        expected = -(-math.prod(shape) * _ITEM_BITS[dtype] // 8)
        if end - begin != expected:
            raise CheckpointError(
                f"{path}: {name!r} of {dtype} {shape} needs {expected} bytes, its offsets span {end - begin}"
            )
        if end > size:
            raise CheckpointError(
                f"{path}: {name!r} ends at byte {end} of the values, the file has {size}; "
                "it was truncated or is still being written"
            )
        if begin != at:
            raise CheckpointError(
                f"{path}: {name!r} begins at byte {begin} of the values, the tensor before it ends at {at}; "
                "the header is damaged"
            )
        at = end
    if at != size:
        raise CheckpointError(
            f"{path}: {size - at} bytes follow the last tensor; the header is damaged or another file's"
        )


def _collect(found: Checkpoint, path: Path, entries: dict[str, _Entry], start: int) -> None:
    for name, e in sorted(entries.items()):
        found.add(name, e.shape, e.dtype, whole(path, start + e.begin, e.shape))
