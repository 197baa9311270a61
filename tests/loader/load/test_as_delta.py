"""`load --as-delta`: what differs in a checkpoint becomes a delta. Every answer is that of a load then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keyed_tables import ids_of
from support import rows_of, run_tableside

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import CheckpointError, ModelError, VersionError
from tableside.loader.load import comparison
from tableside.loader.load.as_delta import load_as_delta
from tableside.loader.load.load import load
from tableside.loader.load.origin import is_live
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.model.text import write_model
from tableside.loader.versions.states import State, attach_state, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose

ROWS, DIM = 20_000, 16
DENSE, IDS = rows_of(ROWS, DIM, 1), ids_of(ROWS, 1)
RAW = rows_of(ROWS, DIM, 2)
TABLES: dict[str, dict[str, Any]] = {
    "dense": {"key": "dense"},
    "zeros": {"key": "dense", "missing": "zero", "row_format": "int4"},
    "raw": {"key": "raw.weight", "ids": "raw", "missing": "zero", "buckets": 4},
}
SETTINGS = LoadSettings(threads=2)


def spec_of(
    folder: Path, rows: np.ndarray, vectors: np.ndarray, ids: np.ndarray = IDS, **changed: Any
) -> ModelSpec:
    """A model.toml of three tables, and a checkpoint of its own."""
    path = folder / f"{len(list(folder.glob('*.npz')))}.npz"
    arrays: dict[str, Any] = {"dense": rows, "raw.weight": vectors, "raw.ids": ids}
    np.savez(path, **arrays)
    tables = {name: {"row_format": "int8", **t, **changed.get(name, {})} for name, t in TABLES.items()}
    return parse_model({"name": "demo", "checkpoint": path.name, "tables": tables}, folder)


@pytest.fixture
def first(root: Path, tmp_path: Path) -> ModelSpec:
    """Version 1."""
    spec = spec_of(tmp_path, DENSE, RAW)
    load(spec, root)
    return spec


def changed(values: np.ndarray, *rows: int) -> np.ndarray:
    values = values.copy()
    values[list(rows)] += 1
    return values


def check(root: Path, tmp_path: Path, spec: ModelSpec, ids: np.ndarray = IDS) -> None:
    """The live state answers all ids, and some that no table has, as a version that was loaded from the same
    checkpoint."""
    load(spec, tmp_path / "other")
    live, whole = attach_state(Model(root, "demo")), Model(tmp_path / "other", "demo").attach()
    for name in TABLES:
        asked = np.concatenate([IDS, ids, ids + 1]) if name == "raw" else np.arange(ROWS)
        found = [choose().lookup(s.tables[name], asked, pooling=Pooling.NONE) for s in (live, whole)]
        np.testing.assert_array_equal(*found)


@pytest.mark.drawn(0.5)
def test_rows_that_differ_are_published(first: ModelSpec, root: Path, tmp_path: Path) -> None:
    """Rows of row numbers and of raw ids, ids that came and ids that are gone, and over a delta again."""
    ids = IDS.copy()
    ids[50:60] += 1 << 40  # ten are gone, ten came
    second = spec_of(tmp_path, changed(DENSE, 3, 4, ROWS - 1), changed(RAW, 7), ids)
    seen: list[tuple[int, int]] = []
    result, why_not, compared = load_as_delta(second, root, SETTINGS, lambda *of: seen.append(of))
    assert result is not None and (why_not, compared) == ("", 3 * ROWS)
    assert result.state == State(1, 1) and result.rows == 3 + 3 + 21
    assert seen[-1] == (3 * ROWS, 3 * ROWS)
    check(root, tmp_path, second, ids)
    third = spec_of(tmp_path, changed(DENSE, 4, 5), changed(RAW, 8)[::-1].copy(), ids[::-1].copy())
    result, *_ = load_as_delta(third, root, SETTINGS)
    assert result is not None and result.state == State(1, 2)
    check(root, tmp_path, third, ids)
    result, *_ = load_as_delta(first, root, SETTINGS)
    assert result is not None and result.state == State(1, 3)
    check(root, tmp_path, first)


def test_the_same_rows_publish_a_position_alone(first: ModelSpec, root: Path, tmp_path: Path) -> None:
    """Then the checkpoint is the live one, for `serve`, also after a compaction; and one before is not."""
    second = spec_of(tmp_path, DENSE, RAW)
    model = Model(root, "demo")
    assert is_live(first, model) and not is_live(second, model)
    result, *_ = load_as_delta(second, root, SETTINGS)
    assert result is not None and (result.rows, result.entries) == (0, 0)
    assert is_live(second, model) and not is_live(first, model)
    compact(model)
    assert state_of(model.record()) == State(2)
    assert is_live(second, model) and not is_live(first, model)
    load(first, root)
    assert is_live(first, model) and not is_live(second, model)


def test_changes_since_are_overwritten(first: ModelSpec, root: Path, tmp_path: Path) -> None:
    """What a follower changed, deleted and inserted is what the checkpoint says."""
    model = Model(root, "demo")
    vectors = np.ones((2, DIM), np.float32)
    apply(
        model,
        ChangeBatch(
            iter(
                [
                    TableChanges("dense", np.arange(2), vectors),
                    TableChanges("zeros", np.arange(2), vectors, np.array([True, False])),
                    TableChanges("raw", IDS[:2], vectors, np.array([True, False])),
                    TableChanges("raw", np.array([1 << 50, 1 << 51]), vectors),
                ]
            )
        ),
    )
    result, *_ = load_as_delta(first, root, SETTINGS)
    assert result is not None and result.rows == 8
    check(root, tmp_path, first, np.concatenate([IDS, [1 << 50, 1 << 51]]))


UNFIT: dict[str, tuple[Callable[[Path], ModelSpec], str]] = {
    "too many": (
        lambda f: spec_of(f, DENSE + 1, RAW),
        "more than 10% of the rows' bytes differ",
    ),
    "more rows": (
        lambda f: spec_of(f, np.concatenate([DENSE, DENSE[:1]]), RAW),
        r"table 'dense' has 20,001 rows, and not 20,000",
    ),
    "another model.toml": (
        lambda f: spec_of(f, DENSE, RAW, dense={"row_format": "fp16"}),
        "version 1 was loaded with another model.toml or program",
    ),
    "an id twice": (
        lambda f: spec_of(f, DENSE, RAW, np.concatenate([IDS[:-1], IDS[:1]])),
        "table 'raw': an id comes twice",
    ),
    "most ids gone": (
        lambda f: spec_of(f, DENSE, RAW[:100], IDS[:100]),
        "more than 10% of the rows' bytes differ",
    ),
    "a new id twice": (
        lambda f: spec_of(f, DENSE, RAW, np.concatenate([IDS[:-2], [1 << 50] * 2])),
        "table 'raw': an id comes twice",
    ),
    "a value too large": (
        lambda f: spec_of(f, np.where(np.arange(ROWS)[:, None] == 9, np.inf, DENSE), RAW),
        "table 'dense' has a value that int8 cannot represent",
    ),
}


@pytest.mark.parametrize("unfit", UNFIT)
@pytest.mark.drawn(3)
def test_what_a_delta_cannot_say_is_not_published(
    first: ModelSpec, root: Path, tmp_path: Path, unfit: str
) -> None:
    make, why = UNFIT[unfit]
    result, why_not, _ = load_as_delta(make(tmp_path), root, SETTINGS)
    assert result is None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(why_not)
    assert state_of(Model(root, "demo").record()) == State(1)
    assert [p.name for p in (root / "demo").glob("*.partial")] == []


@pytest.mark.parametrize(("table", "missing"), [("raw", "mean"), ("zeros", "mean")])
def test_a_mean_of_all_rows_needs_a_load(root: Path, tmp_path: Path, table: str, missing: str) -> None:
    spec = spec_of(tmp_path, DENSE, RAW, **{table: {"missing": missing}})
    load(spec, root)
    result, why_not, _ = load_as_delta(spec, root, SETTINGS)
    assert result is None and why_not == f"table '{table}' has missing = 'mean', which depends on all rows"


def test_a_damaged_version_is_loaded_anew(first: ModelSpec, root: Path, tmp_path: Path) -> None:
    path = Model(root, "demo").path(1)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\xff" * 8)
    result, why_not, _ = load_as_delta(first, root, SETTINGS)
    assert result is None and "the checksum is wrong" in why_not


def test_ids_that_have_no_bucket_are_refused_by_a_load(root: Path, tmp_path: Path) -> None:
    """And no delta brings them."""
    ids = np.arange(ROWS, dtype=np.int64)
    settings = {"raw": {"bucket_ids": ROWS // 4}}
    load(spec_of(tmp_path, DENSE, RAW, ids, **settings), root)
    ids[5] = 2 * ROWS
    result, why_not, _ = load_as_delta(spec_of(tmp_path, DENSE, RAW, ids, **settings), root, SETTINGS)
    assert result is None and f"id {2 * ROWS} is in no bucket" in why_not


def test_too_little_memory_is_refused(first: ModelSpec, root: Path) -> None:
    with pytest.raises(ModelError, match="max memory is 1 bytes; a load of this model needs at least"):
        load_as_delta(first, root, LoadSettings(max_memory_bytes=1))


def test_a_state_whose_delta_is_gone_is_loaded_anew(first: ModelSpec, root: Path, tmp_path: Path) -> None:
    load_as_delta(spec_of(tmp_path, changed(DENSE, 3), RAW), root, SETTINGS)
    (root / "demo" / "1+1.delta").unlink()
    result, why_not, _ = load_as_delta(first, root, SETTINGS)
    assert result is None and "keeps no state 1+1" in why_not
    assert not is_live(first, Model(root, "demo"))


def test_a_model_that_was_never_loaded_is_loaded(root: Path, tmp_path: Path) -> None:
    assert load_as_delta(spec_of(tmp_path, DENSE, RAW), root)[:2] == (None, "no version is live")


def test_a_state_that_came_meanwhile_is_not_overwritten(
    first: ModelSpec, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compared is no longer live."""
    model, finish = Model(root, "demo"), comparison.Verification.finish

    def apply_now(self: Any) -> None:
        changes = TableChanges("dense", np.arange(2), np.ones((2, DIM), np.float32))
        apply(model, ChangeBatch(iter([changes])))
        finish(self)

    monkeypatch.setattr(comparison.Verification, "finish", apply_now)
    with pytest.raises(VersionError, match=r"state 1\+1 .* became live while changes were applied over 1"):
        load_as_delta(spec_of(tmp_path, changed(DENSE, 3), RAW), root, SETTINGS)
    assert state_of(model.record()) == State(1, 1)


