"""`load --only`: the tables that it does not name are those of the live version, byte for byte, and all
else comes from model.toml and the checkpoint."""

import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keyed_tables import ids_of
from support import rows_of, run_tableside

from tableside.loader.errors import LoaderError, ModelError, SegmentError, VersionError
from tableside.loader.load.load import Loaded, load
from tableside.loader.load.reuse import LiveTables
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.model.text import write_model
from tableside.loader.segment import layout
from tableside.loader.segment.header import Owner
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, Table, choose

ROWS, DIM = 40_000, 24  # more than one chunk of rows of int8, which take 32 bytes
FILL = [0.5] * DIM
DIMS = {
    "dense": DIM,
    "filled": DIM,
    "raw": 16,
    "array": 32,
}  # of raw ids: rows of 24 bytes in 32, which hold the id, and of 64
TABLES: dict[str, dict[str, Any]] = {
    "dense": {"key": "dense"},
    "filled": {"key": "filled", "missing": FILL},
    "raw": {"key": "raw.weight", "ids": "raw", "missing": "mean", "buckets": 8},
    "array": {"key": "array.weight", "ids": "raw", "row_format": "fp16", "buckets": 2},
}


def spec_of(folder: Path, seed: int, names: tuple[str, ...] = tuple(TABLES), **changed: Any) -> ModelSpec:
    """A model of a checkpoint whose values depend on `seed`, and hold the tables of `names` alone.
    changed: keys of tables, or of model.toml."""
    arrays: dict[str, np.ndarray] = {}
    for n, name in enumerate(names):
        key = TABLES[name]["key"]
        arrays[key] = rows_of(ROWS, DIMS[name], 10 * seed + n)
        if "ids" in TABLES[name]:
            arrays[key.replace("weight", "ids")] = ids_of(ROWS, seed)
    path = folder / f"checkpoint-{seed}.npz"
    if not path.exists():
        np.savez(path, **arrays)  # type: ignore[arg-type]
    tables = {
        name: {"row_format": "int8", **table, **changed.get(name, {})} for name, table in TABLES.items()
    }
    more = {key: value for key, value in changed.items() if key not in TABLES}
    return parse_model({"name": "demo", "checkpoint": path.name, "tables": tables, **more}, folder)


def only(*names: str) -> LoadSettings:
    return LoadSettings(threads=2, only=names)


def found(table: Table, ids: np.ndarray) -> np.ndarray:
    return choose().lookup(table, ids, pooling=Pooling.NONE)


@pytest.fixture
def first(root: Path, tmp_path: Path) -> Loaded:
    """Version 1, with all tables of seed 1."""
    return load(spec_of(tmp_path, 1), root)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.drawn(1)
def test_the_other_tables_are_those_of_the_live_version(
    first: Loaded, root: Path, tmp_path: Path, name: str
) -> None:
    """One table comes from a checkpoint that has no other; every byte of the others, and what they answer
    to every id, is that of the version before. All checksums are right."""
    loaded = load(spec_of(tmp_path, 2, (name,)), root, only(name))
    before, after = Model(root, "demo").attach(1), Model(root, "demo").attach()
    assert (loaded.version, after.header.version) == (2, 2)
    assert list(after.tables) == list(TABLES)
    for n, table in enumerate(TABLES):
        is_same = np.array_equal(before.tables[table].packed, after.tables[table].packed)
        assert is_same == (table != name), table
        seed = 2 if table == name else 1
        ids = ids_of(ROWS, seed) if "ids" in TABLES[table] else np.arange(ROWS)
        values = rows_of(ROWS, DIMS[table], 10 * seed + (0 if table == name else n))
        np.testing.assert_allclose(
            found(after.tables[table], ids), values, atol=0.05
        )  # int8's step is 1/255 of the span, of 12
    with pytest.raises(LoaderError):  # and the checkpoint really lacks them
        load(spec_of(tmp_path, 2, (name,)), root)


def test_a_load_of_some_gives_what_a_load_of_all_gives(first: Loaded, root: Path, tmp_path: Path) -> None:
    """Where the checkpoint's other tables did not change, the segments differ in their headers alone."""
    spec = spec_of(tmp_path, 1)
    load(spec, root, only("raw", "dense"))
    assert Model(root, "demo").attach(1).content() == Model(root, "demo").attach(2).content()


