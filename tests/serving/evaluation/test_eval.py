"""`tableside eval`: Parquet and JSON Lines, one process and several, on the CPU, a GPU and Ray, compared and
gated."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tables
from dense_rounding import dense, filled
from evaluated import ROWS, TABLES, Sharp, data, evaluate, model, parts, publish, scores_of, vectors_of, write
from json_keys import documented_keys, keys_of
from raw_demo import DemoTable, publish_raw, random_ids
from scorers import exported
from support import rows_of

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.scorer import stored_scorer
from tableside.loader.model.specs import EvalSpec, FeatureSpec, ModelSpec, ScorerSpec
from tableside.loader.versions.states import State
from tableside.loader.versions.versions import Model
from tableside.quant import Precision
from tableside.serving.errors import ServingError
from tableside.serving.evaluation.data import data_files, ids_of, plan_shards, read
from tableside.serving.evaluation.quality import auc, quality
from tableside.serving.evaluation.work import Candidate, attach_or_publish
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.gpu


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize(("kind", "workers"), [("parquet", 2), ("jsonl", 1)])
def test_every_row_is_scored_once_and_rightly(root: Path, tmp_path: Path, kind: str, workers: int) -> None:
    publish(root, tmp_path)
    columns = data()
    out = tmp_path / "out"
    path = write(tmp_path, columns, kind)
    result = evaluate(
        root,
        "ctr",
        path,
        "--out",
        out,
        "--workers",
        workers,
        "--shard-rows",
        700,
        "--batch",
        300,
        "--slice",
        "kind",
    )
    assert result.returncode == 0, result.stderr
    found = parts(out)
    assert found.column("row").to_pylist() == [*range(ROWS // 2)] * 2
    assert found.column("label").to_pylist() == columns["label"]
    wanted = scores_of(columns)
    np.testing.assert_allclose(found.column("score_0").to_numpy(), wanted, rtol=1e-4, atol=1e-6)
    report = json.loads((out / "report.json").read_text())
    truth = quality(np.array(columns["label"]), found.column("score_0").to_numpy())
    assert report["overall"][0] == {**truth.__dict__}
    assert set(report["slices"]) == {"new", "old", "null"}
    assert sum(q[0]["rows"] for q in report["slices"].values()) == ROWS
    assert 0 < report["overall"][0]["ne"] < 1 and report["rows_per_s"] > 0
    assert "null  ctr@1" in result.stdout


def publish_raw_ids(root: Path, folder: Path, missing: str) -> dict[str, np.ndarray]:
    """The same model with tables of raw ids, whose default row is zero unless ids that are missing are
    refused; its ids."""
    (folder / "scorer.pt2").write_bytes(exported(Sharp(8, 4, 3), user=8, clicked=4, context=3))
    features = (FeatureSpec("user", "user", "sum", "fp32"), FeatureSpec("clicked", "item", "mean", "fp32"))
    ids = {name: random_ids(len(rows), seed) for seed, (name, rows) in enumerate(TABLES.items())}
    default = {
        name: None if missing == "error" else np.zeros(rows.shape[1], np.float32)
        for name, rows in TABLES.items()
    }
    demo = {n: DemoTable(ids[n], rows, default[n], "fp32", missing=missing) for n, rows in TABLES.items()}
    spec = ModelSpec("ctr", folder, (), features, ScorerSpec("program", folder / "scorer.pt2"))
    evaluation = EvalSpec("label", (("user", ("user_id",)), ("context", ("a", "b", "c"))))
    publish_raw(
        root, "ctr", demo, features, stored_scorer(spec, {n: t.dim for n, t in demo.items()}), evaluation
    )
    return ids


@pytest.mark.thorough
@pytest.mark.parametrize("missing", ["zero", "error"])
def test_missing_ids_are_scored_with_the_default_row(root: Path, tmp_path: Path, missing: str) -> None:
    """Some rows hold ids that no table has: scored as if these were rows of zeros, or refused by feature,
    position and id."""
    ids = publish_raw_ids(root, tmp_path, missing)
    rng, rows = np.random.default_rng(0), 400
    lacking = {
        name: len(table) for name, table in TABLES.items()
    }  # the row of zeros that ids which are missing get
    columns: dict[str, Any] = {"user_id": rng.integers(0, lacking["user"] + 1, rows)}
    columns["user_id"][7] = lacking["user"]
    columns["clicked"] = [
        rng.integers(lacking["item"] - 50, lacking["item"] + 1, n) for n in rng.integers(0, 6, rows)
    ]
    columns |= {name: rng.standard_normal(rows).astype(np.float32).tolist() for name in "abc"}
    columns["label"] = rng.integers(0, 2, rows).tolist()
    wanted = scores_of(
        {**columns, "clicked": [c.tolist() for c in columns["clicked"]]},
        {name: np.concatenate([table, np.zeros_like(table[:1])]) for name, table in TABLES.items()},
    )
    raw = {name: np.append(there, 4242) for name, there in ids.items()}
    columns["user_id"] = raw["user"][columns["user_id"]].tolist()
    columns["clicked"] = [raw["item"][clicked].tolist() for clicked in columns["clicked"]]
    out = tmp_path / "out"
    result = evaluate(
        root, "ctr", write(tmp_path, columns), "--out", out, "--batch", 150, "--shard-rows", 200
    )
    if missing == "error":
        assert result.returncode == 1 and "feature 'user': id 4242 at position" in result.stderr, (
            result.stderr
        )
        return
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(parts(out).column("score_0").to_numpy(), wanted, rtol=1e-4, atol=1e-6)
    lacks = {"user": columns["user_id"].count(4242), "item": sum(c.count(4242) for c in columns["clicked"])}
    report = json.loads((out / "report.json").read_text())
    assert report["ids_without_row_total"] == [{table: {"missing": count} for table, count in lacks.items()}]
    assert f"ctr@1: ids_without_row_total of table user: missing {lacks['user']}" in result.stdout
    again = evaluate(
        root, "ctr", tmp_path / "data-parquet", "--out", out, "--batch", 150, "--shard-rows", 200
    )
    assert again.returncode == 0 and f"of table item: missing {lacks['item']}" in again.stdout, again.stderr


@pytest.mark.thorough
def test_formats_are_compared_and_gated(root: Path, tmp_path: Path) -> None:
    """int8 passes; int2 does not, with exit code 3. The model.toml of a format is loaded for it, not
    activated."""
    publish(root, tmp_path)
    path = write(tmp_path, data())
    gate = ("--against", "ctr@1", "--max-ne-increase", 0.0005, "--shard-rows", 2000)
    int8 = evaluate(root, model(tmp_path, "int8"), path, "--out", tmp_path / "int8", *gate)
    assert int8.returncode == 0, int8.stderr + int8.stdout
    assert "loaded ctr version 2, not activated" in int8.stdout and "passed" in int8.stdout
    int2 = evaluate(root, model(tmp_path, "int2"), path, "--out", tmp_path / "int2", *gate)
    assert int2.returncode == 3, int2.stdout
    assert "FAILED: the increase of NE is larger" in int2.stdout
    report = json.loads((tmp_path / "int2" / "report.json").read_text())
    assert report["candidates"] == ["ctr@3", "ctr@1"] and report["passed"] is False
    told = evaluate(root, "ctr@3", path, "--out", tmp_path / "told", *gate, "--json")
    assert told.returncode == 3 and told.stdout.count("\n") == 1, told.stderr
    assert keys_of(json.loads(told.stdout)) == documented_keys("eval")
    written = json.loads((tmp_path / "told" / "report.json").read_text())
    assert json.loads(told.stdout) == {
        key: value for key, value in written.items() if key != "xxh3"
    }  # its checksum
    assert report["ne_increase"] == pytest.approx(report["overall"][0]["ne"] - report["overall"][1]["ne"])
    assert Model(root, "ctr").current() == 1


@pytest.mark.thorough
def test_a_change_is_evaluated_before_and_after(root: Path, tmp_path: Path) -> None:
    """A state is named, scored as its rows were then, and held against the one before it; later changes do
    not matter."""
    publish(root, tmp_path)
    path, columns = write(tmp_path, data(1000)), data(1000)
    changed = {**TABLES, "user": TABLES["user"].copy()}
    changed["user"][:250] = rows_of(250, 8, 9)
    for n, rows in enumerate((changed["user"], rows_of(500, 8, 4))):
        change = TableChanges("user", np.arange(500), rows)
        assert apply(Model(root, "ctr"), ChangeBatch([change])).state.sequence == n + 1
    out = tmp_path / "out"
    after = evaluate(root, "ctr@1+1", path, "--out", out, "--against", "ctr@1+0", "--max-ne-increase", 0.001)
    assert after.returncode == 3, after.stderr
    found = parts(out)
    for column, rows_then in (("score_0", changed), ("score_1", TABLES)):
        np.testing.assert_allclose(
            found.column(column).to_numpy(), scores_of(columns, rows_then), rtol=1e-4, atol=1e-6
        )
    assert json.loads((out / "report.json").read_text())["candidates"] == ["ctr@1+1", "ctr@1"]
    back = evaluate(
        root, "ctr@1+0", path, "--out", tmp_path / "back", "--against", "ctr@1+1", "--max-ne-increase", 0.001
    )
    assert back.returncode == 0, back.stderr
    wrong = evaluate(root, "ctr@1-1", path, "--out", tmp_path / "wrong")
    assert (
        wrong.returncode == 1
        and "expected MODEL, MODEL@VERSION, MODEL@VERSION+SEQUENCE or a model.toml" in wrong.stderr
    )


@pytest.mark.thorough
@pytest.mark.parametrize("options", [(), ("--stash", "--placement", "hbm")], ids=["resident", "stashed"])
def test_an_evaluation_on_a_gpu(root: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Workers spread over devices, lookups by the fused kernel; tables in place, and away while the dense
    part runs."""
    publish(root, tmp_path)
    columns = data(600)
    device = tables.serve_device()
    out = tmp_path / "out"
    result = evaluate(
        root, "ctr", write(tmp_path, columns), "--out", out, "--devices", device, "--batch", 200, *options
    )
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(
        parts(out).column("score_0").to_numpy(), scores_of(columns), rtol=1e-3, atol=1e-5
    )


