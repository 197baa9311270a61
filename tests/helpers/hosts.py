"""One model on several hosts, which are servers of this machine with roots of their own."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from servers import Server

from tableside.loader.load.load import load
from tableside.loader.load.share import share_of
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.quant.contract import Waiting
from tableside.serving.cluster.describe import remote_tables
from tableside.serving.errors import ApiError
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.request import Answer, FeatureInput, Request
from tableside.serving.model.version import ServedVersion
from tableside.serving.settings import ServerSettings

USER_ROWS, ITEM_IDS = 1000, 700
RAW = np.random.default_rng(1).choice(10**15, ITEM_IDS, replace=False) - 5 * 10**14

UNPOOLED = {name: {"pooling": "none"} for name in ("user", "item", "small")}
ZERO = {"user": {"missing": "zero", "row_format": "fp32"}, "item": {"missing": "zero", "row_format": "fp32"}}
USERS, ITEMS = np.arange(0, 1000, 7), RAW[::5]


def checkpoint(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """Writes tables of row numbers, of raw ids, and a small one."""
    values = np.random.default_rng(seed)
    arrays = {
        "user": values.standard_normal((USER_ROWS, 16)).astype(np.float32),
        "item": values.standard_normal((ITEM_IDS, 8)).astype(np.float32),
        "small": values.standard_normal((20, 4)).astype(np.float32),
    }
    np.savez(folder / f"{seed}.npz", **arrays, **{"item.ids": RAW})
    return arrays


def spec_of(
    folder: Path,
    name: str = "ads",
    owners: Sequence[str] = (),
    seed: int = 0,
    tables: Mapping[str, Mapping[str, Any]] | None = None,
    features: Mapping[str, Mapping[str, Any]] | None = None,
) -> ModelSpec:
    """The model over `checkpoint`. owners: of user and item, in the words of a tier; none: it is whole."""
    of: dict[str, dict[str, Any]] = {
        "user": {"key": "user"},
        "item": {"key": "item", "ids": "raw", "id_key": "item.ids", "buckets": 16},
    }
    for key, table in of.items():
        table |= (tables or {}).get(key, {})
        if owners:
            table["tier"] = "rows://" + ",".join(owners)
    said: dict[str, Any] = {"name": name, "checkpoint": f"{seed}.npz", "features": dict(features or {})}
    small = {"key": "small", **(tables or {}).get("small", {})}
    return parse_model({**said, "tables": {**of, "small": small}}, folder)


def load_shares(spec: ModelSpec, roots: Sequence[Path]) -> list[str]:
    """Publishes each owner's share in its root; returns the names of their models."""
    shares = [share_of(spec, number) for number in range(len(roots))]
    return [load(share, root).model for share, root in zip(shares, roots, strict=True)]


def load_door(spec: ModelSpec, root: Path) -> None:
    """Publishes the model of a server that asks owners, who are asked."""
    load(spec, root, remote=remote_tables(spec, choose(), None))


def engine_of(root: Path, name: str, timeout_s: float = 2.0, **settings: Any) -> Engine:
    """A model in this process, as a worker serves it."""
    said = ServerSettings(disk_timeout_s=timeout_s, **settings)
    placer = Placer(said, choose())
    placer.open()
    engine = Engine(Model(root, name), said, placer)
    engine.begin()
    return engine


def served(root: Path, name: str, timeout_s: float = 2.0, **settings: Any) -> ServedVersion:
    """The live version of a model in this process, as a worker serves it."""
    return engine_of(root, name, timeout_s, **settings).served()


def bags(lengths: Sequence[int], ids: np.ndarray, weights: np.ndarray | None = None) -> Any:
    return np.array(lengths, np.int32), np.asarray(ids, np.int64), weights


def answer(version: ServedVersion, features: Mapping[str, Any], found: Sequence[str] = ()) -> Any:
    """What a request gets for features -> `bags` or, unpooled, ids: all outputs' bytes, and how many ids came
    without a row, by lookup; or its refusal."""
    return _of_plan(version, features, found, lambda request, body: request.look_up(body))


def begun(version: ServedVersion, features: Mapping[str, Any]) -> Any:
    """The same, where rows are waited for before the lookup."""

    def look_up(request: Request, body: bytes) -> Answer:
        plan = request.begin(body)
        return request.look_up(body, request.wait(plan) if isinstance(plan, Waiting) else plan)

    return _of_plan(version, features, (), look_up)


def _of_plan(
    version: ServedVersion,
    features: Mapping[str, Any],
    found: Sequence[str],
    look_up: Callable[[Request, bytes], Answer],
) -> Any:
    inputs, body = [], b""
    for name, given in features.items():
        lengths, ids, weights = (
            given if isinstance(given, tuple) else (None, np.asarray(given, np.int64), None)
        )
        at, body = len(body), body + ids.tobytes()
        more: dict[str, Any] = {}
        if lengths is not None:
            more |= {"bags": lengths.size, "lengths_at": len(body)}
            body += lengths.tobytes()
        if weights is not None:
            more["weights_at"] = len(body)
            body += weights.tobytes()
        inputs.append(FeatureInput(name, at, ids.size, **more))
    try:
        got = look_up(version.lay_out(inputs, found=found), body)
    except ApiError as error:
        return error.kind, error.message
    return bytes(got.buffer), [tuple(one) for one in got.unfound or ()]


def place(server: Server) -> str:
    return server.url.removeprefix("http://")