def test_the_header_says_what_was_taken_over(first: Loaded, root: Path, tmp_path: Path) -> None:
    """From which version, and which version read each table; what verified its rows stays known. An absent
    id of a table that was taken over is still answered by its own policy."""
    load(spec_of(tmp_path, 2, ("raw",)), root, only("raw"))
    loaded = load(spec_of(tmp_path, 3, ("dense",)), root, only("dense"))
    source = loaded.header.source
    assert source["reused"] == {"version": 2, "tables": {"filled": 1, "raw": 2, "array": 1}}
    assert set(source["verified"]) == set(TABLES) and len(source["files"]) == 1
    assert "reused" not in first.header.source
    filled = Model(root, "demo").attach().tables["filled"]
    np.testing.assert_allclose(
        found(filled, np.array([-7])), [FILL], atol=1e-3
    )  # one value: scale 0, bias in fp16


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        (
            "dense",
            {"row_format": "fp16"},
            r"row_format is 'fp16'; version 1 of model 'demo', which is live, has 'int8'",
        ),
        ("dense", {"dim": 12}, "dim is 12; version 1 of model 'demo', which is live, has 24"),
        ("dense", {"row_alignment": 16}, r"the size of a row \(row_alignment\) is 32; .* has 28"),
        ("dense", {"key": "other"}, "key is 'other'; .* has 'dense'"),
        ("dense", {"missing": "zero"}, "missing is 'zero'; .* has 'error'"),
        ("dense", {"ids": "raw"}, "ids is 'raw'; .* has 'row'"),
        ("raw", {"buckets": 16}, "buckets is 16; .* has 8"),
        ("raw", {"bucket_ids": 5}, "bucket_ids is 5; .* has 0"),
        ("raw", {"missing": "error"}, "missing is 'error'; .* has 'mean'"),
        (
            "filled",
            {"missing": [0.25] * DIM},
            "missing is another vector than that of version 1 of model 'demo', which is live",
        ),
        ("filled", {"missing": [0.25] * 3}, "missing has 3 numbers; the table's dim is 24"),
    ],
)
def test_a_table_that_is_described_otherwise_is_refused(
    first: Loaded, root: Path, tmp_path: Path, table: str, change: Mapping[str, Any], message: str
) -> None:
    """The error names the table, both settings and the remedy; nothing is published. Where it is among the
    tables that are loaded, it may change."""
    spec = spec_of(tmp_path, 1, **{table: change})
    with pytest.raises(ModelError, match=rf"\[tables.{table}\]: {message}") as error:
        load(spec, root, only("array"))
    assert "without --only" in str(error.value) or "numbers" in str(error.value)
    assert Model(root, "demo").versions() == [1] and not list((root / "demo").glob("*.partial"))
    LiveTables(spec, (table,), Model(root, "demo"), choose())


def test_tables_that_are_not_there_are_refused(root: Path, tmp_path: Path) -> None:
    """A name that model.toml lacks, no live version, and a live version that lacks a table."""
    spec = spec_of(tmp_path, 1)
    with pytest.raises(
        ModelError, match="--only rwa: model 'demo' has no such table; it has: dense, filled, raw, array"
    ):
        load(spec, root, only("rwa"))
    with pytest.raises(VersionError, match="no version is live"):
        load(spec, root, only("raw"))
    load(replace(spec, tables=spec.tables[:1], features=spec.features[:1]), root)
    with pytest.raises(
        ModelError, match=r"\[tables.filled\]: version 1 of model 'demo', which is live, has no such table"
    ):
        load(spec, root, only("raw"))
    assert load(spec, root, only("filled", "raw", "array")).version == 2


def test_damage_is_not_published_again(first: Loaded, root: Path, tmp_path: Path) -> None:
    """One bit of the live version changed: the load names the table and rows, and publishes nothing. Rows
    and index alike."""
    spec, path = spec_of(tmp_path, 1), first.path
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    tables = {t.name: t for t in first.header.tables}
    ids = tables["raw"].ids
    assert ids is not None and ids.index is not None
    pilots = (
        ids.index.offset + (ids.index.owned + 1) * 16
    )  # behind the directory, which is looked at whenever one attaches
    in_rows = tables["raw"].offset + 5
    for offset, message in (
        (in_rows, r"table 'raw', rows \[0, 32768\)"),
        (pilots, "id index of table 'raw'"),
    ):
        with path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), offset)
            with pytest.raises(
                SegmentError, match=message + ".*: the checksum is wrong.*; load the whole model"
            ):
                load(spec, root, only("dense"))
            os.pwrite(file.fileno(), byte, offset)
    assert Model(root, "demo").versions() == [1]
    assert load(spec, root, only("dense")).version == 2