@pytest.mark.thorough
def test_an_evaluation_in_bf16(root: Path, tmp_path: Path) -> None:
    """Its scores are those of fp32 within their bounds, and are not joined to scores of another type."""
    publish(root, tmp_path)
    columns = data(300)
    on_device = ("ctr", write(tmp_path, columns), "--devices", tables.serve_device(), "--batch", 100)
    narrow = tmp_path / "bf16"
    result = evaluate(root, *on_device, "--out", narrow, "--scorer-dtype", "bf16")
    assert result.returncode == 0, result.stderr
    user, clicked, context = vectors_of(columns)
    # One more rounding for each product by 20, and for vectors that were pooled in another order.
    expected, bounds = dense(
        Sharp(8, 4, 3).deep,
        np.concatenate([20 * user, 20 * clicked, context], 1),
        Precision.BF16,
        filled(Precision.BF16) + 2,
    )
    difference = np.abs(parts(narrow).column("score_0").to_numpy() - expected[:, 0])
    assert (difference <= bounds[:, 0]).all() and (difference > 1e-5).any()
    result = evaluate(root, *on_device, "--out", narrow)
    assert result.returncode == 1 and "holds another evaluation (different: scorer_dtype)" in result.stderr


@pytest.mark.thorough
def test_ray_gives_what_the_processes_give(root: Path, tmp_path: Path) -> None:
    """A Ray of its own with two actors: the same rows, the same scores to the bit, nothing left behind."""
    pytest.importorskip("ray", reason="the ray extra brings Ray")
    publish(root, tmp_path)
    columns = data(1200)
    path = write(tmp_path, columns)
    common = ("ctr", path, "--workers", 2, "--shard-rows", 400, "--batch", 100)
    before = {p.name for p in Path("/tmp").glob("*ray*")}
    local = evaluate(root, *common, "--out", tmp_path / "local")
    on_ray = evaluate(root, *common, "--out", tmp_path / "ray", "--engine", "ray")
    assert (local.returncode, on_ray.returncode) == (0, 0), local.stderr + on_ray.stderr
    assert parts(tmp_path / "ray").equals(parts(tmp_path / "local"))
    assert {p.name for p in Path("/tmp").glob("*ray*")} <= before | {"ray"}


