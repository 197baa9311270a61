"""Strings that are ids, and models whose tables have them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from raw_loads import publish_raw

from tableside.loader import string_ids
from tableside.loader.load.load import Loaded

# One of each length for which xxh3 has another formula, and what people take for one string, or for none.
ODD = ["", "\0", "a\0b", "a\0", "é", "e\u0301", "日本語", "x" * 300, "y" * 10_000, "7", " 7", "null"]


def texts(count: int) -> list[str]:
    """Different strings, the odd ones first."""
    return (ODD + [f"user-{i:04}{'=' * (i % 250)}" for i in range(max(0, count - len(ODD)))])[:count]


def hashes(strings: Any) -> np.ndarray:
    """The ids of strings, by their definition."""
    found = [xxhash.xxh3_64_intdigest(s.encode() if isinstance(s, str) else s) for s in strings]
    return np.array(found, np.uint64).view(np.int64)


def publish_strings(
    folder: Path, root: Path, tables: dict[str, tuple[Any, np.ndarray]], **more: Any
) -> Loaded:
    """As `publish_raw`, of a Parquet file a table; ids that are strings make a table of string ids."""
    of = {
        name: {"ids": "raw" if isinstance(ids, np.ndarray) and ids.dtype == np.int64 else "string"}
        for name, (ids, _) in tables.items()
    }
    keys = {name: {**kind, **(more.get("of") or {}).get(name, {})} for name, kind in of.items()}
    return publish_raw(folder, root, tables, **{**more, "of": keys, "saver": "parquet"})


def make_weak(monkeypatch: pytest.MonkeyPatch, chars: int = 1) -> None:
    """Makes the first hash of strings that of their first characters."""
    strong = string_ids.digest
    monkeypatch.setattr(
        string_ids, "digest", lambda string, seed: strong(string if seed else string[:chars], seed)
    )
