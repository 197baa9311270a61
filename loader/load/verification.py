"""Checks a load's rows against a manifest, or else the CRC-32 of archives, while they are in the cache."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray

from tableside.loader.checkpoint import Checkpoint, Matrix
from tableside.loader.checkpoint.crc import Crc32Check
from tableside.loader.load.manifest import chunk_rows, find_manifest

MANIFEST, CRC32 = "manifest", "CRC-32"


class Verification:
    """Reads and checks rows of a checkpoint; any thread. `by`: table -> MANIFEST, CRC32 or None."""

    def __init__(
        self, checkpoint: Checkpoint, matrices: Mapping[str, Matrix], are_whole: bool = True
    ) -> None:
        """matrices: table -> its matrix. are_whole: all rows will be read. CheckpointError: there is a
        manifest, and it does not fit."""
        self._checkpoint, self._matrices = checkpoint, matrices
        self._manifest = find_manifest(checkpoint, {m.key: m for m in matrices.values()})
        self._crc = Crc32Check(dict(matrices) if are_whole and not self._manifest else {})
        self.unverified = dict(self._crc.unverified)  # table -> why
        if not are_whole and not self._manifest:
            self.unverified = dict.fromkeys(matrices, "only a share of it was read")
        self.by = {
            t: None if t in self.unverified else MANIFEST if self._manifest else CRC32 for t in matrices
        }

    def step(self, table: str) -> int:
        """Rows at whose multiples a piece of this table begins and ends."""
        return chunk_rows(self._matrices[table]) if self._manifest else 1

    def read(self, table: str, start: int, stop: int, out: NDArray[Any], scratch: bytearray) -> None:
        """Fills out [stop - start, dim], as `Checkpoint.read`. CheckpointError: rows are damaged."""
        matrix = self._matrices[table]
        if self._manifest:
            self._checkpoint.read(matrix, start, stop, out, scratch)
            self._manifest.check(self._checkpoint.path, matrix, start, out)
        else:
            seen = partial(self._crc.take, table) if self.by[table] else None
            self._checkpoint.read(matrix, start, stop, out, scratch, seen)

    def finish(self) -> None:
        """Checks what needs all rows. CheckpointError: bytes changed since they were written."""
        self._crc.finish(self._checkpoint.fill)

    def describe(self) -> dict[str, Any]:
        """For a version's header: table -> what verified its rows, or why nothing did."""
        return {table: {"by": by} if by else {"not": self.unverified[table]} for table, by in self.by.items()}


def summary(source: Mapping[str, Any]) -> str:
    """One line for people, of the source in a version's header."""
    described = source.get("verified")
    if not isinstance(described, dict):
        return "not verified: loaded by an earlier release"
    by = sorted({entry["by"] for entry in described.values() if "by" in entry})
    left = {table: entry["not"] for table, entry in described.items() if "not" in entry}
    parts = [f"verified by {' and '.join(by)}"] if by else []
    if left:
        table, why = next(iter(left.items()))
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        which = f"{table!r}{more}, {why}" if by else why
        parts.append(
            f"not verified: {which}; write some with: tableside manifest {source.get('path', 'CHECKPOINT')}"
        )
    return "; ".join(parts)
