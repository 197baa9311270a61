"""Rows that change while requests run: no answer mixes two states, none goes back, and each says which
state it is from."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support import until

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.versions import Model
from tableside.serving.client import Client

Start = Callable[..., Any]
ROWS = {"user": (1000, 64), "item": (300, 32)}


def publish_ones(root: Path, folder: Path) -> None:
    """A version whose every value is 1."""
    np.savez(folder / "ones.npz", **{t: np.ones(shape, np.float32) for t, shape in ROWS.items()})
    raw = {
        "name": "demo",
        "checkpoint": "ones.npz",
        "tables": {t: {"key": t, "row_format": "fp32"} for t in ROWS},
    }
    load(parse_model(raw, folder), root)


class Writer:
    """Overwrites a third of the rows of both tables, and always rows 1 to 3, by the number of the delta."""

    def __init__(self, root: Path) -> None:
        self.model, self.rng, self.sequence = Model(root, "demo"), np.random.default_rng(1), 0

    def write(self) -> int:
        changes = []
        for table, (rows, dim) in ROWS.items():
            ids = np.unique(np.concatenate([[1, 2, 3], self.rng.integers(0, rows, rows // 3)]))
            changes.append(TableChanges(table, ids, np.full((ids.size, dim), self.sequence + 1, np.float32)))
        self.sequence = apply(
            self.model, ChangeBatch(changes), ApplySettings(keep=Retention(2))
        ).state.sequence
        return self.sequence


def ask(url: str, stop: threading.Event, seen: list[int], wrong: list[str]) -> None:
    """Rows 1 to 3 of both tables over one connection, as JSON and as tensors in turn, until it is time."""
    with Client(url, retries=0) as client, httpx.Client(timeout=300) as plain:
        while not stop.is_set():
            found = client.lookup("demo", {"user": [[1, 2], [3]], "item": [[3, 1]]})
            values = {
                *np.unique(found["user"][1]),
                *np.unique(found["user"][0] / 2),
                *np.unique(found["item"] / 2),
            }
            said = client.answered_by()
            if said.version != 1 or {float(said.sequence or 1)} != values:
                wrong.append(f"{said} answered {values}")
            body = plain.post(
                f"{url}/v1/lookup", json={"model": "demo", "features": {"user": [[1]], "item": [[2]]}}
            ).json()
            told = {v for vectors in body["vectors"].values() for vector in vectors for v in vector}
            if len(values) != 1 or told != {body["sequence"] or 1.0}:
                wrong.append(f"mixed: {sorted(values)}, {sorted(told)} of sequence {body['sequence']}")
            seen.append(int(min(values)))


ENGINE = ("--devices", "interpreter")
KERNELS = (
    *ENGINE,
    "--gpu-from-ids",
    0,
    "--placement",
    "cached",
    "--hbm-budget",
    "1MiB",
)  # every request goes to them


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags", [("--workers", 2), ENGINE, KERNELS], ids=["workers", "engine process", "its kernels"]
)
def test_changes_come_while_requests_run(
    start: Start, root: Path, tmp_path: Path, flags: tuple[Any, ...]
) -> None:
    """Rows carry the number of the delta that wrote them, so an answer says itself which states it is made
    of."""
    publish_ones(root, tmp_path)
    server = start(*flags)
    writer, stop, wrong = Writer(root), threading.Event(), list[str]()
    seen: list[list[int]] = [[] for _ in range(3)]
    threads = [threading.Thread(target=ask, args=(server.url, stop, one, wrong), daemon=True) for one in seen]
    for t in threads:
        t.start()
    for _ in range(25):
        writer.write()
    last = writer.sequence
    until(
        lambda: all(one and one[-1] == last for one in seen), 300, what="every connection saw the last state"
    )
    stop.set()
    for t in threads:
        t.join(300)
    assert not wrong, wrong[:5]
    for one in seen:
        assert one == sorted(one), "an answer came from an earlier state than the one before it"
    shown = server.get("/v1/models").json()["models"][0]
    assert (shown["version"], shown["sequence"]) == (1, last)


@pytest.mark.drawn(0.25)
def test_tensors_say_their_sequence(start: Start, root: Path, tmp_path: Path) -> None:
    """A response of the Open Inference Protocol has it as a parameter, once there is one."""
    publish_ones(root, tmp_path)
    server = start()
    body = {"inputs": [{"name": "user", "datatype": "INT64", "shape": [1, 1], "data": [1]}]}

    def told() -> dict[str, Any]:
        found: dict[str, Any] = httpx.post(f"{server.url}/v2/models/demo/infer", json=body).json()
        return found

    assert "parameters" not in told()
    Writer(root).write()
    until(lambda: told().get("parameters") == {"sequence": 1}, what="the change was seen")
    assert told()["outputs"][0]["data"][0] == 1.0


@pytest.mark.thorough
def test_a_state_is_gone_back_to(start: Start, root: Path, tmp_path: Path) -> None:
    publish_ones(root, tmp_path)
    server, writer = start("--workers", 2), Writer(root)
    for _ in range(3):
        writer.write()

    def sequences() -> set[int]:
        return {httpx.get(f"{server.url}/v1/models").json()["models"][0]["sequence"] for _ in range(12)}

    until(lambda: sequences() == {3}, what="all workers saw the last state")
    writer.model.activate(1, 2)
    until(lambda: sequences() == {2}, what="all workers went back")
    assert writer.write() == 4
    until(lambda: sequences() == {4}, what="and on again")
