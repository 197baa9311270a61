"""The first model.toml of a checkpoint with tables of raw ids: which tables it proposes, and where their
ids are."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keyed_tables import ids_of
from support import rows_of, run_tableside

from tableside.loader.errors import ModelError
from tableside.loader.load.load import load
from tableside.loader.load.origin import is_live
from tableside.loader.model.first_model import first_model
from tableside.loader.model.model import read_model
from tableside.loader.model.specs import ModelSpec, RawIds
from tableside.loader.model.text import write_model
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat

MPZCH = Path(__file__).parent.parent.parent / "fixtures" / "torchrec_mpzch"


def propose(path: Path, folder: Path) -> tuple[ModelSpec, list[str]]:
    spec, skipped, sizes = first_model(path, None, RowFormat.INT8, folder)
    (folder / "model.toml").write_text(write_model(spec, skipped, sizes))
    assert all(f"# {size}\n" in (folder / "model.toml").read_text() for size in sizes.values())
    assert read_model(folder / "model.toml").tables == spec.tables  # what is written is read back the same
    return spec, skipped


def test_pairs_of_tensors(tmp_path: Path) -> None:
    """Vectors with ids are raw tables; beside them only what is called an embedding is a table, of row
    numbers."""
    values = rows_of(40, 4)
    np.savez(
        tmp_path / "c.npz",
        **{
            "user.ids": ids_of(40),
            "user.weight": values,
            "item_emb": values,
            "mlp": values,
            "step": np.arange(3),
        },
    )
    spec, skipped = propose(tmp_path / "c.npz", tmp_path)
    assert {t.name: (t.key, t.raw) for t in spec.tables} == {
        "user": ("user.weight", RawIds("user.ids")),
        "item_emb": ("item_emb", None),
    }
    assert "mlp: a matrix [40, 4] of fp32" in skipped and any(line.startswith("step: ") for line in skipped)
    assert not any(line.startswith("user") for line in skipped)


def test_torchrecs_mpzch(tmp_path: Path) -> None:
    """The table is called as TorchRec calls it; its ids are the module's identities."""
    (table,) = propose(MPZCH / "model.pt", tmp_path)[0].tables
    assert table.name == "user" and table.raw is not None
    assert (
        table.raw.key == "_managed_collision_collection._managed_collision_modules.user._hash_zch_identities"
    )


@pytest.mark.parametrize("cut", ["m/emb_vector", "d/user_emb_values.rank_0.world_size_1"])
def test_a_file_of_vectors_that_is_cut_to_half(cut: str, root: Path, tmp_path: Path) -> None:
    """The dim of files that do not say it is written, so that half of one is refused when it is loaded, or
    loaded again."""
    folder = tmp_path / cut.split("/")[0]
    folder.mkdir()
    key = folder / ("key" if folder.name == "m" else "user_emb_keys.rank_0.world_size_1")
    key.write_bytes(ids_of(40).tobytes())
    (tmp_path / cut).write_bytes(rows_of(40, 8).tobytes())
    assert [t.dim for t in propose(folder, tmp_path)[0].tables] == [8]
    spec = read_model(tmp_path / "model.toml")
    assert load(spec, root).version == 1
    assert is_live(spec, Model(root, spec.name))
    os.truncate(tmp_path / cut, 40 * 8 * 2)
    fault = r"dim is 8, and vectors of the checkpoint's '.*' have 4 values; a file of theirs was cut"
    for use in (load, lambda spec, root: is_live(spec, Model(root, spec.name))):
        with pytest.raises(ModelError, match=fault):
            use(spec, root)  # type: ignore[operator]


@pytest.mark.drawn(0.5)
def test_identities_without_vectors_are_named(tmp_path: Path) -> None:
    """Ids beside which no vectors of as many rows are found are left out, and `tableside init` says so;
    other tensors of int64 are no ids, and only the file tells of them."""
    key = "_managed_collision_collection._managed_collision_modules.user._hash_zch_identities"
    arrays = {
        "item.ids": ids_of(40),
        "item.weight": rows_of(40, 4),
        key: ids_of(7)[:, None],
        "step": np.arange(3),
    }
    np.savez(tmp_path / "c.npz", **arrays)  # type: ignore[arg-type]
    found = run_tableside("init", tmp_path / "c.npz", "--out", tmp_path / "model.toml")
    assert found.returncode == 0, found.stderr
    assert f"left out: {key}: ids, and no vectors of as many rows are found by their name" in found.stdout
    assert "step" not in found.stdout and "item.ids" not in found.stdout
    assert {"step", key} <= {line.split(":")[0] for line in propose(tmp_path / "c.npz", tmp_path)[1]}


def test_a_format_that_says_where_ids_are(tmp_path: Path) -> None:
    """A DynamicEmb dump: no id_key is written."""
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "user_emb_keys.rank_0.world_size_1").write_bytes(ids_of(5).tobytes())
    (tmp_path / "dump" / "user_emb_values.rank_0.world_size_1").write_bytes(rows_of(5, 4).tobytes())
    (table,) = propose(tmp_path / "dump", tmp_path)[0].tables
    assert (table.name, table.key, table.raw) == ("user", "user", RawIds())


@pytest.mark.drawn(0.5)
def test_parquet_by_the_command(tmp_path: Path) -> None:
    """`tableside init` names the columns of vectors and of ids."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows_of(5, 4).ravel()), 4)
    pq.write_table(pa.table({"id": ids_of(5), "vector": vectors}), tmp_path / "t.parquet")
    found = run_tableside("init", tmp_path / "t.parquet", "--out", tmp_path / "model.toml")
    assert found.returncode == 0, found.stderr
    (table,) = read_model(tmp_path / "model.toml").tables
    assert (table.key, table.raw) == ("vector", RawIds("id"))


def test_where_names_do_not_tell_it_says_what_is_missing(tmp_path: Path) -> None:
    """Two columns could be the ids."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows_of(5, 4).ravel()), 4)
    pq.write_table(
        pa.table({"user": ids_of(5), "item": ids_of(5), "vector": vectors}), tmp_path / "t.parquet"
    )
    with pytest.raises(
        ModelError,
        match="no table of raw ids is found by its names; vector: which column holds its ids cannot be told",
    ):
        first_model(tmp_path / "t.parquet", None, RowFormat.INT8, tmp_path)
