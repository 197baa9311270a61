"""A model whose large tables have their rows in Redis, beside the same model without a tier."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts import answer, served
from redis_servers import RedisServer
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.model.tiers import RedisTier
from tableside.loader.redis.servers import RedisNode, servers_of
from tableside.serving.model.version import ServedVersion

USERS, DIM = 3000, 64  # some blocks of rows
TABLES = {"user": rows_of(USERS, DIM, 1), "item": rows_of(777, 8, 2), "small": rows_of(20, 4, 3)}
ASKED = {"user": np.arange(0, USERS, 7), "item": np.arange(776, 0, -3), "small": np.arange(20)}
UNPOOLED = {name: {"pooling": "none"} for name in TABLES}
LATE = [(0, 0, ASKED["user"].size), (0, 0, ASKED["item"].size), (0, 0, 0)]


def tier(server: RedisServer) -> str:
    return f"redis://{server.place}"


def spec_of(
    folder: Path,
    tier: str | None,
    missing: str = "zero",
    name: str = "ads",
    user: Mapping[str, Any] | None = None,
) -> ModelSpec:
    np.savez(folder / "tables.npz", **TABLES)
    more = {} if tier is None else {"tier": tier}
    tables: dict[str, dict[str, Any]] = {
        "user": {"key": "user", "missing": missing, **more, **(user or {})},
        "item": {"key": "item", "row_format": "fp16", "missing": missing, **more},
        "small": {"key": "small", "row_format": "fp32"},
    }
    return parse_model(
        {"name": name, "checkpoint": "tables.npz", "tables": tables, "features": UNPOOLED}, folder
    )


def load_both(folder: Path, root: Path, tier: str, **how: Any) -> None:
    """Publishes "ads", and "plain" without the tier."""
    load(spec_of(folder, tier, **how), root)
    load(spec_of(folder, None, name="plain", **how), root)


def right(root: Path) -> Any:
    """What a lookup of `ASKED` gives."""
    return answer(served(root, "plain"), ASKED)


def look_up(version: ServedVersion) -> Any:
    return answer(version, ASKED)


def rows_in(got: Any) -> dict[str, np.ndarray]:
    """The vectors of an answer to `ASKED`, by table."""
    values, found, at = np.frombuffer(got[0], np.float32), {}, 0
    for name, ids in ASKED.items():
        size = ids.size * TABLES[name].shape[1]
        found[name], at = values[at : at + size].reshape(ids.size, -1), at + size
    return found


def taken_by(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Gets the deadline of each connection that is taken from now on."""
    taken, take = list[float](), RedisNode.take
    monkeypatch.setattr(RedisNode, "take", lambda self, until: taken.append(until) or take(self, until))
    return taken


def node_of(server: RedisServer) -> RedisNode:
    return servers_of(RedisTier((server.place,), False)).node(server.place)
