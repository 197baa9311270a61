"""Loads of tables of raw ids: right rows from every kind of checkpoint, little memory, nothing left by
loads that fail or die."""

import os
import random
import signal
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from indexed_tables import built
from keyed_tables import ids_of, small_pieces
from load_steps import PUBLISHING
from raw_loads import SAVERS, attached, publish_raw, quantized, save_npz, vectors_of
from support import files_of, rows_of, run_tableside

from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import BadIds
from tableside.quant.rows.ids import slots_for

IDS, VALUES = ids_of(1000), rows_of(1000, 12)


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize(("dim", "row_format"), [(64, "int8"), (60, "int8"), (3, "fp32"), (8, "int4")])
@pytest.mark.drawn(6)
def test_every_id_has_its_row(root: Path, tmp_path: Path, saver: str, dim: int, row_format: str) -> None:
    """From each kind of checkpoint, whether ids lie in the rows or beside them; other ids are refused."""
    values = rows_of(1000, dim)
    publish_raw(tmp_path, root, {"t": (IDS, values)}, saver=saver, row_format=row_format)
    table = attached(root)
    np.testing.assert_allclose(vectors_of(table, IDS), quantized(values, table), atol=1e-5)
    assert table.row_map is not None and table.row_map.count == 1000
    others = np.setdiff1d(IDS ^ 1, IDS)
    assert (table.row_map.find(others) == -1).all()
    with pytest.raises(BadIds, match=rf"id {others[0]} at position 1 is not among the table's 1,000 ids"):
        vectors_of(table, [IDS[0], others[0]])


