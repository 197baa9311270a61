"""A root on a hugetlbfs of 2 MiB pages: everything that a root on a tmpfs does, on pages that the
administrator set aside."""

import gc
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from reference import REFERENCE
from servers import start_server
from support import end, rows_of, run_tableside, until

from tableside.loader.errors import NoSpace
from tableside.loader.load.load import Loaded
from tableside.loader.segment.huge_pages import free_huge_bytes, huge_page_bytes
from tableside.loader.segment.memory import available_bytes
from tableside.loader.versions.record import VersionRecord
from tableside.loader.versions.versions import Model

PAGE = 2 << 20
PAGES = 24
POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
Publish = Callable[..., Loaded]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs with 24 pages of its own, taken from the machine for this test and given back after it."""
    folder = tmp_path / "huge"
    folder.mkdir()
    before = int(POOL.read_text()) if POOL.exists() else 0
    try:
        POOL.write_text(str(before + PAGES))
    except OSError as error:
        pytest.skip(f"huge pages are set aside by root: {error}")
    options = f"pagesize=2M,size={PAGES * PAGE}"
    mounted = subprocess.run(
        ["mount", "-t", "hugetlbfs", "-o", options, "none", folder], capture_output=True, check=False
    )
    try:
        if mounted.returncode:
            pytest.skip(f"this machine mounts no hugetlbfs or has no {PAGES} pages: {mounted.stderr!r}")
        yield folder
    finally:
        gc.collect()  # a segment that is still mapped keeps its pages
        if not mounted.returncode:
            for (
                model
            ) in folder.iterdir():  # another mount namespace, made meanwhile, would keep what is not removed
                shutil.rmtree(model)
            subprocess.run(["umount", folder], check=True)

        def is_given_back() -> bool:
            POOL.write_text(str(before))
            return int(POOL.read_text()) == before

        until(is_given_back)  # a process that ends has its pages for a moment more


@pytest.mark.drawn(0.5)
def test_a_version_is_published_attached_and_replaced(publish: Publish, root: Path) -> None:
    """Rows, record, rollback and removal; the loader says the pages; sizes are whole pages."""
    first, second = rows_of(1000, 32, 1), rows_of(60_000, 32, 2)
    loaded = publish({"t": first})
    assert (loaded.page_bytes, loaded.huge_fraction, loaded.segment_bytes) == (PAGE, 1.0, PAGE)
    model = Model(root, "demo")
    kept = model.attach()
    assert publish({"t": second}).segment_bytes == 2 * PAGE
    assert model.record() == VersionRecord(2, 2, (1, 2))
    held = model.attach()
    assert held.mapping.address % PAGE == 0
    assert held.mapping.huge_fraction() == 1.0
    held.verify()
    for segment, values in ((kept, first), (held, second)):
        assert np.abs(REFERENCE.dequantize(segment.tables["t"]) - values).max() < 0.1
    model.activate(1)
    assert model.record() == VersionRecord(1, 2, (2, 1))
    model.remove(2)
    assert model.versions() == [1]
    assert {path.name for path in model.folder.iterdir()} == {
        "1.segment",
        "current",
        "current.new",
        "load.lock",
        "record.lock",
    }


@pytest.mark.drawn(0.5)
def test_pages_are_counted_and_given_back(publish: Publish, root: Path) -> None:
    """What is free is the file system's; a model takes two pages for its record, and those of its versions
    until they go."""
    assert available_bytes(root) == PAGES * PAGE
    publish({"t": rows_of(1000, 32)})
    assert available_bytes(root) == (PAGES - 3) * PAGE
    model = Model(root, "demo")
    publish({"t": rows_of(1000, 32)})
    model.remove(1)
    assert available_bytes(root) == (PAGES - 3) * PAGE


@pytest.mark.thorough
def test_a_segment_that_does_not_fit(publish: Publish, root: Path) -> None:
    """NoSpace says which pages to set aside; nothing stays, and what was published still serves."""
    publish({"t": rows_of(1000, 32)})
    with pytest.raises(NoSpace, match=r"huge pages, the segment needs .*hugepages-2048kB/nr_hugepages"):
        publish({"t": rows_of(2_000_000, 32)})
    assert available_bytes(root) == (PAGES - 3) * PAGE
    assert Model(root, "demo").attach().tables["t"].rows == 1000


@pytest.mark.thorough
def test_a_server_serves_and_counts(publish: Publish, root: Path, tmp_path: Path) -> None:
    """Its counters lie in /dev/shm and not among the huge pages; the command line says the pages."""
    publish({"t": rows_of(1000, 32)}, features={"f": {"table": "t"}})
    left = available_bytes(root)
    server = start_server(root)
    try:
        assert "tableside_segment_bytes" in server.get("/metrics").text
        assert len(server.workers()) == 1
        assert available_bytes(root) == left
        assert not list(root.glob(".metrics-*"))
    finally:
        end(server.process)
    np.save(tmp_path / "t.npy", rows_of(1000, 32))
    (tmp_path / "model.toml").write_text('name = "demo"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
    assert "100% on 2 MiB pages" in run_tableside("load", tmp_path / "model.toml", "--root", root).stdout


def test_other_file_systems_have_no_huge_pages_of_their_own(tmp_path: Path) -> None:
    """A tmpfs and a disk are told from a hugetlbfs; what the pool of the machine has free is a number of
    pages."""
    assert huge_page_bytes(tmp_path) == huge_page_bytes(Path("/dev/shm")) == 0
    with (tmp_path / "file").open("wb") as file:
        assert huge_page_bytes(file.fileno()) == 0
    with pytest.raises(FileNotFoundError, match="nowhere"):
        huge_page_bytes(tmp_path / "nowhere")
    if POOL.exists():
        assert free_huge_bytes(PAGE) % PAGE == 0