@pytest.mark.drawn(0.5)
def test_a_version_that_went_live_meanwhile_ends_the_load(
    first: Loaded, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads of one table each: the later one does not take back what the earlier one published."""
    spec = spec_of(tmp_path, 1)
    inner = Model.loading

    def later(self: Model, group: str | None = None) -> Any:
        monkeypatch.setattr(Model, "loading", inner)
        load(
            spec_of(tmp_path, 2, ("raw",)), root, only("raw")
        )  # between the look at the live version and the lock
        return inner(self, group)

    monkeypatch.setattr(Model, "loading", later)
    with pytest.raises(
        VersionError, match=r"version 2 of model 'demo' went live while tables of version 1 .*; load again"
    ):
        load(spec, root, only("dense"))
    assert Model(root, "demo").versions() == [1, 2]
    load(spec, root, only("dense"))
    np.testing.assert_array_equal(
        Model(root, "demo").attach().tables["raw"].packed, Model(root, "demo").attach(2).tables["raw"].packed
    )


def test_chunks_of_another_size_get_checksums_of_their_own(
    first: Loaded, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that makes smaller chunks takes tables over from one that made larger ones."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", 1 << 18)
    load(spec_of(tmp_path, 1), root, only("raw"))
    after = Model(root, "demo").attach()  # verified
    stored = {t.name: t for t in after.header.tables}
    assert stored["dense"].chunk_rows < first.header.tables[0].chunk_rows
    np.testing.assert_array_equal(
        after.tables["dense"].packed, Model(root, "demo").attach(1).tables["dense"].packed
    )


def test_a_share_of_a_version_is_no_source(root: Path, tmp_path: Path) -> None:
    """Its tables are not whole."""
    spec = spec_of(tmp_path, 1, ("dense",))
    spec = replace(spec, tables=spec.tables[:1], features=spec.features[:1])
    model = Model(root, "demo")
    loaded = load(spec, root)
    with model.loading() as version:
        header = replace(loaded.header, version=version, owner=Owner("demo", 1, 1, 5))
        writer = model.writer(version, header)
        writer.seal({})
        model.publish(version)
    assert isinstance(model.attach(), Segment)
    with pytest.raises(ModelError, match="version 2 of model 'demo' is share 1 of 5 of a model"):
        load(spec_of(tmp_path, 1, ("dense",)), root, only("raw", "filled"))


def test_features_come_from_model_toml(first: Loaded, root: Path, tmp_path: Path) -> None:
    """What is pooled and scored may change with one table."""
    features = {"mean": {"table": "dense", "pooling": "mean"}, "other": {"table": "filled"}}
    scorer = {"kind": "dot", "features": ["mean", "other"]}
    loaded = load(spec_of(tmp_path, 1, features=features, scorer=scorer), root, only("dense"))
    assert [f.name for f in loaded.header.features] == ["mean", "other"]
    assert loaded.header.scorer is not None and loaded.header.scorer.inputs[1].width == DIM


@pytest.mark.thorough
def test_the_command_names_what_it_took_over(first: Loaded, root: Path, tmp_path: Path) -> None:
    """`tableside load --only`, twice for two tables; `inspect` says the same later."""
    spec = spec_of(tmp_path, 1)
    plain = replace(spec, tables=tuple(t for t in spec.tables if t.raw is None), features=spec.features[:2])
    (tmp_path / "model.toml").write_text(write_model(plain, []))
    result = run_tableside("load", tmp_path / "model.toml", "--only", "dense", root=root)
    assert result.returncode == 0, result.stderr
    assert "taken over from version 1: filled" in result.stdout
    assert "taken over from version 1: filled" in run_tableside("inspect", "demo", root=root).stdout
    result = run_tableside("load", tmp_path / "model.toml", "--only", "dense", "--only", "filled", root=root)
    assert result.returncode == 0 and "taken over" not in result.stdout
    refused = run_tableside("load", tmp_path / "model.toml", "--only", "raw", root=root)
    assert refused.returncode == 1 and "--only raw: model 'demo' has no such table" in refused.stderr
