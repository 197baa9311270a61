"""Evaluations on a GPU: the CPU's scores and figures, from batches that go there together, tables resident
or away."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tables
from scorers import Ctr, exported
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.serving.evaluation import on_device
from tableside.serving.evaluation.batches import Batch
from tableside.serving.evaluation.data import DataError, plan_shards, read
from tableside.serving.evaluation.run import EvalSettings, _job, evaluate
from tableside.serving.evaluation.work import Candidate, Evaluator, Job, shards_at_once
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.for_gpu

TABLES = {"user": rows_of(500, 8), "item": rows_of(300, 4, 1)}
ROWS = 900


def publish(root: Path, folder: Path, *formats: str) -> None:
    """A version of `ctr` for each row format."""
    np.savez(folder / "c.npz", **TABLES)
    (folder / "scorer.pt2").write_bytes(exported(Ctr(8, 4, 3), user=8, clicked=4, context=3))
    for row_format in formats:
        raw = {
            "name": "ctr",
            "checkpoint": "c.npz",
            "tables": {name: {"key": name, "row_format": row_format} for name in TABLES},
            "features": {
                "user": {"table": "user"},
                "clicked": {"table": "item", "pooling": "mean", "output": "fp16"},
            },
            "scorer": {"program": "scorer.pt2"},
            "eval": {"label": "label", "columns": {"user": "user_id", "context": ["a", "b", "c"]}},
        }
        load(parse_model(raw, folder), root)


def data(folder: Path, **change: Any) -> Path:
    """Files of both kinds: one id a row, lists of ids with empty and missing ones, numbers, kinds and
    labels."""
    rng = np.random.default_rng(0)
    clicked: list[Any] = [rng.integers(0, 300, rng.integers(0, 6)).tolist() for _ in range(ROWS)]
    clicked[3] = None
    columns: dict[str, Any] = {"user_id": rng.integers(0, 500, ROWS).tolist(), "clicked": clicked}
    columns |= {name: rng.standard_normal(ROWS).astype(np.float32).tolist() for name in "abc"}
    columns["kind"] = [("new", "old", None)[n] for n in rng.integers(0, 3, ROWS)]
    columns["label"] = rng.integers(0, 2, ROWS).tolist()
    columns |= change
    path = folder / "data"
    path.mkdir()
    half = ROWS // 2
    pq.write_table(
        pa.table({k: v[:half] for k, v in columns.items()}), path / "a.parquet", row_group_size=100
    )
    lines = [json.dumps({k: v[n] for k, v in columns.items()}) for n in range(half, ROWS)]
    (path / "b.jsonl").write_text("\n".join(lines) + "\n")
    return path


def settings_of(root: Path, device: bool, **more: Any) -> ServerSettings:
    return ServerSettings(root=root, devices=(tables.serve_device(),) if device else (), **more)


def candidates(root: Path, *versions: int) -> list[Candidate]:
    return [Candidate("ctr", v, Model(root, "ctr").attach(v).content()) for v in versions]


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize(
    ("options", "server"),
    [
        ({}, {}),
        ({"stash": True}, {"placement": "hbm"}),
        ({"workers": 2}, {"placement": "host"}),
        ({}, {"placement": "cached", "hbm_budget": 1 << 20}),
    ],
    ids=["resident", "stashed", "host", "cached"],
)
def test_figures_are_those_of_the_cpu(
    root: Path, tmp_path: Path, options: dict[str, Any], server: dict[str, Any]
) -> None:
    """Two candidates, slices, shards of several batches; every row's scores, and what is made of them."""
    publish(root, tmp_path, "fp32", "int4")
    path = data(tmp_path)
    given = {"slice_by": "kind", "shard_rows": 250, "batch_rows": 60}
    names = candidates(root, 1, 2)
    on_cpu = evaluate(names, EvalSettings(path, tmp_path / "cpu", **given), settings_of(root, False))
    on_gpu = evaluate(
        names, EvalSettings(path, tmp_path / "gpu", **given, **options), settings_of(root, True, **server)
    )
    for cpu, gpu in zip(
        sorted((tmp_path / "cpu/parts").glob("*.parquet")),
        sorted((tmp_path / "gpu/parts").glob("*.parquet")),
        strict=True,
    ):
        wanted, found = pq.read_table(cpu), pq.read_table(gpu)
        assert wanted.drop(["score_0", "score_1"]).equals(found.drop(["score_0", "score_1"]))
        for name in ("score_0", "score_1"):
            np.testing.assert_allclose(found.column(name), wanted.column(name), rtol=1e-3, atol=1e-6)
    assert all(seconds > 0 for stage, seconds in on_gpu.stage_seconds.items() if stage != "writing")
    assert sum(on_gpu.stage_seconds.values()) < on_gpu.seconds * options.get("workers", 1)
    assert not any(on_cpu.stage_seconds.values())
    assert on_gpu.rows == on_cpu.rows == ROWS and on_gpu.slices.keys() == on_cpu.slices.keys()
    for cpu_quality, gpu_quality in zip(on_cpu.overall, on_gpu.overall, strict=True):
        np.testing.assert_allclose(
            [gpu_quality.ne, gpu_quality.auc, gpu_quality.log_loss],
            [cpu_quality.ne, cpu_quality.auc, cpu_quality.log_loss],
            rtol=1e-4,
        )


