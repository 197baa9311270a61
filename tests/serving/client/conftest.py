"""A real server for tests of the client's compact form, and clients of either kind."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both_clients import Both
from compact_model import FEATURES, TABLES
from servers import Server, start_server
from support import end

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.serving.client import AsyncClient, Client


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with two workers for a model with a scorer of its own, `dot`."""
    root, folder = (
        Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}",
        tmp_path_factory.mktemp("compact"),
    )
    np.savez(folder / "c.npz", **TABLES)
    raw = {
        "name": "ads",
        "checkpoint": "c.npz",
        "tables": {t: {"key": t, "row_format": "int8"} for t in TABLES},
        "features": FEATURES,
        "scorer": {"kind": "dot", "features": ["user", "clicked"]},
    }
    load(parse_model(raw, folder), root)
    server = start_server(root, "--workers", 2, models=("ads",))
    yield server
    try:
        assert end(server.process) == 0
    finally:
        shutil.rmtree(root)


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Both]]:
    made: list[Both] = []

    def make(url: str, **options: Any) -> Both:
        made.append(Both(request.param, url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
