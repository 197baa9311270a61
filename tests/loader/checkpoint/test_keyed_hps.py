"""`tableside init` from HPS's ps.json: the tables of a model, their defaults, and what has no meaning
here, named."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from keyed_tables import ids_of, read
from support import rows_of, run_tableside

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.errors import LoaderError, ModelError
from tableside.loader.model.hps import hps_model, hps_text, is_hps
from tableside.loader.model.model import read_model
from tableside.loader.model.specs import FeatureSpec, MissingSpec, RawIds
from tableside.quant import RowFormat

DIMS = (1, 16)


def sparse_model(folder: Path, rows: int, dim: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "key").write_bytes(ids_of(rows).tobytes())
    (folder / "emb_vector").write_bytes(rows_of(rows, dim).tobytes())
    return folder


def wdl(folder: Path, **changed: Any) -> dict[str, Any]:
    """The model of the documentation's example, its tables written below `folder`."""
    names = ("wdl0_sparse_2000.model", "wdl1_sparse_2000.model")
    for name, dim in zip(names, DIMS, strict=True):
        if not (folder / name).exists():
            sparse_model(folder / name, 20_000, dim)
    return {
        **{
            "model": "hps_wdl",
            "sparse_files": [str(folder / name) for name in names],
            "num_of_worker_buffer_in_pool": 3,
        },
        **{"embedding_table_names": ["table1", "table2"], "embedding_vecsize_per_table": list(DIMS)},
        **{
            "maxnum_catfeature_query_per_table_per_sample": [2, 26],
            "default_value_for_each_table": [0.0, 0.25],
        },
        **{
            "deployed_device_list": [0, 1],
            "max_batch_size": 1024,
            "hit_rate_threshold": 0.9,
            "gpucacheper": 0.5,
            "gpucache": True,
        },
        **changed,
    }


def ps_json(path: Path, *models: Any, **others: Any) -> Path:
    path.write_text(
        json.dumps(
            {"supportlonglong": True, "volatile_db": {"type": "hash_map"}, "models": list(models), **others}
        )
    )
    return path


def test_a_ps_json_becomes_a_model(tmp_path: Path) -> None:
    """Paths, names and defaults; the cache's share as a budget; the rest by name. What is written is read
    back the same."""
    path = ps_json(tmp_path / "ps.json", wdl(tmp_path / "models" / "1"), persistent_db={}, update_source={})
    spec, notes = hps_model(path, None, RowFormat.FP32, tmp_path)
    assert (spec.name, spec.checkpoint) == ("hps_wdl", Path("models/1"))
    assert [(t.name, t.key, t.raw) for t in spec.tables] == [
        ("table1", "wdl0_sparse_2000.model", RawIds()),
        ("table2", "wdl1_sparse_2000.model", RawIds()),
    ]
    assert [t.missing for t in spec.tables] == [MissingSpec("zero"), MissingSpec("constant", (0.25,) * 16)]
    assert spec.features == (FeatureSpec("table1", "table1", "none"), FeatureSpec("table2", "table2", "none"))
    packed = 20_000 * sum(RowFormat.FP32.row_bytes(dim) for dim in DIMS)
    assert notes == [
        f"gpucacheper 0.5: tableside serve --devices 0,1 --hbm-budget {-(-packed // 2 // 2**20)}MiB, and "
        "more for the ids",
        "volatile_db, persistent_db: rows lie in shared memory, or on a disk (--root)",
        "update_source: rows change by tableside follow (a folder, Redis or Kafka) and tableside apply",
        "supportlonglong: ids are always int64",
        "without meaning here: hit_rate_threshold, max_batch_size, "
        "maxnum_catfeature_query_per_table_per_sample, "
        "num_of_worker_buffer_in_pool",
    ]
    (tmp_path / "model.toml").write_text(text := hps_text(spec, path, notes))
    again = read_model(tmp_path / "model.toml")
    assert (again.tables, again.features) == (spec.tables, spec.features)
    assert all(f"#   {note}\n" in text for note in notes)
    with open_checkpoint(again.checkpoint) as found:
        assert read(found.keyed(again.tables[1].key)).values.shape == (20_000, 16)


def test_tables_in_several_folders(tmp_path: Path) -> None:
    """Keys are paths below the folder that all have in common; relative paths begin where the ps.json
    lies."""
    sparse_model(tmp_path / "a" / "1" / "m", 5, 1)
    sparse_model(tmp_path / "b" / "1" / "m", 5, 16)
    path = ps_json(tmp_path / "ps.json", wdl(tmp_path / "other", sparse_files=["a/1/m", "b/1/m"]))
    spec, _ = hps_model(path, "mine", RowFormat.INT8, tmp_path / "elsewhere")
    assert (spec.name, spec.checkpoint, [t.key for t in spec.tables]) == (
        "mine",
        tmp_path,
        ["a/1/m", "b/1/m"],
    )


