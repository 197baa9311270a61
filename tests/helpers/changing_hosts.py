"""A model on one host, and the same on several, with changes to both."""

import uuid
from pathlib import Path

import numpy as np
from hosts import (
    RAW,
    UNPOOLED,
    USER_ROWS,
    checkpoint,
    load_door,
    load_shares,
    place,
    spec_of,
)
from servers import Server
from support import until

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.hosts import passed_fields
from tableside.loader.load.load import load
from tableside.loader.versions.versions import Model
from tableside.serving.cluster.agreed import NotAgreed
from tableside.serving.model.engine import Engine


class Hosts:
    """A model on one host, and the same on owners and a server of the whole, with changes to both."""

    def __init__(self, owners: Server, folder: Path, count: int, row_format: str, missing: object) -> None:
        checkpoint(folder)
        name = f"m{uuid.uuid4().hex[:8]}"
        tables = {
            "user": {"row_format": row_format, "missing": "zero"},
            "item": {"row_format": row_format, "missing": missing},
        }
        self.tables = tables
        self.spec = spec_of(folder, name, [place(owners)] * count, tables=tables, features=UNPOOLED)
        self.owners = [Model(owners.root, m) for m in load_shares(self.spec, [owners.root] * count)]
        for model in self.owners:
            asked = f"/v2/rows/{model.name}"  # of any worker
            until(lambda a=asked: all(owners.get(a).status_code == 200 for _ in range(8)), what="the owners")
        load_door(self.spec, folder / "door")
        load(spec_of(folder, "whole", tables=tables, features=UNPOOLED), folder / "whole")
        self.door, self.whole = Model(folder / "door", name), Model(folder / "whole", "whole")
        self.draw, self.number = np.random.default_rng(0), 0

    def changes(self) -> list[TableChanges]:
        """Of all tables: ids twice, new ones and deletions."""
        made = []
        for table, dim, pool in (
            ("user", 16, np.arange(USER_ROWS)),
            ("item", 8, RAW),
            ("small", 4, np.arange(20)),
        ):
            ids = self.draw.choice(pool, 40).astype(np.int64)
            if table == "item":
                ids[::5] += 1
            deleted = self.draw.random(ids.size) < (0.0 if table == "small" else 0.2)
            vectors = self.draw.standard_normal((ids.size, dim)).astype(np.float32)
            made.append(TableChanges(table, ids, vectors, deleted))
        return made

    def batch(self, changes: list[TableChanges]) -> ChangeBatch:
        after = str(self.number - 1) if self.number > 1 else None
        content = b"".join(change.vectors.tobytes() for change in changes)
        passed = [passed_fields(str(self.number), [content])]
        return ChangeBatch(changes, "apply", str(self.number), after, passed=passed)

    def apply(self, models: list[Model], changes: list[TableChanges], merge_share: float = 0.25) -> None:
        for model in models:
            apply(model, self.batch(changes), ApplySettings(merge_share=merge_share))

    def asked(self) -> dict[str, np.ndarray]:
        strange = self.draw.integers(-(2**63), 2**63 - 1, 30)
        return {
            "user": np.concatenate([np.arange(USER_ROWS), [-1, USER_ROWS, 2**62]]),
            "item": np.concatenate([RAW, RAW + 1, strange]),
            "small": np.arange(20),
        }


def step(engine: Engine) -> bool:
    """What a watch does; whether another state is served then."""
    if (state := engine.changed()) is None:
        return False
    try:
        engine.swap(engine.attach(engine.agreed(state), as_successor=True))
    except NotAgreed:
        return False
    return True


def takes(engine: Engine) -> bool:
    """Whether another state is served in the end: owners may be busy."""
    until(lambda: step(engine), what="another state to be served")
    return True
