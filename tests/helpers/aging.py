"""A model with a table whose ids go by age or number, and what tests ask of it. Days are those of a clock
that begins at BEGAN."""

from pathlib import Path
from typing import Any

import numpy as np
from changing import found_by
from raw_loads import publish_raw
from support import rows_of

from tableside.loader.deltas.apply import ApplyResult, ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import CompactionResult, compact
from tableside.loader.load.settings import LoadSettings
from tableside.loader.segment.delta_writer import delta_entries
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import times_of
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model

DAY, BEGAN, DIM = 86400, 1_700_000_000, 8
IDS = np.random.default_rng(2).permutation(3000)[:400].astype(np.int64) * 7919 - 1000
VALUES = rows_of(IDS.size, DIM, 3)
MISSING = np.full(DIM, 0.5, np.float32)


def clock(day: float) -> float:
    return BEGAN + day * DAY


def at(day: float, **more: Any) -> ApplySettings:
    return ApplySettings(clock=lambda: clock(day), **more)


def publish(
    folder: Path, root: Path, day: float = 0, ids: np.ndarray = IDS, more: Any = None, **said: object
) -> Model:
    """Loads rows VALUES on a day. said: of the table in model.toml; more: other tables."""
    tables = {"t": (ids, VALUES[: ids.size]), **(more or {})}
    of = {"t": {"missing": MISSING.tolist(), **said}}
    publish_raw(folder, root, tables, of, settings=LoadSettings(clock=lambda: clock(day)), row_format="fp32")
    return Model(root, "demo")


def change(model: Model, day: float, ids: Any, deleted: Any = None, **more: Any) -> ApplyResult:
    """Writes rows of ones on a day."""
    ids = np.asarray(ids, np.int64)
    gone = None if deleted is None else np.isin(ids, deleted)
    return apply(
        model,
        ChangeBatch([TableChanges("t", ids, np.ones((ids.size, DIM), np.float32), gone)]),
        at(day, **more),
    )


def compact_on(model: Model, day: float) -> CompactionResult:
    done = compact(model, at(day))
    assert done is not None
    return done


def days_of(segment: Segment, table: str = "t") -> dict[int, float]:
    """The day of the last change of each id that a state has."""
    stored = next(t for t in segment.base.header.tables if t.name == table)
    times, row_map = times_of(stored, segment.base.mapping.bytes), segment.base.tables[table].row_map
    assert times is not None and row_map is not None
    rows, ids = row_map.rows_with_ids(0, row_map.rows)
    found = dict(zip(ids.tolist(), times[rows].tolist(), strict=True))
    for delta in reversed(segment.deltas):
        if table in delta.tables:
            entries = delta_entries(delta, table)
            assert entries.times is not None
            for id_, time, gone in zip(
                entries.ids.tolist(), entries.times.tolist(), entries.deleted, strict=True
            ):
                found.pop(id_, None)
                if not gone:
                    found[id_] = time
    return {id_: (time - BEGAN) / DAY for id_, time in found.items()}


def check(model: Model, days: dict[int, float]) -> None:
    """The live state, every byte of it read, has these ids alone, changed on these days; others are
    missing."""
    segment = attach_state(model, None, "full")
    assert days_of(segment) == days
    asked = np.unique(np.concatenate([IDS, IDS + 1, list(days)])).astype(np.int64)
    np.testing.assert_array_equal(found_by(segment.tables["t"], asked), np.isin(asked, list(days)))


def on(day: float, *ids: np.ndarray) -> dict[int, float]:
    return dict.fromkeys(np.concatenate(ids).tolist(), day)