def test_a_damaged_checkpoint_changes_nothing(first: ModelSpec, root: Path, tmp_path: Path) -> None:
    """Its CRC-32 is checked before anything is published."""
    spec = spec_of(tmp_path, changed(DENSE, 3), RAW)
    data = bytearray(spec.checkpoint.read_bytes())
    at = data.find(DENSE[9].tobytes())
    data[at] ^= 1
    spec.checkpoint.write_bytes(data)
    with pytest.raises(CheckpointError, match="CRC-32"):
        load_as_delta(spec, root, SETTINGS)
    assert state_of(Model(root, "demo").record()) == State(1)


@pytest.mark.thorough
def test_the_command_publishes_changes_or_a_version(first: ModelSpec, root: Path, tmp_path: Path) -> None:
    def run(spec: ModelSpec, *options: str) -> Any:
        (tmp_path / "model.toml").write_text(write_model(spec, []))
        return run_tableside("load", str(tmp_path / "model.toml"), "--root", str(root), *options)

    assert run(first).returncode == 0
    few = run(spec_of(tmp_path, changed(DENSE, 3), RAW), "--as-delta")
    assert few.returncode == 0, few.stderr
    assert "demo state 2+1: 2 of 60,000 rows differ" in few.stdout
    many = run(spec_of(tmp_path, 2 * DENSE, RAW), "--as-delta")
    assert many.returncode == 0, many.stderr
    assert "more than 10% of the rows' bytes differ: it is loaded as a new version" in many.stderr
    assert "demo version 3" in many.stdout
    refused = run(first, "--as-delta", "--only", "dense")
    assert refused.returncode == 1 and "leave out --only, --no-activate and --group" in refused.stderr
