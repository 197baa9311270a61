"""Programs as the scorers of published models: what they must take, and how a version carries them."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import rows_of

from tableside.loader.errors import ModelError, ProgramError, SegmentError
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.program import read_program, write_program
from tableside.loader.segment.header import ScorerInput
from tableside.loader.versions.versions import Model

pytestmark = pytest.mark.quick


class Plain(torch.nn.Module):
    def forward(self, user: torch.Tensor) -> torch.Tensor:
        return user.sum(1)


def test_a_fixed_batch_and_other_types_are_refused() -> None:
    for inputs, shapes, message in (
        (torch.zeros(2, 4), None, "was exported for a batch of 2 alone"),
        (torch.zeros(2, 4).double(), {"user": {0: torch.export.Dim("b")}}, "input 'user' is not fp32"),
        (torch.zeros(2, 4, 5), {"user": {0: torch.export.Dim("b")}}, "has 3 dimensions"),
    ):
        out = io.BytesIO()
        torch.export.save(torch.export.export(Plain(), (inputs,), dynamic_shapes=shapes), out)
        with pytest.raises(ProgramError, match=message) as caught:
            read_program(out.getvalue())
        assert "torch.export.export(" in str(caught.value) and "dynamic_shapes" in str(caught.value)


def test_a_batch_of_one_size_alone_is_refused(program: bytes) -> None:
    """Two sizes are tried where a program is published; a program need not take small ones."""
    found = read_program(program)
    assert read_program(write_program(replace(found, rows=(5, 6)))).rows == (5, 6)
    with pytest.raises(ProgramError, match="it takes batches of 5 to 5 rows"):
        read_program(write_program(replace(found, rows=(5, 5))))


TABLES = {"user": rows_of(50, 8), "item": rows_of(40, 4, 1)}


def spec(tmp_path: Path, scorer: Any, features: dict[str, Any] | None = None) -> Any:
    np.savez(tmp_path / "c.npz", **TABLES)
    features = features or {"user": {"table": "user"}, "clicked": {"table": "item", "pooling": "mean"}}
    raw = {
        "name": "ctr",
        "checkpoint": "c.npz",
        "tables": {t: {"key": t} for t in TABLES},
        "features": features,
        "scorer": scorer,
    }
    return parse_model(raw, tmp_path)


def test_a_version_carries_its_scorer(program: bytes, tmp_path: Path, root: Path) -> None:
    (tmp_path / "scorer.pt2").write_bytes(program)
    load(spec(tmp_path, {"program": "scorer.pt2"}), root)
    segment = Model(root, "ctr").attach()
    scorer = segment.header.scorer
    assert scorer and scorer.kind == "program"
    assert scorer.inputs == (
        ScorerInput("user", "user", 8),
        ScorerInput("clicked", "clicked", 4),
        ScorerInput("context", None, 3),
    )
    assert segment.program() == write_program(read_program(program))


def test_a_scorer_whose_bytes_changed_is_not_taken(program: bytes, tmp_path: Path, root: Path) -> None:
    (tmp_path / "scorer.pt2").write_bytes(program)
    path = load(spec(tmp_path, {"program": "scorer.pt2"}), root).path
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    scorer = Model(root, "ctr").attach().header.scorer
    assert scorer
    data[scorer.offset + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(SegmentError, match="the checksum of the scorer is wrong"):
        Model(root, "ctr").attach()


@pytest.mark.parametrize(
    ("scorer", "features", "message"),
    [
        ({"program": "nowhere.pt2"}, None, "nowhere.pt2: No such file"),
        (
            {"program": "s.pt2", "inputs": {"other": "user"}},
            None,
            "has no input 'other'; it has: user, clicked, context",
        ),
        (
            {"program": "s.pt2", "inputs": {"user": "clicked"}},
            None,
            r"takes \[batch, 8\], the vectors of feature 'clicked' are 4 wide",
        ),
        ({"program": "s.pt2"}, {"user": {"pooling": "none"}}, "is the feature 'user', which is not pooled"),
        ({"program": "s.pt2"}, {"other": {"table": "user"}}, "no input of the program is a feature"),
        ({"program": "s.pt2", "inputs": {"context": "nothing"}}, None, "expected input = feature"),
        ({"kind": "dot", "features": ["user", "clicked"]}, None, "dot of vectors that are 8 and 4 wide"),
        ({"kind": "dot", "features": ["user"]}, None, "expected two of: clicked, user"),
        (
            {"kind": "euclid", "features": ["user", "clicked"]},
            None,
            "kind is 'euclid'; expected one of: dot, cosine",
        ),
        ({"kind": "dot", "features": ["user", "user"]}, None, "two inputs are the same feature"),
        ({"program": "s.pt2"}, {"score": {"table": "user"}}, "a feature is called 'score'"),
    ],
)
def test_scorers_that_do_not_fit_are_refused(
    program: bytes, tmp_path: Path, root: Path, scorer: Any, features: Any, message: str
) -> None:
    """Before anything is published."""
    (tmp_path / "s.pt2").write_bytes(program)
    with pytest.raises((ProgramError, ModelError), match=message):
        load(spec(tmp_path, scorer, features), root)
    assert not Model(root, "ctr").versions()
