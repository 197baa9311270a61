"""Manifests: checksums of a checkpoint's tensors, for formats without any; every load checks them.

    {"format": "tableside manifest", "version": 1, "checksum": "<xxh3-64 of the JSON of tensors>",
     "tensors": {"user.weight": {"dtype": "fp32", "shape": [rows, dim], "chunk_rows": 256,
                                 "chunks": "<16 hex digits per chunk>"}}}

A chunk is about 512 KiB of rows, hashed as they lie in the checkpoint. The manifest lies beside a file as
FILE.manifest.json, or in the folder of several files as tableside.manifest.json. It is no signature.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from tableside.loader.checkpoint import Checkpoint, Matrix, open_checkpoint
from tableside.loader.errors import CheckpointError
from tableside.loader.files import read_regular, replacing
from tableside.loader.load.settings import Progress

FORMAT, VERSION = "tableside manifest", 1
CHUNK_BYTES = 512 << 10
_LIMIT_BYTES = 256 << 20  # of a manifest: 16 digits for each chunk, so it describes 8 TiB
_DIGITS = 16


def chunk_rows(matrix: Matrix) -> int:
    return max(1, CHUNK_BYTES // matrix.row_bytes)


def manifest_path(checkpoint: Path) -> Path:
    """Where the manifest of a checkpoint (`Checkpoint.path`) lies."""
    if checkpoint.name.endswith(".index.json"):
        checkpoint = checkpoint.parent
    return (
        checkpoint / "tableside.manifest.json" if checkpoint.is_dir() else Path(f"{checkpoint}.manifest.json")
    )


@dataclass(frozen=True)
class Manifest:
    """Checksums of a checkpoint's matrices. chunks: tensor -> uint64 [chunks]."""

    path: Path
    chunks: Mapping[str, NDArray[np.uint64]]

    def check(self, checkpoint: Path, matrix: Matrix, first: int, values: NDArray[Any]) -> None:
        """Checks rows [first, first + len(values)), which are whole chunks. CheckpointError names the first
        bad rows."""
        step = chunk_rows(matrix)
        found = _digests(values, step)
        known = self.chunks[matrix.key][first // step :][: len(found)]
        for chunk in np.flatnonzero(np.array(found, np.uint64) != known)[:1]:
            at = first + int(chunk) * step
            raise CheckpointError(
                f"{checkpoint}: {matrix.key!r}, rows [{at}, {min(at + step, first + len(values))}) are not "
                f"those of {self.path}; take another copy of the checkpoint, or, where it was saved anew, "
                f"run: tableside manifest {checkpoint}"
            )


def _digests(values: NDArray[Any], step: int) -> list[int]:
    """xxh3-64 of each `step` rows."""
    data = values.reshape(-1).view(np.uint8).data
    step_bytes = step * values.shape[1] * values.itemsize
    return [xxhash.xxh3_64_intdigest(data[at : at + step_bytes]) for at in range(0, len(data), step_bytes)]


def find_manifest(checkpoint: Checkpoint, matrices: Mapping[str, Matrix]) -> Manifest | None:
    """Returns the manifest beside a checkpoint, checked against the wanted matrices; or None.
    CheckpointError: it is damaged, of another version, or does not fit."""
    path = manifest_path(checkpoint.path)
    if not os.path.lexists(path):
        return None
    tensors = _read(path)
    chunks = {}
    for key, matrix in matrices.items():
        if key not in tensors:
            raise _bad(path, f"it lacks the tensor {key!r}")
        expected, found = _described(matrix), tensors[key]
        digits = _DIGITS * -(-matrix.rows // chunk_rows(matrix))
        sums = found.get("chunks") if isinstance(found, dict) else None
        is_alike = {**found, "chunks": None} == {**expected, "chunks": None}
        if not is_alike or not isinstance(sums, str) or len(sums) != digits:
            raise _bad(
                path, f"it describes {key!r} as {_short(found)}, the checkpoint has {_short(expected)}"
            )
        try:
            chunks[key] = np.frombuffer(bytes.fromhex(sums), ">u8").astype(np.uint64)
        except ValueError:
            raise _bad(path, f"the checksums of {key!r} are no hexadecimal digits") from None
    return Manifest(path, chunks)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = orjson.loads(read_regular(path, _LIMIT_BYTES, "the manifest", CheckpointError))
        if raw["format"] != FORMAT or raw["version"] != VERSION:
            raise _bad(
                path,
                f"its format is {raw['format']!r:.50} {raw['version']!r:.50}, expected {FORMAT!r} {VERSION}",
            )
        tensors = raw["tensors"]
        if not isinstance(tensors, dict) or raw["checksum"] != _checksum(tensors):
            raise _bad(path, "its own checksum is wrong")
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(path, f"{type(error).__name__}: {error}") from error
    return tensors


def _bad(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: does not fit the checkpoint or is damaged: {what}; write it again with: tableside manifest "
        "CHECKPOINT, or remove it to load without"
    )


def _short(described: Any) -> str:
    return str({**described, "chunks": "..."} if isinstance(described, dict) else described)[:200]


def _described(matrix: Matrix) -> dict[str, Any]:
    shape = [matrix.rows, matrix.dim]
    return {"dtype": matrix.source.label, "shape": shape, "chunk_rows": chunk_rows(matrix), "chunks": ""}


def _checksum(tensors: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(orjson.dumps(tensors, option=orjson.OPT_SORT_KEYS))


def write_manifest(checkpoint: Path, out: Path | None = None, progress: Progress | None = None) -> Path:
    """Writes the manifest of a checkpoint, whole or not at all; returns its path. CheckpointError,
    OSError."""
    with open_checkpoint(checkpoint) as found:
        path = out or manifest_path(found.path)
        matrices = {key: found.matrix(key) for key in found.matrices}
        tensors = {key: _described(matrix) for key, matrix in sorted(matrices.items())}
        done, total = 0, sum(m.rows for m in matrices.values())
        with ThreadPoolExecutor(
            len(os.sched_getaffinity(0)), thread_name_prefix="tableside-manifest"
        ) as pool:
            for key, matrix in matrices.items():
                found.open_files(matrix)
                starts, digests = range(0, matrix.rows, chunk_rows(matrix)), []
                for digest, rows in pool.map(lambda at, m=matrix: _digest(found, m, at), starts):
                    digests.append(digest)
                    done += rows
                    if progress:
                        progress(done, total)
                tensors[key]["chunks"] = "".join(digests)
    text = orjson.dumps(
        {"format": FORMAT, "version": VERSION, "checksum": _checksum(tensors), "tensors": tensors}
    )
    with replacing(path) as partial:
        partial.write_bytes(text + b"\n")
    return path


def _digest(checkpoint: Checkpoint, matrix: Matrix, start: int) -> tuple[str, int]:
    """Returns the checksum of a chunk, as digits, and its rows."""
    stop = min(matrix.rows, start + chunk_rows(matrix))
    values = matrix.empty(stop - start)
    checkpoint.read(matrix, start, stop, values, bytearray(values.nbytes))
    return xxhash.xxh3_64_hexdigest(values.data), stop - start
