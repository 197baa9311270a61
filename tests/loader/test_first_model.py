"""The first model.toml that is proposed for a checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from tableside.loader.errors import ModelError
from tableside.loader.first_model import first_model
from tableside.loader.model import ModelSpec, read_model, write_model
from tableside.quant import RowFormat

TALL, FLAT = np.ones((8, 2), np.float32), np.ones((2, 2), np.float32)


def propose(folder: Path, name: str | None = None, file: str = "c.npz", **tensors: np.ndarray) -> tuple[ModelSpec, list[str]]:
    np.savez(folder / file, **tensors)
    return first_model(folder / file, name, RowFormat.INT4, folder)


def test_names_decide_where_they_say_embedding(tmp_path: Path) -> None:
    """Only tensors with "emb" in their names become tables; every other tensor is named with the reason."""
    found = {"sparse.embedding_bags.user.weight": FLAT, "item_emb.weight": FLAT, "tall": TALL, "bias": np.ones(3, np.float32)}
    spec, skipped = propose(tmp_path, **found)
    assert {t.name: t.key for t in spec.tables} == {"user": "sparse.embedding_bags.user.weight", "item_emb": "item_emb.weight"}
    assert all(t.row_format is RowFormat.INT4 for t in spec.tables)
    assert [(f.name, f.table, f.pooling) for f in spec.features] == [("user", "user", "sum"), ("item_emb", "item_emb", "sum")]
    assert any(line.startswith("bias: ") for line in skipped)
    assert "tall: a matrix" in skipped


def test_shapes_decide_where_no_name_does(tmp_path: Path) -> None:
    """Matrices of at least four times as many rows as columns; all of them where none is so tall."""
    spec, skipped = propose(tmp_path, tall=TALL, flat=FLAT)
    assert [t.key for t in spec.tables] == ["tall"] and skipped == ["flat: a matrix"]
    spec, skipped = propose(tmp_path, file="d.npz", flat=FLAT, other=FLAT)
    assert [t.key for t in spec.tables] == ["flat", "other"] and not skipped


def test_tables_of_one_name_are_numbered(tmp_path: Path) -> None:
    """Names that differ only in what a name cannot hold, or in what lies before it, stay apart."""
    keys = ("a.embeddings.user.weight", "b.embeddings.user.weight", "c.embeddings.user.weight", "emb us", "emb/us")
    spec, _ = propose(tmp_path, **dict.fromkeys(keys, FLAT))
    assert [t.name for t in spec.tables] == ["user", "user_2", "user_3", "emb_us", "emb_us_2"]


def test_the_model_is_named_after_the_checkpoint(tmp_path: Path) -> None:
    """Or as it is asked for; a name that cannot be a model's is refused."""
    assert propose(tmp_path, file="_my model.v2.npz", emb=TALL)[0].name == "my_model"
    assert propose(tmp_path, "ads", emb=TALL)[0].name == "ads"
    with pytest.raises(ModelError, match=r"model name '\.\./ads'"):
        propose(tmp_path, "../ads", emb=TALL)


def test_the_path_is_relative_where_the_checkpoint_lies_below_the_folder(tmp_path: Path) -> None:
    """So that model.toml and checkpoint can be moved together; what is written is read back as the same specification."""
    spec, skipped = propose(tmp_path, emb=TALL)
    assert spec.checkpoint == Path("c.npz")
    (tmp_path / "model.toml").write_text(write_model(spec, skipped))
    assert read_model(tmp_path / "model.toml").tables == spec.tables
    (tmp_path / "elsewhere").mkdir()
    elsewhere, _ = first_model(tmp_path / "c.npz", None, RowFormat.INT8, tmp_path / "elsewhere")
    assert elsewhere.checkpoint == (tmp_path / "c.npz").resolve()


def test_a_checkpoint_without_matrices_is_refused(tmp_path: Path) -> None:
    """With its name and what was expected of it."""
    with pytest.raises(ModelError, match=r"c\.npz: no tensor in it is a matrix of fp32, fp16 or bf16"):
        propose(tmp_path, bias=np.ones(3, np.float32))
