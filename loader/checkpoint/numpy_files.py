""".npy and .npz files. A .npz must be stored, not compressed (np.savez), so that its rows can be read anywhere."""

import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from loader.checkpoint.rows import Checkpoint, Collector, Shard
from loader.errors import CheckpointError


def read(path: Path) -> Checkpoint:
    """Finds the arrays; a .npy is one tensor called after the file."""
    found = Collector()
    with path.open("rb") as file:
        if path.suffix == ".npy":
            _add(found, path.stem, file, path)
        else:
            for key, offset in _members(path).items():
                file.seek(offset)
                _add(found, key, file, path)
    return Checkpoint(path, found.matrices, found.skipped)


def _members(path: Path) -> dict[str, int]:
    """Array name -> where its .npy begins in the archive."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            places = {}
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(
                        f"{path}: {info.filename} is compressed; write it with np.savez, not np.savez_compressed"
                    )
                file.seek(info.header_offset + 26)
                name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
                places[info.filename.removesuffix(".npy")] = info.header_offset + 30 + name_bytes + extra_bytes
            return places
    except (zipfile.BadZipFile, struct.error) as error:
        raise CheckpointError(f"{path}: not a whole .npz archive, it may be half-written ({error})") from error


def _add(found: Collector, key: str, file: BinaryIO, path: Path) -> None:
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
    except ValueError as error:
        raise CheckpointError(f"{path}: {key!r} is not a .npy array ({error})") from error
    shards = None
    if len(shape) == 2 and (not fortran or 1 in shape):
        shards = (Shard(path, file.tell(), 0, shape[0], 0, shape[1]),)
    found.add(key, shape, dtype.str if dtype.kind == "f" else str(dtype), shards)
