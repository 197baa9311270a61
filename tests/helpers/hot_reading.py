"""Lookups of a version on a disk, with its hot segment."""

from pathlib import Path

import numpy as np
from keyed_tables import ids_of

from tableside.loader.hot.counts import RowCounts
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import LookupKind, Place, Pooling, choose
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.placements import Placements
from tableside.serving.settings import ServerSettings

ROWS, DIM = 20_000, 32
VALUES = np.random.default_rng(3).standard_normal((ROWS, DIM)).astype(np.float32)
IDS = ids_of(ROWS, 6)
TABLES = {
    "dense": {"key": "v", "row_format": "int8"},
    "raw": {"key": "v", "ids": "raw", "id_key": "i", "row_format": "int8", "missing": "mean"},
}
SETTINGS = ServerSettings(host_cache=1 << 30)


def ids_of_rows(name: str, rows: np.ndarray, ids: np.ndarray = IDS) -> np.ndarray:
    return rows if name == "dense" else ids[rows]


def publish(disk: Path, folder: Path, values: np.ndarray = VALUES, ids: np.ndarray = IDS) -> Model:
    np.savez(folder / "c.npz", v=values, i=ids)
    features = {t: {"table": t, "pooling": "none"} for t in TABLES}
    raw = {"name": "m", "checkpoint": "c.npz", "tables": TABLES, "features": features}
    load(parse_model(raw, folder), disk)
    return Model(disk, "m")


class Reading:
    """A process that serves the live state."""

    def __init__(self, model: Model) -> None:
        self.placer = Placer(SETTINGS, choose())
        self.engine = Engine(model, SETTINGS, self.placer)
        self.engine.begin()
        self.forget_warm_up()

    def forget_warm_up(self) -> None:
        for counted in self.counts.tables.values():
            counted[:] = 0
        self.counts._sampled[:] = 0

    @property
    def counts(self) -> RowCounts:
        found = self.placer.disk.hot._counts[self.version]
        assert found is not None
        return found

    @property
    def placed(self) -> Placements:
        return self.engine.served().placed

    @property
    def version(self) -> Segment:
        return self.engine.served().segment.base

    def follow(self) -> bool:
        if (state := self.engine.changed()) is None:
            return False
        before = self.version
        self.engine.swap(self.engine.attach(state, as_successor=True))
        if self.version is not before:
            self.forget_warm_up()
        return True

    def lookup(self, name: str, ids: np.ndarray) -> np.ndarray:
        place = Place(0, 0, ids.size, -1, 0, 0, -1, 0)
        plan = (
            choose()
            .planner([LookupKind(self.placed.tables[name], Pooling.NONE)])
            .plan(np.array([place]).tobytes())
        )
        out = np.empty((ids.size, DIM), np.float32)
        plan.run(ids.tobytes(), out.view(np.uint8).reshape(-1))
        return out

    def hot_rows(self, name: str) -> set[int]:
        """The rows that lie in the hot segment, by the numbers that their ids have."""
        ids = ids_of_rows(name, np.arange(ROWS))
        row_map = self.placed.tables[name].row_map
        if row_map is None:
            return set()
        numbers = row_map.find(ids)
        own = self.version.tables[name]
        return set(np.flatnonzero((numbers < 0) | (numbers >= own.rows)).tolist())


def ask(reading: Reading, name: str, rows: np.ndarray, times: int = 1) -> None:
    for _ in range(times):
        reading.lookup(name, ids_of_rows(name, rows))
