"""The first model.toml that is proposed for a checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from tableside.loader.errors import ModelError
from tableside.loader.model.first_model import first_model
from tableside.loader.model.model import read_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.model.text import write_model
from tableside.quant import RowFormat

TALL, FLAT = np.ones((8, 2), np.float32), np.ones((2, 2), np.float32)


def propose(
    folder: Path, name: str | None = None, file: str = "c.npz", **tensors: np.ndarray
) -> tuple[ModelSpec, list[str]]:
    np.savez(folder / file, **tensors)
    return first_model(folder / file, name, RowFormat.INT4, folder)[:2]


def test_names_and_shapes_decide(tmp_path: Path) -> None:
    """A name with "emb" in it, or four times as many rows as columns; every other tensor is named with
    why."""
    found = {
        "sparse.embedding_bags.user.weight": FLAT,
        "item_emb.weight": FLAT,
        "tall": TALL,
        "bias": np.ones(3, np.float32),
    }
    spec, skipped = propose(tmp_path, **found, flat=FLAT)
    keys = {"user": "sparse.embedding_bags.user.weight", "item_emb": "item_emb.weight", "tall": "tall"}
    assert {t.name: t.key for t in spec.tables} == keys
    assert all(t.row_format is RowFormat.INT4 for t in spec.tables)
    assert [(f.name, f.table, f.pooling) for f in spec.features] == [(t, t, "sum") for t in keys]
    assert any(line.startswith("bias: ") for line in skipped)
    assert "flat: a matrix [2, 2] of fp32" in skipped


def test_all_matrices_where_neither_name_nor_shape_says_so(tmp_path: Path) -> None:
    """Nothing is tall or called an embedding."""
    spec, skipped = propose(tmp_path, file="d.npz", flat=FLAT, other=FLAT)
    assert [t.key for t in spec.tables] == ["flat", "other"] and not skipped


def test_a_weight_with_a_bias_beside_it_is_a_linears(tmp_path: Path) -> None:
    """However tall it is and whatever it is called; the bias of another module does not count."""
    bias = np.ones(8, np.float32)
    found = {
        "mlp.0.weight": TALL,
        "mlp.0.bias": bias,
        "emb_proj.weight": TALL,
        "emb_proj.bias": bias,
        "users.weight": TALL,
    }
    spec, skipped = propose(tmp_path, **found, bias=bias)
    assert [t.key for t in spec.tables] == ["users.weight"]
    assert "mlp.0.weight: a matrix [8, 2] of fp32, with a bias beside it, as a Linear has" in skipped
    with pytest.raises(ModelError, match="without a bias beside it"):
        propose(tmp_path, file="linear.npz", **{"mlp.0.weight": TALL, "mlp.0.bias": bias})


def test_sizes_are_told(tmp_path: Path) -> None:
    """Rows, dim and bytes before and after, and of a table that cannot be loaded so, why."""
    np.savez(tmp_path / "c.npz", emb=np.ones((5000, 64), np.float16), emb_odd=np.ones((3, 3), np.float32))
    sizes = first_model(tmp_path / "c.npz", None, RowFormat.INT4, tmp_path).sizes
    packed = 5000 * RowFormat.INT4.row_bytes(64)
    assert sizes["emb"] == f"5,000 rows x 64: 0.6 MB of fp16, {packed / 1e6:.1f} MB as int4"
    assert sizes["emb_odd"].startswith("load refuses it: dim 3 does not fill whole bytes in int4")


def test_tables_of_one_name_are_numbered(tmp_path: Path) -> None:
    """Names that differ only in what a name cannot hold, or in what lies before it, stay apart."""
    keys = (
        "a.embeddings.user.weight",
        "b.embeddings.user.weight",
        "c.embeddings.user.weight",
        "emb us",
        "emb/us",
    )
    spec, _ = propose(tmp_path, **dict.fromkeys(keys, FLAT))
    assert [t.name for t in spec.tables] == ["user", "user_2", "user_3", "emb_us", "emb_us_2"]


def test_the_model_is_named_after_the_checkpoint(tmp_path: Path) -> None:
    """Or as it is asked for; a name that cannot be a model's is refused."""
    assert propose(tmp_path, file="_my model.v2.npz", emb=TALL)[0].name == "my_model"
    assert propose(tmp_path, "ads", emb=TALL)[0].name == "ads"
    with pytest.raises(ModelError, match=r"model name '\.\./ads'"):
        propose(tmp_path, "../ads", emb=TALL)


def test_the_path_is_relative_where_the_checkpoint_lies_below_the_folder(tmp_path: Path) -> None:
    """So that model.toml and checkpoint can be moved together; what is written is read back as the same
    specification."""
    spec, skipped = propose(tmp_path, emb=TALL)
    assert spec.checkpoint == Path("c.npz")
    (tmp_path / "model.toml").write_text(write_model(spec, skipped))
    assert read_model(tmp_path / "model.toml").tables == spec.tables
    (tmp_path / "elsewhere").mkdir()
    elsewhere, *_ = first_model(tmp_path / "c.npz", None, RowFormat.INT8, tmp_path / "elsewhere")
    assert elsewhere.checkpoint == (tmp_path / "c.npz").resolve()


def test_a_checkpoint_without_matrices_is_refused(tmp_path: Path) -> None:
    """With its name and what was expected of it."""
    with pytest.raises(ModelError, match=r"c\.npz: no tensor in it is a matrix of fp32, fp16 or bf16"):
        propose(tmp_path, bias=np.ones(3, np.float32))
