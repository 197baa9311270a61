"""`tableside eval`: Parquet and JSON Lines, one process and several, killed and stopped, compared and
gated."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tables
import torch
from dense_rounding import dense, filled
from json_keys import documented_keys, keys_of
from raw_demo import DemoTable, publish_raw, random_ids
from scorers import Ctr, exported
from support import is_running, rows_of, run_tableside, until

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.load import load
from tableside.loader.load.scorer import stored_scorer
from tableside.loader.model.model import (
    EvalSpec,
    FeatureSpec,
    ModelSpec,
    ScorerSpec,
    parse_model,
    read_model,
)
from tableside.loader.segment.memory import processes_below
from tableside.loader.versions.states import State
from tableside.loader.versions.versions import Model
from tableside.quant import Precision
from tableside.serving.errors import ServingError
from tableside.serving.evaluation.data import DataError, data_files, ids_of, plan_shards, read
from tableside.serving.evaluation.quality import auc, quality
from tableside.serving.evaluation.run import EvalSettings, _job
from tableside.serving.evaluation.work import Candidate, Evaluator, attach_or_publish
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.gpu

TABLES = {"user": rows_of(500, 8), "item": rows_of(300, 4, 1)}
ROWS = 5000


class Sharp(Ctr):
    """A scorer that is sure of itself, so that coarse rows cost it something."""

    def forward(self, user: torch.Tensor, clicked: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return super().forward(20 * user, 20 * clicked, context)


def model(folder: Path, row_format: str = "fp32", **change: Any) -> Path:
    """Writes a checkpoint, a scorer and their model.toml."""
    np.savez(folder / "c.npz", **TABLES)
    (folder / "scorer.pt2").write_bytes(exported(Sharp(8, 4, 3), user=8, clicked=4, context=3))
    text = f"""
name = "ctr"
checkpoint = "c.npz"
[tables.user]
key = "user"
row_format = "{row_format}"
[tables.item]
key = "item"
row_format = "{row_format}"
[features.user]
[features.clicked]
table = "item"
pooling = "mean"
[scorer]
program = "{change.get("program", "scorer.pt2")}"
[eval]
label = "label"
[eval.columns]
user = "user_id"
context = ["a", "b", "c"]
"""
    path = folder / f"{row_format}.toml"
    path.write_text(text)
    return path


def publish(root: Path, folder: Path, row_format: str = "fp32", **change: Any) -> None:
    import tomllib

    load(parse_model(tomllib.loads(model(folder, row_format, **change).read_text()), folder), root)


def data(rows: int = ROWS) -> dict[str, Any]:
    """One id a row, lists of ids with empty and missing ones, numbers, a kind, and labels that follow the
    model's scores."""
    rng = np.random.default_rng(0)
    clicked = [rng.integers(0, 300, rng.integers(0, 6)).tolist() for _ in range(rows)]
    clicked[3] = None
    columns: dict[str, Any] = {"user_id": rng.integers(0, 500, rows).tolist(), "clicked": clicked}
    columns |= {name: rng.standard_normal(rows).astype(np.float32).tolist() for name in "abc"}
    columns["kind"] = [("new", "old", None)[n] for n in rng.integers(0, 3, rows)]
    columns["label"] = (rng.random(rows) < scores_of(columns)).astype(int).tolist()
    return columns


