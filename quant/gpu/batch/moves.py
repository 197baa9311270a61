"""Copies of many small parts from one buffer to another, in one call."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tableside.quant.cpu import _native


class Move(NamedTuple):
    """Bytes that are copied from one buffer to another: `rows` parts of `bytes`, so many bytes apart."""

    source: int
    target: int
    bytes: int
    rows: int = 1
    source_step: int = 0
    target_step: int = 0


def as_bytes(moves: Sequence[Move]) -> bytes:
    """Moves as `move` takes them: int64 [moves, fields of Move]."""
    return np.array(moves, np.int64).tobytes()


def move_all(parts: Sequence[tuple[bytes, Any, int]], target: Any) -> None:
    """Copies parts of several buffers to `target` without the GIL: (moves, buffer, offset added to targets)
    each. ValueError: a part lies outside; some may have been copied."""
    _native.move_all(parts, target)


def move(moves: bytes, source: Any, target: Any, source_base: int, target_base: int) -> None:
    """Copies parts of a buffer to another; adds the bases to their offsets. ValueError: a part lies
    outside."""
    _native.move(moves, source, target, source_base, target_base)
