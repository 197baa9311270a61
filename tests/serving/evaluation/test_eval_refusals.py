"""What `tableside eval` refuses: columns, rows, scores, files and models that do not fit are named."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluated import data, evaluate, model, publish, write
from scorers import Ctr, exported
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model, read_model
from tableside.loader.versions.versions import Model
from tableside.serving.errors import ServingError
from tableside.serving.evaluation.data import DataError, data_files, plan_shards, read
from tableside.serving.evaluation.run import EvalSettings, _job
from tableside.serving.evaluation.work import Candidate, Evaluator
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.gpu


@pytest.mark.drawn(0.5)
def test_columns_that_cannot_be_meant_are_refused(root: Path, tmp_path: Path) -> None:
    """Two models that read a feature from different columns, a feature of two columns, and data inside
    OUT."""
    publish(root, tmp_path)
    header = Model(root, "ctr").attach().header
    assert header.evaluation
    settings = EvalSettings(tmp_path / "data.parquet", tmp_path / "out")
    candidates = [Candidate("ctr", 1)] * 2
    for columns, headers, message in (
        ((("user", ("other",)),), [header, None], "user is read from user_id for ctr and from other"),
        ((("user", ("a", "b")),), [None], "feature user is read from one column; .* names a, b"),
    ):
        changed = replace(header, evaluation=replace(header.evaluation, columns=columns))
        with pytest.raises(ServingError, match=message):
            _job(candidates, [h or changed for h in headers], settings, ServerSettings(root=root))
    path = write(tmp_path, data(10))
    assert "holds the data; choose another --out" in evaluate(root, "ctr", path, "--out", tmp_path).stderr


def change(name: str, value: Any, row: int = 17) -> Callable[[dict[str, Any]], None]:
    def run(columns: dict[str, Any]) -> None:
        columns[name][row] = value

    return run


@pytest.mark.drawn(5)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("label", 2), "0.{0}, row 17: label 'label' is 2.0; expected 0 or 1"),
        (
            change("user_id", 500),
            "0.{0}, row 17, of a batch from row 0 on: feature 'user': id 500 at position 17 is outside",
        ),
        (
            change("clicked", [1, 500], 17),
            "0.{0}, row 17, of a batch from row 0 on: feature 'clicked': id 500 at position",
        ),
        (change("a", None), "column 'a' holds"),
        (lambda c: c.pop("b"), "has no column 'b'"),
        (lambda c: c.update(clicked=["x"] * 100), "column 'clicked' holds string; expected ids (int64)"),
    ],
    ids=["label", "id", "id in a list", "null", "column", "type"],
)
def test_data_that_does_not_fit_is_named(
    root: Path, tmp_path: Path, damage: Any, message: str, kind: str
) -> None:
    publish(root, tmp_path)
    columns = data(100)
    damage(columns)
    settings = EvalSettings(write(tmp_path, columns, kind), tmp_path / "out")
    segment = Model(root, "ctr").attach()
    job = _job(
        [Candidate("ctr", 1, segment.content())], [segment.header], settings, ServerSettings(root=root)
    )
    evaluator = Evaluator(job)
    with pytest.raises(DataError) as caught:
        for shard in plan_shards(data_files(settings.data), 1000):
            evaluator.score(shard)
    assert message.format(kind) in str(caught.value)


class Unsure(Ctr):
    """A scorer without a sigmoid at its end."""

    def forward(self, user: torch.Tensor, clicked: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return 7 + super().forward(user, clicked, context)


@pytest.mark.drawn(0.5)
def test_scores_that_are_no_probabilities_are_named(root: Path, tmp_path: Path) -> None:
    """Log loss and NE mean nothing for them: the error names the rows, the range and the remedy."""
    path = model(tmp_path)
    (tmp_path / "scorer.pt2").write_bytes(exported(Unsure(8, 4, 3), user=8, clicked=4, context=3))
    load(read_model(path), root)
    segment = Model(root, "ctr").attach()
    settings = EvalSettings(write(tmp_path, data(100)), tmp_path / "out")
    job = _job(
        [Candidate("ctr", 1, segment.content())], [segment.header], settings, ServerSettings(root=root)
    )
    (shard, *_) = plan_shards(data_files(settings.data), 1000)
    with pytest.raises(
        DataError, match=r"row 0 and on: scores of ctr lie in \[7.* expected probabilities: .* sigmoid"
    ):
        Evaluator(job).score(shard)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "expected a file that ends in .parquet, .jsonl, .ndjson"),
        ("a.parquet", b"not parquet", "a.parquet cannot be read"),
        ("a.jsonl", b"{}\nnot json\n", "a.jsonl, row 0 has no column 'x'; it has: "),
        ("b.jsonl", b"[1]\n", "b.jsonl, row 0: expected an object"),
        ("d.jsonl", b'{"x": 9223372036854775808}\n', "d.jsonl, rows [0, 1): "),
        ("c.jsonl", b'{"x": 1}\n\n', "c.jsonl, row 1: not a line of JSON"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)):
        for shard in plan_shards(data_files(tmp_path / name), 1000):
            list(read(shard, ["x"], 10))


@pytest.mark.thorough
def test_models_that_cannot_be_evaluated(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path, data(10))
    np.savez(tmp_path / "p.npz", t=rows_of(5, 4))
    load(parse_model({"name": "plain", "checkpoint": "p.npz", "tables": {"t": {"key": "t"}}}, tmp_path), root)
    for arguments, message in (
        (("plain", path), "plain version 1 has no scorer; publish it with [scorer]"),
        (("nothing", path), "nothing"),
        (("plain@x", path), "expected MODEL, MODEL@VERSION, MODEL@VERSION+SEQUENCE or a model.toml"),
        (("plain", path, "--max-ne-increase", 0), "say --against"),
        (
            ("plain", path, "--stash"),
            "--stash gives back what tables take of a GPU's memory; name one with --devices",
        ),
    ):
        result = evaluate(root, *arguments, "--out", tmp_path / "out")
        assert result.returncode == 1
        assert message in result.stderr