def vectors_of(
    columns: dict[str, Any], tables: dict[str, np.ndarray] = TABLES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the model's scorer takes, from the original rows."""
    item, user = tables["item"].astype(np.float64), tables["user"][columns["user_id"]]
    clicked = np.stack([item[ids].mean(0) if ids else np.zeros(4) for ids in columns["clicked"]]).astype(
        np.float32
    )
    return user, clicked, np.stack([columns[name] for name in "abc"], 1).astype(np.float32)


def scores_of(columns: dict[str, Any], tables: dict[str, np.ndarray] = TABLES) -> np.ndarray:
    """What the model gives, from the original rows."""
    user, clicked, context = vectors_of(columns, tables)
    with torch.inference_mode():
        found: np.ndarray = (
            Sharp(8, 4, 3).eval()(*map(torch.from_numpy, (user, clicked, context))).numpy()[:, 0]
        )
    return found


def write(folder: Path, columns: dict[str, Any], kind: str = "parquet") -> Path:
    """Two files, of several row groups or lines."""
    path = folder / f"data-{kind}"
    path.mkdir()
    half = len(columns["label"]) // 2
    for n, part in enumerate((slice(0, half), slice(half, None))):
        cut = {name: values[part] for name, values in columns.items()}
        if kind == "parquet":
            pq.write_table(pa.table(cut), path / f"{n}.parquet", row_group_size=400)
        else:
            lines = [json.dumps(dict(zip(cut, row, strict=True))) for row in zip(*cut.values(), strict=True)]
            (path / f"{n}.jsonl").write_text("\n".join(lines) + ("\n" if n else ""))
    return path


def evaluate(root: Path, *arguments: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return run_tableside("eval", *arguments, "--root", root, timeout_s=timeout_s)


def parts(out: Path) -> Any:
    return pa.concat_tables([pq.read_table(p) for p in sorted((out / "parts").glob("*.parquet"))])


@pytest.mark.drawn(1)
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
def test_the_same_command_goes_on_with_what_it_loaded(root: Path, tmp_path: Path) -> None:
    """A model.toml is loaded once for an evaluation, also where it was stopped; again where a file of it
    changed."""
    path, toml, out = write(tmp_path, data(100)), model(tmp_path, "int8"), tmp_path / "out"
    first = evaluate(root, toml, path, "--out", out)
    assert first.returncode == 0 and "loaded ctr version 1, not activated" in first.stdout, first.stderr
    again = evaluate(root, toml, path, "--out", out)
    assert again.returncode == 0, again.stderr
    assert (
        "was loaded as ctr version 1 when this evaluation began" in again.stdout
        and "100 of them by an earlier" in again.stdout
    )
    assert Model(root, "ctr").versions() == [1]
    os.utime(toml)
    changed = evaluate(root, toml, path, "--out", out)
    assert changed.returncode == 1 and "holds another evaluation (different: candidates)" in changed.stderr
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    refused = evaluate(root, toml, path, "--out", foreign)
    assert refused.returncode == 1 and "is not empty and holds no evaluation" in refused.stderr
    assert Model(root, "ctr").versions() == [1, 2] and [p.name for p in foreign.iterdir()] == ["thesis.txt"]


def begin(root: Path, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tableside", "eval", *map(str, arguments), "--root", str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers_of(process: "subprocess.Popen[str]", root: Path) -> list[int]:
    """Processes that have the model mapped."""

    def maps(pid: int) -> bool:
        try:
            return str(root / "ctr") in Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return False

    return [p for p in processes_below(process.pid) if maps(p)]


@pytest.mark.thorough
def test_killed_workers_are_replaced(root: Path, tmp_path: Path) -> None:
    """Every row is still there once; what was begun is begun again."""
    publish(root, tmp_path)
    columns = data(40_000)
    path, out = write(tmp_path, columns), tmp_path / "out"
    process = begin(root, "ctr", path, "--out", out, "--workers", 2, "--shard-rows", 400, "--batch", 8)
    until(lambda: len(list((out / "parts").glob("*.parquet"))) > 3, what="some shards")
    victims = workers_of(process, root)
    begun, others = out / "parts" / f"00099.partial-{victims[0]}", out / "parts" / "00098.partial-1"
    begun.touch()
    others.touch()
    os.kill(victims[0], signal.SIGKILL)
    until(lambda: set(workers_of(process, root)) - set(victims), what="a replacement")
    assert not begun.exists() and others.exists()
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    assert "ended with -9" in error and "it is replaced" in error
    found = parts(out)
    assert found.column("row").to_pylist() == [*range(20_000)] * 2
    np.testing.assert_allclose(found.column("score_0").to_numpy(), scores_of(columns), rtol=1e-4, atol=1e-6)
    assert not list((out / "parts").glob("*.partial*"))


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_evaluation_goes_on(root: Path, tmp_path: Path, how: signal.Signals) -> None:
    """What is whole is kept, what is not is done again; no process stays behind."""
    publish(root, tmp_path)
    columns = data(20_000)
    path, out = write(tmp_path, columns), tmp_path / "out"
    arguments = ("ctr", path, "--out", out, "--shard-rows", 400, "--batch", 4)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it, as would this one's
    process = begin(root, *arguments)
    signal.signal(signal.SIGINT, before)
    until(lambda: len(list((out / "parts").glob("*.parquet"))) > 3, what="some shards")
    below = processes_below(process.pid)
    process.send_signal(how)
    process.communicate(timeout=300)
    assert process.returncode in (130, -9)
    until(lambda: not any(map(is_running, below)), what="its processes to end")
    kept = {p: p.stat().st_mtime_ns for p in (out / "parts").glob("*.parquet")}
    assert 3 < len(kept) < 50
    result = evaluate(root, *arguments[:4], *arguments[4:6], "--batch", 4096, "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert "of them by an earlier run" in result.stdout
    assert all(p.stat().st_mtime_ns == at for p, at in kept.items())
    assert parts(out).num_rows == 20_000
    np.testing.assert_allclose(
        parts(out).column("score_0").to_numpy(), scores_of(columns), rtol=1e-4, atol=1e-6
    )


@pytest.mark.thorough
def test_out_of_another_evaluation_is_left_alone(root: Path, tmp_path: Path) -> None:
    publish(root, tmp_path)
    columns = data(100)
    path, out = write(tmp_path, columns), tmp_path / "out"
    assert evaluate(root, "ctr", path, "--out", out).returncode == 0
    result = evaluate(root, "ctr", path, "--out", out, "--slice", "kind")
    assert result.returncode == 1
    assert "holds another evaluation (different: slice); remove it, or choose another --out" in result.stderr
    with (out / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is being written by another evaluation" in evaluate(root, "ctr", path, "--out", out).stderr
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    assert "is not empty and holds no evaluation" in evaluate(root, "ctr", path, "--out", other).stderr
    assert [p.name for p in other.iterdir()] == ["precious"]


@pytest.mark.thorough
def test_a_damaged_part_is_made_again(root: Path, tmp_path: Path) -> None:
    publish(root, tmp_path)
    columns = data(300)
    path, out = write(tmp_path, columns), tmp_path / "out"
    arguments = ("ctr", path, "--out", out, "--shard-rows", 100)
    assert evaluate(root, *arguments).returncode == 0
    (out / "parts" / "00000.parquet").write_bytes(b"")
    assert evaluate(root, *arguments).returncode == 0
    assert parts(out).num_rows == 300


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


@pytest.mark.drawn(11)
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
