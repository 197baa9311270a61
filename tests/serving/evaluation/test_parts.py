"""Parts and records of an evaluation: every flipped bit is found, named and made good, or changes nothing."""

import json
import logging
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_memory import on_small_tmpfs
from support import run_tableside
from towers import publish_towers

from tableside.loader.versions.versions import Model
from tableside.serving.evaluation.data import Shard
from tableside.serving.evaluation.parts import DamagedPart, _read, find_part, write_part
from tableside.serving.evaluation.records import DamagedRecord, read_record, write_record
from tableside.serving.evaluation.work import Candidate, Job
from tableside.serving.settings import ServerSettings

ROWS = 600
OPTIONS = ("--shard-rows", 50, "--workers", 2)


@pytest.fixture
def data(root: Path, tmp_path: Path) -> Path:
    """A model of two towers is published; where its data set lies."""
    publish_towers(root, tmp_path)
    values = np.random.default_rng(0)
    columns = {
        "user": values.integers(0, 50, ROWS),
        "item": values.integers(0, 40, ROWS),
        "label": values.integers(0, 2, ROWS),
    }
    pq.write_table(pa.table(columns), tmp_path / "data.parquet", row_group_size=50)
    return tmp_path / "data.parquet"


def part_of(folder: Path, rows: int) -> tuple[Job, Shard]:
    """A part of `rows` rows, written."""
    job = Job(folder, (Candidate("towers", 1),), "label", {}, None, 8, folder, ServerSettings(root=folder))
    shard = Shard(3, "data.parquet", 100, rows, 0, 1)
    scores = {"label": np.zeros(rows, np.float32), "score_0": np.linspace(0, 1, rows, dtype=np.float32)}
    write_part(job, shard, pa.table({"row": np.arange(100, 100 + rows), **scores}))
    return job, shard


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def figures(out: Path) -> dict[str, Any]:
    report = json.loads((out / "report.json").read_text())
    return {name: report[name] for name in ("rows", "overall", "slices")}


def test_any_byte_of_a_part_and_of_its_checksum(tmp_path: Path) -> None:
    """One bit of each, in turn."""
    job, shard = part_of(tmp_path, 5)
    assert _read(job, shard).num_rows == 5
    for path in (job.part(shard), tmp_path / "00003.parquet.xxh3"):
        for byte in range(path.stat().st_size):
            bit = 8 * byte + byte % 8
            flip(path, bit)
            with pytest.raises(DamagedPart, match="its checksum is XXH3_"):
                _read(job, shard)
            flip(path, bit)


def test_a_part_is_read_by_the_thread_that_asks(tmp_path: Path) -> None:
    """A thread of Arrow's that lets go of the content while Python ends would end the process by SIGABRT."""
    job, shard = part_of(tmp_path, 5)
    program = f"""
import os, pickle
from tableside.serving.evaluation.parts import find_part
job, shard = pickle.loads({pickle.dumps((job, shard))!r})
before = len(os.listdir("/proc/self/task"))
assert find_part(job, shard).num_rows == 5
print(len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr


def test_a_part_that_is_damaged_is_named_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So is one without a checksum, one cut short, and one of another shard; one that is not there is no
    news."""
    job, shard = part_of(tmp_path, 5)
    path, checksum = job.part(shard), tmp_path / "00003.parquet.xxh3"
    content = path.read_bytes()
    for damage in (lambda: path.write_bytes(content[:-1]), checksum.unlink, lambda: path.write_bytes(b"")):
        part_of(tmp_path, 5)
        assert find_part(job, shard) is not None
        caplog.clear()
        damage()
        assert find_part(job, shard) is None and not path.exists()
        assert f"{path} is made again: its checksum is" in caplog.text
    part_of(tmp_path, 4)
    assert find_part(job, shard) is None and "it does not hold rows [100, 105) once each" in caplog.text
    caplog.clear()
    assert find_part(job, shard) is None and not caplog.records