@pytest.mark.drawn(0.5)
def test_a_machine_that_has_not_the_model_publishes_it_once(root: Path, tmp_path: Path) -> None:
    """From its model.toml, and only where the bytes are the same; whoever else asks attaches what is
    there."""
    publish(root, tmp_path)
    source = model(tmp_path)
    content = Model(root, "ctr").attach().content()
    other = Path(f"{root}-other-machine")
    try:
        job: Any = type("Job", (), {"root": other, "settings": ServerSettings(root=other)})
        with pytest.raises(
            ServingError, match=r"is not published on this machine .* name its model.toml with --source"
        ):
            attach_or_publish(job, Candidate("ctr", 1, content))
        for _ in range(2):
            found, state = attach_or_publish(job, Candidate("ctr", 7, content, source))
            assert (found.versions(), state) == ([1], State(1))
        with pytest.raises(ServingError, match="gives other bytes here"):
            attach_or_publish(job, Candidate("ctr", 1, content + 1, source))
        assert Model(other, "ctr").versions() == [1]
    finally:
        shutil.rmtree(other, ignore_errors=True)


def test_shards_hold_every_row_once(tmp_path: Path) -> None:
    """Whole row groups, and lines counted over blocks, with and without a newline at the end."""
    lines = [b'{"n": %d}' % n for n in range(1000)]
    for end in (b"", b"\n"):
        (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + end)
        shards = plan_shards([tmp_path / "a.jsonl"], 300)
        assert [(s.start, s.rows) for s in shards] == [(0, 300), (300, 300), (600, 300), (900, 100)]
        content = (tmp_path / "a.jsonl").read_bytes()
        assert b"".join(content[s.first : s.last] for s in shards) == content
    pq.write_table(pa.table({"n": range(1000)}), tmp_path / "a.parquet", row_group_size=130)
    shards = plan_shards([tmp_path / "a.parquet"], 300)
    assert [(s.start, s.rows, s.first, s.last) for s in shards] == [
        (0, 390, 0, 3),
        (390, 390, 3, 6),
        (780, 220, 6, 8),
    ]


