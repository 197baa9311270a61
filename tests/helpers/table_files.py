"""A model whose tables have files of their own, and headers of versions that are written anew."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support import rows_of

from tableside.loader.segment.header import PRELUDE, checksum
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose

ROWS, DIM = 30_000, 16
PAGE = 2 << 20
TABLES = {name: rows_of(ROWS, DIM, n) for n, name in enumerate("abc")}
CHANGED = {"a": 2 * TABLES["a"], "b": 3 * TABLES["b"], "c": 5 * TABLES["c"]}


def check(model: Model, version: int | None = None, *changed: str) -> None:
    """Every row of a version is right, and every byte is what was written."""
    segment = model.attach(version, "always")
    for name, table in segment.tables.items():
        found = choose().lookup(table, np.arange(ROWS), pooling=Pooling.NONE)
        np.testing.assert_array_equal(found, (CHANGED if name in changed else TABLES)[name])


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None], size: int | None = None) -> None:
    """Changes the header of a segment, whose checksum is right afterwards. size: to cut it to."""
    data = bytearray(path.read_bytes())[:size]
    magic, version, header_bytes, whole, _ = PRELUDE.unpack_from(data)
    at = PRELUDE.size + header_bytes
    header = json.loads(data[PRELUDE.size : at])
    chunks = sum(-(-t["rows"] // t["chunk_rows"]) for t in header["tables"])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(header_bytes)
    assert len(text) == header_bytes
    found = checksum(text + data[at : at + 8 * chunks])
    data[:at] = PRELUDE.pack(magic, version, header_bytes, size or whole, found) + text
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    """value: or a function of the one before."""

    def change(header: dict[str, Any]) -> None:
        held: Any = header
        for key in path[:-1]:
            held = held[key]
        held[path[-1]] = value(held[path[-1]]) if callable(value) else value

    return change
