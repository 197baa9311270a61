r""".npy files, and .npz files that are stored, not compressed (np.savez), so that rows can be read anywhere.

Format (numpy.lib.format): b"\x93NUMPY", version, length, then a Python literal {'descr', 'fortran_order',
'shape'}, which is matched by a pattern, never evaluated.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tableside.loader.checkpoint.archive import Archive, ArchiveRecord
from tableside.loader.checkpoint.rows import Checkpoint, whole
from tableside.loader.checkpoint.window import FileWindow
from tableside.loader.errors import CheckpointError

_MAGIC = b"\x93NUMPY"
_HEADER_LIMIT_BYTES = 10_000  # numpy's own limit
_FIELDS = {
    "descr": re.compile(r"""['"]([<>|=]?[a-zA-Z]\d*(?:\[[^\]'"]*\])?)['"]|\[.*\]|\(.*\)""", re.DOTALL),
    "fortran_order": re.compile(r"(True|False)"),
    "shape": re.compile(r"\(\s*((?:\d{1,19}L?\s*,\s*)*(?:\d{1,19}L?\s*)?)\)"),
}
_FIELD = re.compile(r"""\s*['"](descr|fortran_order|shape)['"]\s*:\s*""")
_ITEM_BYTES = re.compile(r"[<>|=][biufcV](\d{1,6})")


class NpyHeader(NamedTuple):
    """dtype: as written, or "structured"; is_fortran: column-major; start: offset of the values."""

    dtype: str
    is_fortran: bool
    shape: tuple[int, ...]
    start: int


def read(path: Path, fd: int) -> Checkpoint:
    """Finds the arrays; a .npy is one tensor called after the file."""
    found = Checkpoint(path)
    window = FileWindow(fd, path)
    if path.suffix == ".npy":
        _add(found, path.stem, window, None)
        return found
    archive = Archive(window, "write it with np.savez, not np.savez_compressed")
    for name, record in archive.records.items():
        _add(found, name.removesuffix(".npy"), FileWindow(fd, path, record.offset, record.bytes), record)
    return found


def _add(found: Checkpoint, key: str, window: FileWindow, record: ArchiveRecord | None) -> None:
    try:
        dtype, fortran, shape, start = npy_header(window.read, window.bytes)
    except ValueError as error:
        raise CheckpointError(f"{window.path}: {key!r} is not a .npy array ({error})") from error
    if item := _ITEM_BYTES.fullmatch(dtype):
        end = start + math.prod(shape) * int(item[1])
        if end != window.bytes:
            raise CheckpointError(
                f"{window.path}: {key!r} of {dtype} {list(shape)} ends at byte {end}, what holds it at "
                f"{window.bytes}; it was truncated, is still being written, or holds more than one array"
            )
    shards = None
    if not fortran or len(shape) == 1 or 1 in shape:
        shards = whole(window.path, window.begin + start, shape, record)
    found.add(key, shape, dtype, shards)


def npy_header(read: Callable[[int, int], bytes], size: int) -> NpyHeader:
    """Reads the header of an array of `size` bytes. read: (offset, bytes), sequential. ValueError: no
    header."""
    if size < 12 or (begin := read(0, 6)) != _MAGIC:
        raise ValueError(
            f"it has {size:,} bytes" if size < 12 else f"it begins with {begin!r}, expected {_MAGIC!r}"
        )
    major, minor = read(6, 2)
    if (major, minor) not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"format version {major}.{minor}; expected 1.0, 2.0 or 3.0")
    width = 2 if major == 1 else 4
    length = int.from_bytes(read(8, width), "little")
    if length > min(_HEADER_LIMIT_BYTES, size - 8 - width):
        raise ValueError(f"a header of {length:,} bytes in {size:,}; it is truncated or damaged")
    text = read(8 + width, length).decode("utf-8" if major == 3 else "latin-1")
    fields = _fields(text)
    shape = tuple(int(n.strip(" L")) for n in fields["shape"].split(",") if n.strip())
    return NpyHeader(fields["descr"], fields["fortran_order"] == "True", shape, 8 + width + length)


def _fields(text: str) -> dict[str, str]:
    """Returns the three fields of a header; a structured dtype is "structured"."""
    inner = text.strip()
    if not (inner.startswith("{") and inner.endswith("}")):
        raise ValueError(f"its header is {text[:60]!r}")
    found: dict[str, str] = {}
    at, inner = 0, inner[1:-1]
    while inner[at:].strip():
        name = _FIELD.match(inner, at)
        value = _FIELDS[name[1]].match(inner, name.end()) if name else None
        if name is None or value is None or name[1] in found:
            raise ValueError(f"its header is {text[:60]!r}, unreadable at character {at + 1}")
        found[name[1]] = value[1] if value[1] is not None else "structured"
        after = inner[value.end() :].lstrip()
        if after and not after.startswith(","):
            raise ValueError(f"its header is {text[:60]!r}, unreadable at character {value.end() + 1}")
        at = len(inner) - len(after) + 1 if after else len(inner)
    if set(found) != set(_FIELDS):
        raise ValueError(f"its header has {sorted(found)}, expected {sorted(_FIELDS)}")
    return found
