"""A model whose rows change, and a dictionary that says what they must be."""

from pathlib import Path

import numpy as np
from raw_segments import DenseTable, RawTable, publish_tables
from reference import backend_of
from support import rows_of

from tableside.loader.deltas.changes import TableChanges
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import Lookup, Pooling, RowFormat, Table, choose

DIM = 20
IDS = np.random.default_rng(5).permutation(4000)[:1500].astype(np.int64) * 7919
MISSING = np.full(DIM, 0.5, np.float32)


def found_by(table: Table, ids: np.ndarray) -> np.ndarray:
    """Which ids a table has, by a found mask."""
    found_at = 4 * table.dim * ids.size
    out = np.zeros(found_at + ids.size, np.uint8)
    choose().plan([Lookup(table, Pooling.NONE, 0, ids.size, 0, found_at=found_at)]).run(ids.tobytes(), out)
    return out[found_at:].astype(bool)


class Oracle:
    """What the rows of a model must be, fp32 by (table, id), for each state."""

    def __init__(self, root: Path, row_format: RowFormat = RowFormat.FP32) -> None:
        raw, dense = rows_of(IDS.size, DIM, 1), rows_of(1000, DIM, 2)
        publish_tables(
            root,
            {
                "raw": RawTable(IDS, raw, row_format, default=MISSING),
                "dense": DenseTable(dense, row_format, is_plain=True),
                "policy": DenseTable(dense, row_format, default=MISSING),
            },
        )
        self.model, self.rng = Model(root, "demo"), np.random.default_rng(0)
        self.rows = {("raw", int(i)): row for i, row in zip(IDS, raw, strict=True)}
        for table in ("dense", "policy"):
            self.rows |= {(table, n): row for n, row in enumerate(dense)}

    def change(self, rows: int, tables: tuple[str, ...] = ("raw", "dense", "policy")) -> list[TableChanges]:
        """Random changes, ids that come twice among them, noted in the oracle."""
        made = []
        for table in tables:
            pool = (
                np.arange(1000)
                if table != "raw"
                else np.concatenate([IDS[:1000], np.arange(1000) * 7919 + 1])
            )
            ids = self.rng.choice(pool, rows)
            vectors = self.rng.standard_normal((rows, DIM)).astype(np.float32)
            vectors[::9, ::2] = -0.0
            deleted = self.rng.random(rows) < (0.2 if table != "dense" else 0.0)
            made.append(TableChanges(table, ids, vectors, deleted))
            for i, vector, gone in zip(ids.tolist(), vectors, deleted.tolist(), strict=True):
                if gone:
                    self.rows.pop((table, i), None)
                else:
                    self.rows[table, i] = vector
        return made

    def check(self, segment: Segment, backend: str = "native") -> None:
        """Every id that was ever there, and some that were not."""
        for name, table in segment.tables.items():
            asked = (
                np.arange(1000)
                if name != "raw"
                else np.concatenate([IDS, np.arange(1000) * 7919 + 1, [-1, 2**62]])
            )
            expected = np.stack([self.rows.get((name, int(i)), MISSING) for i in asked])
            found = backend_of(backend).lookup(table, asked.astype(np.int64), pooling=Pooling.NONE)
            np.testing.assert_array_equal(found, expected, name)
            np.testing.assert_array_equal(np.signbit(found), np.signbit(expected), name)