def job_of(root: Path, folder: Path, **more: Any) -> tuple[Job, list[Any]]:
    settings = EvalSettings(data(folder), folder / "out", shard_rows=450, batch_rows=50, **more)
    segment = Model(root, "ctr").attach()
    job = _job(candidates(root, 1), [segment.header], settings, settings_of(root, True, placement="hbm"))
    return job, plan_shards([settings.data / "a.parquet"], 450)


@pytest.mark.drawn(0.25)
def test_tables_are_away_while_the_dense_part_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave once for several batches, and they are on their way back when the next ones are looked
    up."""
    publish(root, tmp_path, "fp32")
    job, (shard,) = job_of(root, tmp_path, stash=True)
    monkeypatch.setattr(on_device, "GROUP_ROWS", 50)
    evaluator = Evaluator(job)
    device, gpu = evaluator._device, evaluator._device._gpu  # type: ignore[union-attr]
    assert device is not None and device._bytes == 64 << 20, (
        "of vectors, as a quarter of these tables is less"
    )
    scorer = evaluator.served[0].scorer
    assert scorer is not None and scorer.calls is not None
    away: list[list[bool]] = []
    stashed: list[int] = []
    run, stash = scorer.calls._run, gpu.stash
    scorer.calls._captures = False  # so that each call is seen
    scorer.calls._run = lambda inputs: (
        away.append([t.is_away for t in gpu.launcher.stashable.all]) or run(inputs)
    )  # type: ignore[func-returns-value]
    monkeypatch.setattr(gpu, "stash", lambda: stashed.append(stash()) or stashed[-1])
    batch_bytes = next(evaluator._reader.batches(shard)).requests[0][0].out_bytes
    device._bytes = 4 * batch_bytes
    expected = evaluator.score(shard).column("score_0").to_numpy()
    assert away == [[True, True]] * 3, "9 batches, 4 at a time"
    assert all(size >= sum(t.nbytes for t in TABLES.values()) for size in stashed) and len(stashed) == 3
    assert not any(t.is_away for t in gpu.launcher.stashable.all)
    plain = Evaluator(_without_stash(job)).score(shard).column("score_0").to_numpy()
    np.testing.assert_allclose(expected, plain, rtol=1e-6)


def _without_stash(job: Job) -> Job:
    from dataclasses import replace

    return replace(job, stash=False)


@pytest.mark.drawn(0.5)
def test_batches_go_to_the_device_together(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are rows for; a larger one goes alone; none is left out."""
    publish(root, tmp_path, "fp32")
    job, (shard,) = job_of(root, tmp_path)
    monkeypatch.setattr(on_device, "GROUP_ROWS", 50)
    evaluator = Evaluator(job)
    device = evaluator._device
    assert device is not None
    batches: list[Batch] = list(evaluator._reader.batches(shard))
    assert [b.size for b in batches] == [50] * 9
    monkeypatch.setattr(on_device, "GROUP_ROWS", 120)
    assert [len(g) for g in device.groups(batches)] == [2, 2, 2, 2, 1]
    monkeypatch.setattr(on_device, "GROUP_ROWS", 10)
    assert [len(g) for g in device.groups(batches)] == [1] * 9
    monkeypatch.setattr(on_device, "GROUP_ROWS", 1000)
    device._bytes = 3 * batches[0].requests[0][0].out_bytes
    assert [b for g in device.groups(batches) for b in g] == batches
    assert [len(g) for g in device.groups(batches)] == [3, 3, 3]


