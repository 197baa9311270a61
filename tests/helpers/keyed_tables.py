"""What tests of tables of raw ids share: the extremes of ids, values to match, and reading a whole table."""

from typing import NamedTuple

import numpy as np
import pytest

from tableside.loader.checkpoint.keyed import keyed
from tableside.loader.checkpoint.keyed.keyed import KeyedRows
from tableside.quant import Source

EXTREMES = (-(2**63), -1, 0, 2**63 - 1)


def ids_of(count: int, seed: int = 0) -> np.ndarray:
    """Different ids, the extremes among them where there is room, in no order: int64 [count]."""
    rng = np.random.default_rng(seed)
    found = np.unique(np.concatenate([EXTREMES, rng.integers(-(2**63), 2**63, count + 4)]))
    rest = np.setdiff1d(found, EXTREMES)[: max(0, count - len(EXTREMES))]
    return rng.permutation(np.concatenate([np.array(EXTREMES, np.int64)[:count], rest])).astype(np.int64)


class Read(NamedTuple):
    """A whole table: rows int64 [n], ids int64 [n], values fp32 [n, dim]; blocks: how many it came in."""

    rows: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    blocks: int


def read(table: KeyedRows) -> Read:
    """Reads a table in both ways, the last piece first; fails where they differ, or where rows do not
    ascend."""
    parts: dict[int, list[tuple[np.ndarray, ...]]] = {}
    for piece in reversed(range(table.pieces)):
        parts[piece] = [tuple(np.array(a) for a in block) for block in table.blocks(piece)]
        alone = [tuple(np.array(a) for a in block) for block in table.ids(piece)]
        for part in (0, 1):
            np.testing.assert_array_equal(joined(alone, part), joined(parts[piece], part))
    blocks = [block for piece in range(table.pieces) for block in parts[piece]]
    table.finish()
    rows, ids, values = (joined(blocks, part) for part in range(3))
    assert (np.diff(rows) > 0).all() and (rows < table.rows).all() and ids.dtype == np.int64
    if table.source is Source.BF16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return Read(rows, ids, values.astype(np.float32).reshape(-1, table.dim), len(blocks))


def joined(blocks: list[tuple[np.ndarray, ...]], part: int) -> np.ndarray:
    return np.concatenate(
        [
            np.empty(0, np.int64) if part < 2 else np.empty((0, blocks[0][2].shape[1])),
            *(b[part] for b in blocks),
        ]
    )


def small_pieces(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int = 256, piece_bytes: int = 600, id_rows: int = 5
) -> None:
    """Pieces and blocks of some rows, so that a small table has several of both, and their ends fall on
    odd rows."""
    monkeypatch.setattr(keyed, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(keyed, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(keyed, "ID_BLOCK_ROWS", id_rows)