def test_any_bit_of_a_record(tmp_path: Path) -> None:
    """Is found, or changes nothing of what is read."""
    path, record = (
        tmp_path / "plan.json",
        {"files": {"é.parquet": [1, 2.5e-7]}, "slice": None, "shards": [{"rows": 12}]},
    )
    write_record(path, record)
    found = 0
    for bit in range(8 * path.stat().st_size):
        flip(path, bit)
        try:
            assert read_record(path) == record
        except DamagedRecord as error:
            assert str(path) in str(error)
            found += 1
        flip(path, bit)
    assert found > 4 * path.stat().st_size


@pytest.mark.thorough
def test_flips_between_two_runs(root: Path, tmp_path: Path, data: Path) -> None:
    """One bit in each part: every part is named, and the report is the same. One in plan.json: a line with
    the remedy."""
    out = tmp_path / "out"
    first = run_tableside("eval", "towers", data, "--out", out, *OPTIONS, root=root)
    assert first.returncode == 0, first.stderr
    wanted, parts = figures(out), sorted((out / "parts").glob("*.parquet"))
    assert len(parts) == 12
    seed = random.randrange(1000)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for part in parts:
        flip(part, chance.randrange(8 * part.stat().st_size))
    again = run_tableside("eval", "towers", data, "--out", out, *OPTIONS, root=root)
    assert again.returncode == 0, again.stderr
    assert all(f"{part} is made again: its checksum is" in again.stderr for part in parts)
    assert figures(out) == wanted
    flip(out / "plan.json", 8 * 30)
    refused = run_tableside("eval", "towers", data, "--out", out, *OPTIONS, root=root)
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
    assert (
        f"{out / 'plan.json'} is damaged" in refused.stderr
        and f"remove {out}, or choose another --out" in refused.stderr
    )


FLIPPED_BEFORE_THE_REPORT = """
import sys
from pathlib import Path
from tableside.serving.evaluation.run import EvalSettings, evaluate
from tableside.serving.evaluation.work import Candidate
from tableside.serving.settings import ServerSettings
root, data, out, times = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
def flip(done, total):
    global times
    part = out / "parts" / "00005.parquet"
    if done == total and times:
        times -= 1
        content = bytearray(part.read_bytes())
        content[100] ^= 4
        part.write_bytes(content)
settings = EvalSettings(data, out, 2, shard_rows=50)
evaluate([Candidate("towers", 1)], settings, ServerSettings(root=root, workers=2), flip)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("times", [1, 9])
def test_flips_between_the_last_shard_and_the_report(
    root: Path, tmp_path: Path, data: Path, times: int
) -> None:
    """The part is made again and the report is right; where it never reads as it was written, an error
    names it."""
    calm, out = tmp_path / "calm", tmp_path / "out"
    assert run_tableside("eval", "towers", data, "--out", calm, *OPTIONS, root=root).returncode == 0
    command = [sys.executable, "-c", FLIPPED_BEFORE_THE_REPORT, str(root), str(data), str(out), str(times)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "00005.parquet is made again: its checksum is" in found.stderr
    if times == 1:
        assert found.returncode == 0, found.stderr
        assert figures(out) == figures(calm)
    else:
        assert (
            "00005.parquet was not read as it had been written, 3 times over; check the disk" in found.stderr
        )
        assert not (out / "report.json").exists()


def test_what_was_loaded_is_loaded_again_where_its_record_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tableside.serving.evaluation import records

    write_record(tmp_path / records.LOADED_FILE, {"model.toml": {"version": 1}})
    flip(tmp_path / records.LOADED_FILE, 8 * 50)
    with caplog.at_level(logging.WARNING):
        assert records._read(tmp_path) == {}
    assert f"{tmp_path / records.LOADED_FILE} is damaged" in caplog.text and "is loaded again" in caplog.text


@pytest.mark.drawn(0.5)
def test_a_disk_that_is_full_is_a_line_with_the_remedy(root: Path, tmp_path: Path, data: Path) -> None:
    """What was scored stays; the same command goes on where there is room."""
    out = tmp_path / "out"
    wide = [sys.executable, "-m", "tableside", "eval", "towers", data, "--out", out, "--root", root, *OPTIONS]
    command = [*on_small_tmpfs(out, "size=64k"), *map(str, wide)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 1 and len(found.stderr.splitlines()) == 1, found.stderr
    assert (
        ".parquet cannot be written (No space left on device); free some space, and give the same command"
        in found.stderr
    )
    assert Model(root, "towers").versions() == [1]