@pytest.mark.drawn(0.5)
def test_rows_that_are_scored_alone_are_laid_out_together(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as a response, a scorer, and a group of batches may have them; never fewer than were asked
    for."""
    publish(root, tmp_path, "fp32")
    job, (shard,) = job_of(root, tmp_path)
    evaluator = Evaluator(job)
    assert [b.size for b in evaluator._reader.batches(shard)] == [450]
    device: Any = evaluator._device
    scorer = evaluator.served[0].scorer
    assert scorer is not None and scorer.calls is not None
    assert device.batch_rows(50) == 32_768 and device.batch_rows(40_000) == 40_000
    monkeypatch.setattr(evaluator.served[0], "max_response_bytes", 4 * 14 * 700)
    assert device.batch_rows(50) == 700
    monkeypatch.setattr(scorer.calls, "rows", (1, 300))
    assert device.batch_rows(50) == 300
    device._bytes = 4 * 14 * 200
    assert device.batch_rows(50) == 200 and device.batch_rows(250) == 250
    residence = evaluator.served[0].placed.on_gpu["item"].residence
    monkeypatch.setattr(residence, "is_gathered", True)
    assert device.batch_rows(50) == 50
    monkeypatch.setattr(residence, "is_gathered", False)
    assert device.batch_rows(50) == 200
    monkeypatch.setattr(scorer, "is_row_wise", False)
    assert device.batch_rows(50) == 50


def test_a_footer_is_read_once(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all shards of a file, until the file is another one."""
    path = data(tmp_path) / "a.parquet"
    seen: list[str] = []
    footer = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda file: seen.append(str(file)) or footer(file))  # type: ignore[func-returns-value]
    shards = plan_shards([path], 100)
    seen.clear()

    def rows() -> int:
        return sum(
            r.size for shard in shards for whole in (False, True) for r in read(shard, ["label"], 60, whole)
        )

    assert len(shards) == 5 and rows() == ROWS and seen == [str(path)]
    pq.write_table(pq.read_table(path).slice(0, 450), path, row_group_size=90)
    shards = plan_shards([path], 90)
    assert len(shards) == 5 and rows() == ROWS and set(seen) == {str(path)} and len(seen) == 3


@pytest.mark.drawn(0.5)
def test_shards_to_come_are_decoded_meanwhile(root: Path, tmp_path: Path) -> None:
    """The first one's table is there only after the pool gave the second; they come in order."""
    publish(root, tmp_path, "fp32")
    job, _ = job_of(root, tmp_path)
    shards = plan_shards([tmp_path / "data/a.parquet"], 100)
    taken: list[int] = []

    def given() -> Any:
        for shard in shards:
            taken.append(shard.number)
            yield shard

    evaluator = Evaluator(job)
    assert evaluator.readers >= 1 and shards_at_once(job.settings) == evaluator.readers + 6
    found = []
    for shard, table in evaluator.tables(given()):
        found.append(shard.number)
        assert table.num_rows == shard.rows
    assert found == taken == [s.number for s in shards] and len(found) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"user_id": [*range(17), 500, *range(ROWS - 18)]},
            "row 17, of a batch from row 0 on: feature 'user': id 500 at",
        ),
        (
            {"a": [0.0] * 60 + [float("inf")] + [0.0] * (ROWS - 61)},
            "row 50 and on, a batch of 50: dense tensor 'context' is not finite",
        ),
    ],
    ids=["id", "number"],
)
@pytest.mark.drawn(1)
def test_rows_at_fault_are_named(root: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Among batches that went to the device with theirs."""
    publish(root, tmp_path, "fp32")
    settings = EvalSettings(data(tmp_path, **change), tmp_path / "out", shard_rows=450, batch_rows=50)
    segment = Model(root, "ctr").attach()
    job = _job(candidates(root, 1), [segment.header], settings, settings_of(root, True))
    (shard,) = plan_shards([settings.data / "a.parquet"], 450)
    with pytest.raises(DataError, match=message):
        list(Evaluator(job).tables([shard]))


@pytest.mark.thorough
@pytest.mark.parametrize(("placement", "most"), [("cached", 3), ("hbm", 1)])
def test_rows_of_batches_to_come_are_on_their_way(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str, most: int
) -> None:
    """Through a cache two groups have begun when one is looked up; where nothing is brought none is."""
    publish(root, tmp_path, "fp32")
    settings = EvalSettings(data(tmp_path), tmp_path / "out", shard_rows=450, batch_rows=50)
    server = settings_of(root, True, placement=placement, hbm_budget=1 << 20)
    job = _job(candidates(root, 1), [Model(root, "ctr").attach().header], settings, server)
    (shard,) = plan_shards([settings.data / "a.parquet"], 450)
    monkeypatch.setattr(on_device, "GROUP_ROWS", 50)
    evaluator = Evaluator(job)
    monkeypatch.setattr(on_device, "GROUP_ROWS", 100)
    gpu: Any = evaluator._device._gpu  # type: ignore[union-attr]
    begin, finish, open_ones, seen = gpu.batches.begin, gpu.batches.wait, [0], []

    def begun(*arguments: Any, **more: Any) -> Any:
        open_ones[0] += 1
        return begin(*arguments, **more)

    def finished(one: Any) -> Any:
        assert (one.ticket is not None) is (placement == "cached")
        seen.append(open_ones[0])
        open_ones[0] -= 1
        return finish(one)

    monkeypatch.setattr(gpu.batches, "begin", begun)
    monkeypatch.setattr(gpu.batches, "wait", finished)
    ((_, table),) = list(evaluator.tables([shard]))
    assert table.num_rows == 450 and max(seen) == most and len(seen) == 5 and open_ones == [0]