def test_columns_of_other_kinds(tmp_path: Path) -> None:
    """Dictionaries are read as what they hold; ids that are no int64 are an error; hidden files and OUT
    are no data."""
    ids = pa.array([1, 2, 1]).dictionary_encode()
    pq.write_table(pa.table({"x": ids, "big": pa.array([1, 2**63, 3], pa.uint64())}), tmp_path / "a.parquet")
    for name in (".hidden.parquet", "_SUCCESS.parquet", "out/parts/00000.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files = data_files(tmp_path, tmp_path / "out")
    assert [f.name for f in files] == ["a.parquet"]
    (rows,) = read(plan_shards(files, 10)[0], ["x", "big"], 10)
    assert ids_of(rows, "x")[0].tolist() == [1, 2, 1]
    with pytest.raises(pa.ArrowInvalid):
        ids_of(rows, "big")


def test_figures_of_quality() -> None:
    """Against their definitions, with ties; and undefined ones are None."""
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 300), np.round(rng.random(300), 1)
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    assert auc(labels, scores) == pytest.approx(wins / (positive.size * negative.size))
    found = quality(labels, np.full(300, labels.mean()))
    assert found.ne == pytest.approx(1) and found.auc == 0.5 and found.calibration == pytest.approx(1)
    assert quality(labels, labels.astype(float)).ne == pytest.approx(0, abs=1e-5)
    assert quality(np.zeros(3), np.full(3, 0.5)).ne is None
    assert quality(np.empty(0), np.empty(0)).log_loss is None
