"""The load: right rows from every kind of checkpoint, little memory, and versions that are activated, checked
and removed."""

import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reference import REFERENCE
from safetensors.numpy import save_file
from support import LONGEST_S, rows_of, run_tableside
from tables import fitting

from tableside.loader.errors import CheckpointError, LoaderError, ModelError, VersionError
from tableside.loader.load.load import Loaded, load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.versions import versions
from tableside.loader.versions.folder import Folder
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat

Publish = Callable[..., Loaded]

DCP = Path(__file__).parent.parent.parent / "fixtures" / "torchrec_dcp"


@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
@pytest.mark.parametrize("rows", [1, 2, 999, 30_011])
@pytest.mark.drawn(9)
def test_rows_dequantize_to_the_checkpoint_within_the_bound(
    publish: Publish, root: Path, row_format: RowFormat, rows: int
) -> None:
    """One row, odd numbers of rows, more than one chunk."""
    dim = fitting(row_format, 24)
    values = rows_of(rows, dim)
    loaded = publish({"t": values}, formats={"t": row_format.label})
    table = Model(root, "demo").attach().tables["t"]
    assert (table.rows, table.dim, loaded.version) == (rows, dim, 1)
    error = np.abs(REFERENCE.dequantize(table) - values).max(1)
    low, high = values.min(1), values.max(1)
    assert all(
        e <= row_format.error_bound(float(a), float(b)) for e, a, b in zip(error, low, high, strict=True)
    )


def test_every_backend_writes_the_same_segment(publish: Publish, root: Path) -> None:
    values = rows_of(5000, 32)
    for name, chosen in (("first", "native"), ("second", "fbgemm")):
        publish({"t": values}, name=name, formats={"t": "int4"}, settings=LoadSettings(backend=chosen))
    first, second = (Model(root, n).attach().tables["t"].packed for n in ("first", "second"))
    np.testing.assert_array_equal(first, second)


def test_a_checkpoint_that_torchrec_sharded(root: Path) -> None:
    """Replicated, by row and by column, end to end."""
    tables = {
        t: {"key": f"sparse.embedding_bags.{t}.weight", "row_format": "fp32"}
        for t in ("replicated", "by_row", "by_column")
    }
    load(parse_model({"name": "ads", "checkpoint": str(DCP), "tables": tables}, Path()), root)
    segment = Model(root, "ads").attach()
    expected = np.load(DCP / "expected.npz")
    for name, table in segment.tables.items():
        np.testing.assert_array_equal(REFERENCE.dequantize(table), expected[name])


def test_a_checkpoint_of_many_files(root: Path, tmp_path: Path) -> None:
    """The header names them all; it does not outgrow its place."""
    names = [f"model-{i:05}-of-00040.safetensors" for i in range(40)]
    for i, name in enumerate(names):
        save_file({f"t{i}": rows_of(3, 8, i)}, tmp_path / name)
    index = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tables = {f"t{i}": {"key": f"t{i}"} for i in range(40)}
    load(parse_model({"name": "many", "checkpoint": ".", "tables": tables}, tmp_path), root)
    assert len(Model(root, "many").attach().header.source["files"]) == 40


