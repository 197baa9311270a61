"""The examples in the docstrings of the clients, run against a server."""

import asyncio
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import Server, start_server
from support import end, rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.serving.client import AsyncClient, Client, Jagged


def example_of(documented: Any) -> str:
    """The lines of a docstring that are indented by more than its end."""
    lines = (documented.__doc__ or "").splitlines()
    return textwrap.dedent("\n".join(line for line in lines if line.startswith(lines[-1] + "    ")))


def public(of: type) -> list[str]:
    """The calls that users make; `close` needs no example."""
    found = [name for name, one in inspect.getmembers(of, callable) if not name.startswith("_")]
    return [name for name in found if name != "close"]


@pytest.fixture
def ads(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of the model that the examples ask, which TABLESIDE_URL names."""
    np.savez(tmp_path / "c.npz", item=rows_of(1000, 8), user=rows_of(1000, 8))
    features = {
        "clicked": {"table": "item"},
        "item": {"table": "item", "pooling": "none"},
        "user": {"table": "user"},
    }
    scorer = {"kind": "dot", "features": ["user", "clicked"]}
    tables = {name: {"key": name, "row_format": "int8"} for name in ("item", "user")}
    raw = {"name": "ads", "checkpoint": "c.npz", "tables": tables, "features": features, "scorer": scorer}
    load(parse_model(raw, tmp_path), root)
    server = start_server(root, "--workers", 1, models=("ads",))
    monkeypatch.setenv("TABLESIDE_URL", server.url)
    yield server
    assert end(server.process) == 0


def test_each_call_has_an_example() -> None:
    """The calls of `AsyncClient` are those of `Client`, and it shows how they are awaited."""
    assert {"lookup", "score", "gather", "with_options", "late_rows"} <= set(public(Client))
    assert public(Client) == public(AsyncClient)
    for documented in (Client, AsyncClient, *(getattr(Client, name) for name in public(Client))):
        assert example_of(documented), documented


def test_the_examples_are_answered(ads: Server) -> None:
    with Client(ads.url) as client:
        client.lookup("ads", {"user": [[1]]}, found=True)  # for what tells of the last one
        for documented in (Client, *(getattr(Client, name) for name in public(Client))):
            exec(example_of(documented), {"np": np, "Jagged": Jagged, "Client": Client, "client": client})
    found: dict[str, Any] = {"AsyncClient": AsyncClient, "asyncio": asyncio}
    exec("async def example():\n" + textwrap.indent(example_of(AsyncClient), "    "), found)
    asyncio.run(found["example"]())