def test_a_table_in_many_pieces(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose blocks end at other rows than its chunks: nothing is lost between them."""
    small_pieces(monkeypatch)
    publish_raw(tmp_path, root, {"t": (IDS, VALUES)})
    table = attached(root)
    np.testing.assert_allclose(vectors_of(table, IDS), quantized(VALUES, table), atol=1e-5)


def test_raw_ids_and_row_numbers_in_one_model(root: Path, tmp_path: Path) -> None:
    """Several tables of both kinds, in chunks of their own; the segment's counts are those of the ids."""
    tables = {"a": (IDS, rows_of(1000, 64)), "b": (None, rows_of(40_000, 64)), "c": (IDS[:1], rows_of(1, 64))}
    loaded = publish_raw(tmp_path, root, tables)  # type: ignore[arg-type]
    assert [t.id_count for t in loaded.header.tables] == [1000, 40_000, 1]
    assert loaded.header.fp32_bytes == 4 * 64 * 41_001
    for name, (ids, values) in tables.items():
        table = attached(root, name)
        found = vectors_of(table, np.arange(len(values)) if ids is None else ids)
        np.testing.assert_allclose(found, quantized(values, table), atol=1e-5)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("missing", ["error", "zero"])
def test_tables_of_no_id_and_of_one(root: Path, tmp_path: Path, count: int, missing: str) -> None:
    """An empty table is published, and every id is missing from it; id 0 is like any other."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    vectors = pa.FixedSizeListArray.from_arrays(pa.array(VALUES[:count].reshape(-1)), 12)
    pq.write_table(pa.table({"ids": np.zeros(count, np.int64), "weight": vectors}), tmp_path / "c.parquet")
    of = {"key": "weight", "id_key": "ids", "ids": "raw", "missing": missing, "row_format": "fp32"}
    load(parse_model({"name": "demo", "checkpoint": "c.parquet", "tables": {"t": of}}, tmp_path), root)
    table: Any = attached(root)
    assert (table.row_map.find(np.array([0, 1, -1])) >= 0).tolist() == [count == 1, False, False]
    if missing == "zero":
        assert (
            vectors_of(table, [1, 0]) == np.array([np.zeros(12), VALUES[0] if count else np.zeros(12)])
        ).all()


@pytest.mark.parametrize("dim", [64, 60])
def test_a_slot_that_no_id_has_gives_no_id(root: Path, tmp_path: Path, dim: int) -> None:
    """Whose bytes would be those of id 0: of tables of one id and two slots, in which id 0 would have the
    empty one."""
    ids = [i for i in range(1, 20) if np.unique(built(np.array([i])).places(np.array([0, i]))).size == 2]
    assert ids
    for id_ in ids[:3]:
        publish_raw(tmp_path, root, {"t": (np.array([id_]), rows_of(1, dim))}, {"t": {"buckets": 1}})
        table: Any = attached(root)
        assert table.row_map.find(np.array([0, id_])).tolist() == [
            -1,
            table.row_map.index.places(np.array([id_]))[0],
        ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.drawn(3)
def test_every_id_of_a_table_without_id_0_is_there(root: Path, tmp_path: Path, seed: int) -> None:
    """Among them the one whose row id 0 would have."""
    ids = np.random.default_rng(seed).permutation(5000)[:3000].astype(np.int64) + 1
    publish_raw(tmp_path, root, {"t": (ids, rows_of(3000, 16))}, {"t": {"missing": "zero", "buckets": 1}})
    table: Any = attached(root)
    assert (table.row_map.find(ids) >= 0).all() and table.row_map.find(np.zeros(1, np.int64)) == [-1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.drawn(1)
def test_one_thread_and_two_write_the_same_segment(root: Path, tmp_path: Path, threads: int) -> None:
    """Rows and indexes byte for byte, which the checksums stand for; blocks come in any order."""
    ids = np.random.default_rng(3).permutation(60_000).astype(np.int64) * 7919
    tables = {"t": (ids, rows_of(60_000, 8))}
    for count in (1, threads):
        publish_raw(tmp_path, root, tables, {"t": {"missing": "zero"}}, settings=LoadSettings(threads=count))  # type: ignore[arg-type]
    one, two = (Model(root, "demo").attach(version) for version in (1, 2))
    assert one.content() == two.content()


def test_progress_counts_ids_and_then_rows(root: Path, tmp_path: Path) -> None:
    """Ids of the checkpoint and of the older version three times, as they are counted, put into buckets
    and placed; then rows."""
    publish_raw(tmp_path, root, {"t": (IDS[:100] ^ 1, VALUES[:100])})
    seen: list[tuple[int, int]] = []
    of = {"t": {"missing": "backfill:demo@1"}}
    publish_raw(
        tmp_path, root, {"t": (IDS, VALUES)}, of, progress=lambda done, total: seen.append((done, total))
    )
    start = seen.index((0, 1000))
    assert seen[start - 1] == (3300, 3300) and {total for _, total in seen[:start]} == {3300}
    assert seen[-1] == (1000, 1000) and {total for _, total in seen[start:]} == {1000}
    assert all(
        before[0] <= after[0] for part in (seen[:start], seen[start:]) for before, after in pairwise(part)
    )
    assert len(seen[:start]) > 5, "told as it goes, not at the end alone"


def test_rows_lie_by_bucket(root: Path, tmp_path: Path) -> None:
    """As many buckets as model.toml says, by hash or by ranges of ids; each has the slots of its ids."""
    ids = np.arange(0, 3000, 3)
    publish_raw(tmp_path, root, {"t": (ids, VALUES)}, {"t": {"buckets": 8, "bucket_ids": 400}})
    table: Any = attached(root)
    index = table.row_map.index
    assert (index.buckets, index.bucket_ids) == (8, 400)
    per_bucket = np.bincount(ids // 400, minlength=8)
    assert np.diff(index.directory[:, 0]).tolist() == [slots_for(n) for n in per_bucket.tolist()]
    np.testing.assert_allclose(vectors_of(table, ids), quantized(VALUES, table), atol=1e-5)
    publish_raw(tmp_path, root, {"t": (ids, VALUES)})
    index = attached(root).row_map.index  # type: ignore[union-attr]
    assert index is not None and (index.buckets, index.bucket_ids) == (1024, 0)


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize(("duplicates", "kept"), [("first", [0, 1, 3]), ("last", [5, 4, 3])])
def test_one_of_the_same_ids_counts(
    root: Path, tmp_path: Path, saver: str, duplicates: str, kept: list[int]
) -> None:
    """The first or the last as the checkpoint has them, and none of the others."""
    ids = np.array([7, -1, 7, 0, -1, 7])
    publish_raw(
        tmp_path,
        root,
        {"t": (ids, VALUES[:6])},
        {"t": {"duplicates": duplicates}},
        saver=saver,
        row_format="fp32",
    )
    table = attached(root)
    np.testing.assert_array_equal(vectors_of(table, [7, -1, 0]), VALUES[kept])
    assert table.row_map is not None and table.row_map.count == 3


# ---- what is refused ----


def _nothing_is_left(root: Path) -> bool:
    """No version, no unfinished file and no scratch file of a load."""
    model = Model(root, "demo")
    names = {p.name for p in model.folder.iterdir()} if model.folder.is_dir() else set()
    return not model.versions() and names <= {"load.lock", "record.lock", "current", "current.new"}


@pytest.mark.parametrize("saver", SAVERS)
def test_the_same_id_twice_is_refused(root: Path, tmp_path: Path, saver: str) -> None:
    """The error names the id and both places, files and rows, and what to do."""
    ids = IDS.copy()
    ids[900] = ids[17]
    with pytest.raises(CheckpointError) as caught:
        publish_raw(tmp_path, root, {"t": (ids, VALUES)}, saver=saver)
    message = str(caught.value)
    assert (
        f"id {ids[17]} comes twice: {tmp_path}" in message and 'set duplicates = "first" or "last"' in message
    )
    places = (
        ("row 17 (row group 0)", "row 900 (row group 2)") if saver == "parquet" else ("row 17", "row 900")
    )
    assert all(place in message for place in places), message
    assert _nothing_is_left(root)


def test_an_id_outside_all_buckets_is_refused(root: Path, tmp_path: Path) -> None:
    """With the ids that have one, and the setting to change."""
    with pytest.raises(
        ModelError,
        match=r"\[tables.t\]: id -3 has no bucket: 4 buckets of 10 ids hold ids from 0 to 39; set bucket",
    ):
        publish_raw(
            tmp_path, root, {"t": (np.array([1, -3]), VALUES[:2])}, {"t": {"buckets": 4, "bucket_ids": 10}}
        )
    assert _nothing_is_left(root)


@pytest.mark.parametrize("saver", SAVERS)
def test_a_value_that_cannot_be_represented_names_its_row(root: Path, tmp_path: Path, saver: str) -> None:
    """The place of the row in the checkpoint, not in the segment."""
    values = VALUES.copy()
    values[731, 5] = np.nan
    with pytest.raises(
        CheckpointError,
        match=r"weight'.*: row 731 holds a value that int8 cannot represent|row 731.*cannot represent",
    ):
        publish_raw(tmp_path, root, {"t": (IDS, values)}, saver=saver)
    assert _nothing_is_left(root)


def test_a_dim_that_the_format_cannot_pack(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dim 6 does not fill whole bytes in int2"):
        publish_raw(tmp_path, root, {"t": (IDS, rows_of(1000, 6))}, row_format="int2")
    assert _nothing_is_left(root)


# ---- memory, and faults with real processes ----


@pytest.mark.drawn(0.25)
def test_memory_of_a_load_does_not_grow_with_the_ids(root: Path, tmp_path: Path) -> None:
    """Ids of 24 MB, sorted as records of 48 MB, and vectors of 96 MB: what a load holds privately stays
    within 32 MiB of an idle process, its buffers and the index (a third of a byte an id) included. It is
    measured in a process of its own."""
    count = 3_000_000
    save_npz(
        tmp_path, {"t": (np.arange(count, dtype=np.int64) * 7919, np.broadcast_to(rows_of(1, 8), (count, 8)))}
    )
    script = f"""
        import re, threading
        from pathlib import Path
        from tableside.loader.load.load import load
        from tableside.loader.load.settings import LoadSettings
        from tableside.loader.model.model import parse_model
        import tableside.quant.cpu.index_builder, tableside.quant.cpu.native
        def private():
            return 1024 * int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
        idle, peak, done = private(), 0, threading.Event()
        def watch():
            global peak
            while not done.wait(0.001):
                peak = max(peak, private())
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        of = {{"key": "t.weight", "id_key": "t.ids", "ids": "raw"}}
        raw = {{"name": "big", "checkpoint": "c.npz", "tables": {{"t": of}}}}
        spec = parse_model(raw, Path({str(tmp_path)!r}))
        load(spec, Path({str(root)!r}), LoadSettings(threads=1, max_memory_bytes=24 << 20, backend="native"))
        done.set()
        watcher.join()
        print(peak - idle)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 32 << 20
    assert attached(root, "t", "big").row_map.count == count  # type: ignore[union-attr]


STEPS = {
    "counting": "import tableside.quant.cpu.index_builder as b, os; b.IndexBuilder.begin = lambda *a: "
    "os.kill(os.getpid(), 9)",
    "sorting": "import tableside.quant.cpu.index_builder as b, os; b.IndexBuilder.put = lambda *a: "
    "os.kill(os.getpid(), 9)",
    "building": "import tableside.quant.cpu.index_builder as b, os; b.IndexBuilder.build = lambda *a: "
    "os.kill(os.getpid(), 9)",
    "writing": "import tableside.loader.load.raw_ids as r, os; r.IndexedRows.put = lambda *a: "
    "os.kill(os.getpid(), 9)",
    "finishing": "import tableside.loader.load.raw_ids as r, os; r.IndexedRows.finish = lambda *a: "
    "os.kill(os.getpid(), 9)",
    **PUBLISHING,
}


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("step", STEPS)
def test_a_load_killed_at_each_step(step: str, root: Path, tmp_path: Path) -> None:
    """The version before it stays live and whole, no scratch file stays, and the next load and gc leave
    one version alone."""
    publish_raw(tmp_path, root, {"t": (IDS, VALUES)})
    (tmp_path / "model.toml").write_text(
        'name = "demo"\ncheckpoint = "c.npz"\n[tables.t]\nkey = "t.weight"\nids = "raw"\nid_key = '
        '"t.ids"\nmissing = "mean"\n'
    )
    command = ["load", str(tmp_path / "model.toml"), "--root", str(root)]
    script = (
        f"{STEPS[step]}\nimport sys\nfrom tableside.serving.cli.cli import main\nsys.exit(main({command!r}))"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    model = Model(root, "demo")
    assert model.current() == 1
    Segment(model.path(1))
    assert not [p.name for p in model.folder.iterdir() if "scratch" in p.name]
    again = run_tableside(*command)
    assert again.returncode == 0, again.stderr
    np.testing.assert_allclose(vectors_of(attached(root), IDS), vectors_of(attached(root, version=1), IDS))
    model.collect(keep=0)
    assert files_of(model.folder) == {f"{model.current()}.segment"}


def test_a_scratch_file_has_no_name(root: Path) -> None:
    """So it goes with the process that has it, however that ends; a name that a killed load left is
    cleared by the next one."""
    model = Model(root, "demo")
    seed = random.randrange(100)
    with model.loading() as version:
        fd = model.create_scratch(version)
        os.write(fd, bytes([seed]))
        assert not [p for p in model.folder.iterdir() if "scratch" in p.name]
        os.close(fd)
        (model.folder / f"{version}.scratch.partial").touch()
    with model.loading():
        assert not [p for p in model.folder.iterdir() if "scratch" in p.name]
