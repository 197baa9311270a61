"""Copies of many small parts from one buffer to another, in one call."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Move(NamedTuple):
    """Bytes that are copied from one buffer to another: `rows` parts of `bytes`, so many bytes apart."""

    source: int
    target: int
    bytes: int
    rows: int = 1
    source_step: int = 0
    target_step: int = 0


def as_bytes(moves: Sequence[Move]) -> bytes:
    """Moves as `_native.move_all` takes them: int64 [moves, fields of Move]."""
    return np.array(moves, np.int64).tobytes()