def test_names_of_tables_and_no_gpu_cache(tmp_path: Path) -> None:
    """HPS's own names where there are none, and no budget where nothing is cached."""
    model = wdl(tmp_path / "m", gpucache=False)
    del model["embedding_table_names"]
    spec, notes = hps_model(ps_json(tmp_path / "ps.json", model), None, RowFormat.INT8, tmp_path)
    assert [t.name for t in spec.tables] == ["sparse_embedding0", "sparse_embedding1"]
    assert not any("hbm-budget" in note for note in notes)


def test_one_of_several_models(tmp_path: Path) -> None:
    """Is chosen by its name; without one, the names are said."""
    path = ps_json(tmp_path / "ps.json", wdl(tmp_path / "m"), wdl(tmp_path / "m", model="other"))
    assert hps_model(path, "other", RowFormat.INT8, tmp_path)[0].name == "other"
    for name in (None, "third"):
        with pytest.raises(
            ModelError, match=r"it describes 2 models; choose one with --name: hps_wdl, other"
        ):
            hps_model(path, name, RowFormat.INT8, tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"sparse_files": ["s3://bucket/a", "s3://bucket/b"]},
            "expected a folder of this machine, so copy it here",
        ),
        ({"sparse_files": ["nowhere", "nothing"]}, "the folder 'nowhere' of sparse_files does not exist"),
        ({"sparse_files": []}, r"sparse_files is \[\]; expected a list of str"),
        (
            {"embedding_vecsize_per_table": [1, 8]},
            "says 8 for 'table2', the files in .* have 16 values for each key",
        ),
        (
            {"embedding_vecsize_per_table": [1]},
            "embedding_vecsize_per_table has 1 entries, sparse_files has 2",
        ),
        (
            {"default_value_for_each_table": None},
            "default_value_for_each_table is None; expected a list of float",
        ),
        ({"default_value_for_each_table": [0.0, True]}, "expected a list of float"),
        ({"embedding_table_names": ["t", "t"]}, "two tables have the same name"),
        ({"embedding_table_names": ["t", "../u"]}, r"table name '\.\./u'"),
    ],
)
def test_a_ps_json_that_lies_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    """With the file, the key, and what was expected."""
    path = ps_json(tmp_path / "ps.json", wdl(tmp_path / "m", **changed))
    with pytest.raises(LoaderError, match=message):
        hps_model(path, None, RowFormat.INT8, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"models": []}', '{"models": [1]}', '{"models": {}}'])
def test_what_is_no_ps_json_is_refused(text: str, tmp_path: Path) -> None:
    """In one line."""
    (tmp_path / "ps.json").write_text(text)
    with pytest.raises(ModelError, match=r"ps\.json: (not JSON|expected HPS's configuration)"):
        hps_model(tmp_path / "ps.json", None, RowFormat.INT8, tmp_path)


def test_an_unknown_key_cannot_leave_its_comment(tmp_path: Path) -> None:
    """Names come from the file: a line break in one begins no line of the model.toml."""
    model = wdl(tmp_path / "m", **{"evil\n[tables.x]\n#": 1})
    path = ps_json(tmp_path / "ps.json", model)
    text = hps_text(
        *hps_model(path, None, RowFormat.INT8, tmp_path)[:1],
        path,
        hps_model(path, None, RowFormat.INT8, tmp_path)[1],
    )
    assert set(tomllib.loads(text)["tables"]) == {"table1", "table2"} and "evil" in text


def test_an_index_of_safetensors_is_no_ps_json() -> None:
    """Both are JSON."""
    assert (
        is_hps(Path("ps.json"))
        and not is_hps(Path("model.safetensors.index.json"))
        and not is_hps(Path("m.pt"))
    )


@pytest.mark.drawn(0.5)
def test_the_command(tmp_path: Path) -> None:
    """`tableside init ps.json` writes the model.toml and says what has no meaning here."""
    path = ps_json(tmp_path / "ps.json", wdl(tmp_path / "m"))
    found = run_tableside("init", path, "--out", tmp_path / "model.toml", "--row-format", "fp8")
    assert found.returncode == 0, found.stderr
    assert (
        "without meaning here: hit_rate_threshold" in found.stdout
        and "model hps_wdl with 2 tables" in found.stdout
    )
    assert [t.row_format for t in read_model(tmp_path / "model.toml").tables] == [RowFormat.FP8] * 2
