"""model.toml: what it accepts, and what each error says."""

from pathlib import Path

import pytest

from tableside.loader.errors import ModelError
from tableside.loader.model.model import parse_model, read_model
from tableside.loader.model.specs import EvalSpec, FeatureSpec, ModelSpec, ScorerSpec, TableSpec
from tableside.loader.model.text import write_model
from tableside.quant import RowFormat

pytestmark = pytest.mark.quick

GOOD = {
    "name": "ads",
    "checkpoint": "c.safetensors",
    "tables": {"user": {"key": "user.weight", "row_format": "int4"}},
    "features": {"clicked": {"table": "user", "pooling": "mean", "output": "fp16"}},
}


def test_a_whole_description() -> None:
    spec = parse_model(GOOD, Path("/models"))
    assert spec.checkpoint == Path("/models/c.safetensors")
    assert spec.tables == (TableSpec("user", "user.weight", RowFormat.INT4),)
    assert spec.features == (FeatureSpec("clicked", "user", "mean", "fp16"),)


def test_without_features_every_table_is_one() -> None:
    spec = parse_model({**GOOD, "features": {}}, Path())
    assert spec.features == (FeatureSpec("user", "user", "sum", "fp32"),)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    tables = (
        TableSpec("a", 'odd "key" \\ \n\t\x7f é', RowFormat.FP8),
        TableSpec("b:c", "b", RowFormat.INT2, dim=8),
    )
    spec = ModelSpec("m", Path("x.pt"), tables, (FeatureSpec("a", "a"), FeatureSpec("b:c", "b:c", "none")))
    (tmp_path / "model.toml").write_text(write_model(spec, ["dense: a matrix", 'evil\nname = "x"']))
    found = read_model(tmp_path / "model.toml")
    assert (found.tables, found.features) == (spec.tables, spec.features)


def test_what_is_written_as_a_comment_counts_without_its_hashes(tmp_path: Path) -> None:
    """Each of the optional sections that a first model.toml explains is read once its `#` are taken away."""
    tables = (TableSpec("a:b", "a", RowFormat.INT8), TableSpec("c", "c", RowFormat.FP16))
    text = write_model(
        ModelSpec("m", Path("x.pt"), tables, (FeatureSpec("a:b", "a:b"), FeatureSpec("c", "c"))),
        [],
        {"c": "7 rows"},
    )
    assert (
        "# 7 rows\n" in text
        and "# int2, int4, int8, fp8, fp16, fp32, fp8_e4m3, fp8_e4m3_block32, nvfp4\n" in text
        and "# none, sum, mean\n" in text
    )
    lines = text.splitlines()
    uncommented = [line.removeprefix("# ") for line in lines]
    program, towers = (i for i, line in enumerate(lines) if line == "# [scorer]")
    evaluation = lines.index("# [eval]")

    def read(begin: int, end: int) -> ModelSpec:
        chosen = [line for line in uncommented[begin:end] if "=" in line or line.startswith("[")]
        (tmp_path / "model.toml").write_text("\n".join(lines + chosen))
        return read_model(tmp_path / "model.toml")

    assert read(program, towers).scorer == ScorerSpec("program", tmp_path / "scorer.pt2", (("user", "a:b"),))
    assert read(towers, evaluation).scorer == ScorerSpec("cosine", features=("a:b", "c"))
    assert read(evaluation, len(lines)).evaluation == EvalSpec("clicked", (("a:b", ("user_id",)),))
    missing = [line.removeprefix("# ") if line.startswith("# missing") else line for line in lines]
    (tmp_path / "model.toml").write_text("\n".join(missing))
    assert read_model(tmp_path / "model.toml").tables == tables


