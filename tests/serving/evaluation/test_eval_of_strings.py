"""`tableside eval` over columns of strings, in Parquet and JSON Lines: scores are those of the hashed ids."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluated import TABLES, data, evaluate, model, parts, write
from raw_loads import save_parquet
from string_tables import hashes, texts

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model

USERS, ITEMS = texts(500), [f"item {i}" for i in range(300)]


def publish(root: Path, folder: Path, kind: str, users: Any, items: Any) -> None:
    tables = {"user": (users, TABLES["user"]), "item": (items, TABLES["item"])}
    raw = tomllib.loads(model(folder).read_text())
    raw |= {"name": f"ctr-{kind}", "checkpoint": save_parquet(folder, tables)}
    for name, table in raw["tables"].items():
        table |= {"key": f"{name}/weight", "ids": kind, "id_key": "ids"}
    load(parse_model(raw, folder), root)


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_scores_of_strings(root: Path, tmp_path: Path, kind: str) -> None:
    publish(root, tmp_path, "string", USERS, ITEMS)
    publish(root, tmp_path, "raw", hashes(USERS), hashes(ITEMS))
    columns, scores = data(800), {}
    names = {"string": (USERS, ITEMS), "raw": (hashes(USERS).tolist(), hashes(ITEMS).tolist())}
    for ids, (users, items) in names.items():
        folder = tmp_path / ids
        folder.mkdir()
        clicked = [None if bag is None else [items[i] for i in bag] for bag in columns["clicked"]]
        given = {**columns, "user_id": [users[i] for i in columns["user_id"]], "clicked": clicked}
        out = folder / "out"
        result = evaluate(root, f"ctr-{ids}", write(folder, given, kind), "--out", out, "--batch", 300)
        assert result.returncode == 0, result.stderr
        scores[ids] = parts(out).column("score_0").to_numpy()
    np.testing.assert_array_equal(scores["string"], scores["raw"])
    assert len(set(scores["string"])) > 700