def test_a_record_that_cannot_be_written_publishes_nothing(
    publish: Publish, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC at the last step: the version before it stays live, and nothing of the new one is left."""
    publish({"t": rows_of(10, 8)})

    def full(fd: int, text: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        publish({"t": rows_of(20, 8)})
    model = Model(root, "demo")
    assert (model.versions(), model.current()) == ([1], 1)
    assert not list(model.folder.glob("*.partial"))


def test_a_flip_that_fails_publishes_nothing(
    publish: Publish, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new version is visible for a moment before the flip; where that fails it goes again."""
    publish({"t": rows_of(10, 8)})

    def fails(folder: Folder) -> None:
        assert folder.exists("2.segment")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(versions, "flip", fails)
    with pytest.raises(OSError, match="Input/output"):
        publish({"t": rows_of(20, 8)})
    model = Model(root, "demo")
    assert (model.versions(), model.loading_versions(), model.current()) == ([1], [], 1)


def test_readers_of_the_record_see_a_whole_one(
    publish: Publish, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each step of a flip the record names the old version or the new one: it is never
    torn or gone."""
    publish({"t": rows_of(10, 8)})
    seen: list[int] = []

    def looked_at(step: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: object) -> None:
            seen.append(Model(root, "demo").record().current)
            step(*arguments)
            seen.append(Model(root, "demo").record().current)

        return run

    for name in ("rename", "unlink"):
        monkeypatch.setattr(Folder, name, looked_at(getattr(Folder, name)))
    for name in ("pwrite", "ftruncate"):
        monkeypatch.setattr(os, name, looked_at(getattr(os, name)))
    publish({"t": rows_of(20, 8)})
    Model(root, "demo").activate(1)
    monkeypatch.undo()
    turns = [version for i, version in enumerate(seen) if not i or version != seen[i - 1]]
    assert turns == [1, 2, 1]


def test_a_value_that_cannot_be_represented_names_table_and_row(publish: Publish, root: Path) -> None:
    """The row's number in the checkpoint, not in a chunk; and no version appears."""
    values = rows_of(40_000, 64)
    values[31_234, 5] = np.nan
    with pytest.raises(CheckpointError, match=r"'t': row 31234 holds a value that int8 cannot represent"):
        publish({"t": values})
    assert Model(root, "demo").versions() == []
    assert list(Model(root, "demo").folder.glob("*.partial")) == []


def test_a_dim_that_the_format_cannot_pack(publish: Publish) -> None:
    with pytest.raises(ModelError, match="dim 6 does not fill whole bytes in int2"):
        publish({"t": rows_of(4, 6)}, formats={"t": "int2"})


def test_too_little_memory_is_refused(publish: Publish) -> None:
    with pytest.raises(ModelError, match="max memory is 1,000 bytes; a load of this model needs at least"):
        publish({"t": rows_of(4, 8)}, settings=LoadSettings(max_memory_bytes=1000))


def test_progress_counts_every_row(publish: Publish, tmp_path: Path, root: Path) -> None:
    np.save(tmp_path / "t.npy", rows_of(50_000, 16))
    spec = parse_model({"name": "p", "checkpoint": "t.npy", "tables": {"t": {"key": "t"}}}, tmp_path)
    seen: list[tuple[int, int]] = []
    load(spec, root, progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 50_000)
    assert seen[-1] == (50_000, 50_000)


@pytest.mark.thorough
def test_memory_of_a_load_does_not_grow_with_the_table(tmp_path: Path, root: Path) -> None:
    """Private memory of a load of 400 MB stays within 256 MiB of an idle process; it is measured in a
    process of its own."""
    values = np.lib.format.open_memmap(tmp_path / "t.npy", "w+", np.float32, (1_600_000, 64))
    for start in range(0, len(values), 100_000):
        values[start : start + 100_000] = rows_of(100_000, 64, start)
    values.flush()
    del values
    script = f"""
        import threading, time
        from pathlib import Path
        from tableside.loader.load.load import load
        from tableside.loader.segment.memory import pss_bytes
        from tableside.loader.model.model import parse_model
        idle, peak, done = pss_bytes()["private"], 0, threading.Event()
        def watch():
            global peak
            while not done.wait(0.002):
                peak = max(peak, pss_bytes()["private"] - pss_bytes()["pss_shmem"])
        watcher = threading.Thread(target=watch)
        watcher.start()
        raw = {{"name": "big", "checkpoint": "t.npy", "tables": {{"t": {{"key": "t"}}}}}}
        spec = parse_model(raw, Path({str(tmp_path)!r}))
        load(spec, Path({str(root)!r}))
        done.set()
        watcher.join()
        print(peak - idle)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST_S,
    )
    assert int(found.stdout) < 256 << 20


def test_versions_activate_roll_back_and_go(publish: Publish, root: Path) -> None:
    """Numbers are never given twice; the live version cannot be removed; an attached one outlives its
    file."""
    for i in range(3):
        publish({"t": rows_of(10 + i, 8)})
    model = Model(root, "demo")
    old = model.attach(2)
    model.activate(1)
    assert (model.current(), model.record().latest) == (1, 3)
    with pytest.raises(VersionError, match="version 1 of 'demo' is live"):
        model.remove(1)
    model.remove(3)
    model.remove(2)
    assert REFERENCE.dequantize(old.tables["t"]).shape == (11, 8)
    assert publish({"t": rows_of(5, 8)}).version == 4
    with pytest.raises(VersionError, match=r"version 2 is not published \(versions there: 1, 4\)"):
        model.activate(2)
    with pytest.raises(VersionError, match="is not published"):
        model.attach(9)
    with pytest.raises(VersionError, match="no version is live"):
        Model(root, "other").attach()
    assert model.remove_all() == 2
    assert (model.versions(), model.record().current) == ([], 0)
    assert publish({"t": rows_of(5, 8)}).version == 5


def test_a_damaged_version_is_not_activated(publish: Publish, root: Path) -> None:
    publish({"t": rows_of(10, 8)})
    publish({"t": rows_of(10, 8)})
    model = Model(root, "demo")
    _flip_bit(model.path(1), -5)
    with pytest.raises(LoaderError, match="checksum is wrong"):
        model.activate(1)
    assert model.current() == 2


def _flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    last = len(data) - 4096 + 16
    data[last] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_header_alone_is_verified_where_that_is_asked_for(publish: Publish, root: Path) -> None:
    """Rows are not read then: a flipped bit goes unnoticed, and without that it does not."""
    publish({"t": rows_of(10, 8)})
    model = Model(root, "demo")
    _flip_bit(model.path(1), -5)
    assert model.attach(1, "header").tables["t"].rows == 10
    with pytest.raises(LoaderError, match="checksum is wrong"):
        model.attach(1)


@pytest.mark.drawn(0.25)
def test_a_flipped_bit_is_found_by_verify(publish: Publish, root: Path) -> None:
    """`tableside verify` names model, version and rows, and exits with 1."""
    publish({"t": rows_of(10, 8)})
    assert run_tableside("verify", root=root).returncode == 0
    _flip_bit(Model(root, "demo").path(1), -5)
    found = run_tableside("verify", "demo", root=root)
    assert found.returncode == 1
    assert "table 't', rows [0, 10): the checksum is wrong" in found.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "1", '"x"', "null", '{"current": {}, "latest": 1}', "[" * 100_000]
)
@pytest.mark.drawn(4)
def test_an_unreadable_flip_record_names_the_remedy(text: str, publish: Publish, root: Path) -> None:
    """The remedy works, whatever stands there."""
    publish({"t": rows_of(10, 8)})
    model = Model(root, "demo")
    (model.folder / "current").write_text(text)
    with pytest.raises(VersionError, match="tableside activate demo VERSION"):
        model.attach()
    model.activate(1)
    assert model.attach().header.version == 1