RAW: dict[str, object] = {"key": "k", "ids": "raw", "missing": "zero"}
BAD_TTLS = ("", "30", "d", "0d", "-1d", "1.5h", "30 d", "2w", "\u0663d", "99999999d", 30, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../etc"}, "model name"),
        ({"name": None}, "model name"),
        ({"checkpoint": ""}, "checkpoint is ''"),
        ({"tables": {}}, "at least one table"),
        ({"tables": {"user": {}}}, r"\[tables.user\]: key is None"),
        (
            {"tables": {"user": {"key": "k", "row_format": "int3"}}},
            "row_format is 'int3'; expected one of: int2",
        ),
        ({"tables": {"user": {"key": "k", "rows": 3}}}, "unknown key 'rows'"),
        (
            {"tables": {"user": {"key": "k", "dim": 0}}},
            r"\[tables.user\]: dim is 0; expected how many values a vector has",
        ),
        (
            {"tables": {"user": {"key": "k", "row_alignment": 8}}},
            "row_alignment is 8; expected 4 or 16, or leave it out",
        ),
        ({"tables": {"user": {"key": "k", "dim": True}}}, "dim is True; expected how many"),
        (
            {"tables": {"user": {"key": "k", "dim": 8, "missing": [0.5, 1]}}},
            "missing has 2 numbers, and dim is 8",
        ),
        ({"tables": {"u.values": {"key": "k"}}}, "table name"),
        ({"tables": 3}, "expected sections"),
        ({"features": {"f": {"table": "item"}}}, "table 'item' is not described; expected one of: user"),
        ({"features": {"f": {"table": "user", "pooling": "max"}}}, "pooling is 'max'"),
        ({"features": {"f.lengths": {"table": "user"}}}, "feature name"),
        ({"features": {"f": {"table": ["user"]}}}, "is not described"),
        ({"colour": "dot"}, "unknown key 'colour'"),
        (
            {"tables": {"user": {"key": "k", "ttl": "30d"}}},
            r'\[tables.user\]: ttl is for raw ids; add ids = "raw", or leave it out',
        ),
        ({"tables": {"user": {"key": "k", "max_rows": 9}}}, "max_rows is for raw ids"),
        *(({"tables": {"user": RAW | {"ttl": ttl}}}, f"ttl is {ttl!r}; expected an age") for ttl in BAD_TTLS),
        *(
            ({"tables": {"user": RAW | {"max_rows": most}}}, f"max_rows is {most!r}; expected how many")
            for most in (0, -1, "9", True, 1.5, 2**63)
        ),
        (
            {"tables": {"user": {"key": "k", "ids": "raw", "ttl": "1d"}}},
            "drop ids, which requests may still name; say what they get then",
        ),
        (
            {"tables": {"user": {"key": "k", "tier": "rows://a:1"}, "item": RAW | {"ttl": "1d"}}},
            r"\[tables.item\]: ttl and max_rows are for models on one host",
        ),
    ],
)
def test_mistakes_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model({**GOOD, **change}, Path())


@pytest.mark.parametrize(("ttl", "ttl_s"), [("1s", 1), ("90m", 5400), ("12h", 43200), ("30d", 2592000)])
def test_tables_say_how_long_ids_live(ttl: str, ttl_s: int) -> None:
    (table,) = parse_model({**GOOD, "tables": {"user": RAW | {"ttl": ttl, "max_rows": 7}}}, Path()).tables
    assert table.raw is not None and (table.raw.ttl_s, table.raw.max_rows) == (ttl_s, 7)


def test_a_missing_file_names_init(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tableside init"):
        read_model(tmp_path / "model.toml")


def test_broken_toml_names_the_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text("name = \n")
    with pytest.raises(ModelError, match=r"model\.toml: .*line 1"):
        read_model(tmp_path / "model.toml")


@pytest.mark.parametrize("copies", [None, "numa", [1, 0]])
def test_copies_are_written_as_they_were_read(copies: object, tmp_path: Path) -> None:
    raw = {"name": "a", "checkpoint": "c", "tables": {"t": {"key": "k", "row_format": "int8"}}}
    spec = parse_model(raw if copies is None else {**raw, "copies": copies}, tmp_path)
    (tmp_path / "model.toml").write_text(write_model(spec, []))
    assert read_model(tmp_path / "model.toml").copies == spec.copies


def test_a_model_says_how_long_requests_wait_for_rows(tmp_path: Path) -> None:
    """It is written as it was read."""
    raw = {"name": "a", "checkpoint": "c", "tables": {"t": {"key": "k", "row_format": "int8"}}}
    for value in (0.05, 60, 1):
        spec = parse_model({**raw, "disk_timeout_s": value}, tmp_path)
        (tmp_path / "model.toml").write_text(write_model(spec, []))
        assert read_model(tmp_path / "model.toml").disk_timeout_s == spec.disk_timeout_s == value
    for wrong in (0, -1, 61, "1", True, float("nan")):
        with pytest.raises(ModelError, match=r"disk_timeout_s is .*expected seconds, above 0 and at most 60"):
            parse_model({**raw, "disk_timeout_s": wrong}, tmp_path)
