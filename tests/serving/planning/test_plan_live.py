"""`tableside plan --live`: what workers are asked for, sampled while somebody wants to know."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
from json_keys import documented_keys, keys_of
from support import run_tableside, until

pa = pytest.importorskip("pyarrow", reason="the eval extra brings it")
import pyarrow.parquet as pq  # noqa: E402

from tableside.loader.load.load import Loaded  # noqa: E402
from tableside.loader.versions.states import attach_state  # noqa: E402
from tableside.loader.versions.versions import Model  # noqa: E402
from tableside.quant.contract import Place  # noqa: E402
from tableside.quant.cpu.uses import Uses, read_uses, sample_uses  # noqa: E402
from tableside.serving.client import Client  # noqa: E402
from tableside.serving.errors import ServingError  # noqa: E402
from tableside.serving.planning.plan import Goals, plan, plan_live  # noqa: E402
from tableside.serving.service.uses import asking, salts_of  # noqa: E402

Publish = Callable[..., Loaded]
ROWS = 20_000


@contextlib.contextmanager
def asked_for(url: str, ids: list[list[int]]) -> Iterator[None]:
    """Looks these ids up of two features of `demo`, again and again, by two workers; not so often that a
    sample of the ids is kept."""
    ends = threading.Event()

    def ask() -> None:
        with Client(url) as client:
            while not ends.wait(0.01):
                client.lookup("demo", {"user": ids, "text": [[1]]})

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


@pytest.mark.drawn(0.25)
def test_what_running_workers_are_asked_for(start: Any) -> None:
    """Ids of all workers are counted and planned; nothing is left, and a server that is not asked says so."""
    server = start("--workers", 2)
    with asked_for(server.url, [[1, 2, 3], [3, 500]]):
        found = run_tableside("plan", "demo", "--live", 3, "--json", root=server.root)
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert keys_of(said) == documented_keys("plan")
    tables = {t["name"]: t for t in said["tables"]}
    assert said["rows"] > 10 and said["ids"] == 6 * said["rows"] and said["sampled"] == 1
    assert (tables["user"]["used_rows"], tables["word"]["used_rows"]) == (4, 1)
    assert tables["item"]["ids"] == 0 and said["ids_without_row"] == 0
    assert said["sizes"][-1]["lru"] == said["sizes"][-1]["lfu"] == 1, "all rows were used in the first half"
    assert not list(server.root.glob(".uses-*"))
    silent = run_tableside("plan", "demo", "--live", 0.5, root=server.root)
    assert silent.returncode == 1 and "no worker was asked for rows of demo" in silent.stderr


@pytest.mark.gpu
@pytest.mark.drawn(0.25)
def test_what_doors_of_an_engine_are_asked_for(start: Any) -> None:
    """Requests that the engine process answers are sampled by the doors that took them."""
    server = start("--devices", tables.serve_device(), "--gpu-from-ids", 0, "--workers", 1)
    with asked_for(server.url, [[1, 2, 3], [3, 500]]):
        found = run_tableside("plan", "demo", "--live", 3, "--json", root=server.root)
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["rows"] > 0 and said["ids"] == 6 * said["rows"]


@pytest.mark.drawn(0.25)
def test_one_at_a_time_and_a_killed_one_is_in_no_ones_way(publish: Publish, root: Path) -> None:
    publish({"t": np.zeros((10, 4), np.float32)}, features={"f": {"table": "t"}})
    command = [sys.executable, "-m", "tableside", "plan", "demo", "--live", "600", "--root", str(root)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: process.poll() is None and (root / ".uses-demo" / "asked").exists(), 60, "it to ask")
        second = run_tableside("plan", "demo", "--live", 1, root=root)
        assert second.returncode == 1 and "another process samples the ids of demo" in second.stderr
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert (root / ".uses-demo").exists()
    with asking(root, "demo", 1.0) as asked:
        assert asked.read(1, 1) == []
    assert not (root / ".uses-demo").exists()


@pytest.mark.drawn(0.25)
def test_a_version_that_becomes_live_meanwhile_is_named(publish: Publish, root: Path) -> None:
    """Where it is why nothing of the other one was asked for."""
    tables = {"t": np.zeros((10, 4), np.float32)}
    publish(tables, features={"f": {"table": "t"}})
    command = [sys.executable, "-m", "tableside", "plan", "demo", "--live", "5", "--root", str(root)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: process.poll() is None and (root / ".uses-demo" / "asked").exists(), 60, "it to ask")
        publish(tables, features={"f": {"table": "t"}})
    finally:
        _, said = process.communicate()
    assert process.returncode == 1 and "version 2 became live meanwhile: ask again" in said, said


@pytest.mark.drawn(0.25)
def test_either_data_or_live(publish: Publish, root: Path) -> None:
    publish({"t": np.zeros((10, 4), np.float32)}, features={"f": {"table": "t"}})
    for options in ((), ("x.parquet", "--live", 1)):
        found = run_tableside("plan", "demo", *options, root=root)
        assert found.returncode == 1 and "either requests (a file or a folder) or --live" in found.stderr


@pytest.mark.drawn(0.25)
def test_a_drawing_without_a_folder_is_refused_before_it_is_sampled(
    publish: Publish, root: Path, tmp_path: Path
) -> None:
    publish({"t": np.zeros((10, 4), np.float32)}, features={"f": {"table": "t"}})
    for file in (tmp_path / "none" / "c.svg", tmp_path):
        found = run_tableside("plan", "demo", "--live", 1, "--svg", file, root=root)
        assert found.returncode == 1 and f"--svg is {file}; expected a file" in found.stderr
        assert "sampling" not in found.stderr


def sampled(requests: list[np.ndarray], worker: int, size: int, seconds: float) -> Uses:
    """What one of two workers samples, that takes every second request."""
    sample = np.zeros(size, np.uint8)
    salts = salts_of(["t"])
    for n in range(worker, len(requests), 2):
        ids = requests[n]
        places = np.array([Place(0, 0, ids.size, -1, ids.size, 1, -1, 0)], np.int64)
        ms = int(1000 * seconds * n / len(requests))
        sample_uses(sample, places, ids.tobytes(), salts, ms >= 500 * seconds, ms)
    found = read_uses(sample.tobytes(), 1)
    assert found is not None
    return found


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("sizes", "within"), [((1 << 22, 1 << 22), 0.005), ((1 << 18, 1 << 15), 0.05)])
def test_as_of_the_same_requests_in_a_file(
    publish: Publish, root: Path, tmp_path: Path, sizes: tuple[int, int], within: float
) -> None:
    """Two workers' samples together predict what all requests do, also where they left out different shares
    of the rows, and some ids have no row."""
    publish({"t": np.zeros((ROWS, 8), np.float32)}, features={"f": {"table": "t"}})
    rng = np.random.default_rng(6)
    requests = [rng.zipf(1.2, 32) * 7919 % (ROWS + 500) for _ in range(4000)]
    pq.write_table(pa.table({"f": [r.tolist() for r in requests]}), tmp_path / "r.parquet")
    segment = attach_state(Model(root, "demo"), None, "header")
    whole = plan(segment, tmp_path / "r.parquet", batch_rows=1)
    parts = [sampled(requests, n, size, 4.0) for n, size in enumerate(sizes)]
    assert (parts[0].bits < parts[1].bits) == (sizes[0] > sizes[1])
    found = plan_live(segment, parts, 4.0, Goals())
    assert found.references.share == 2.0 ** -max(p.bits for p in parts)
    assert (found.rows, found.ids) == (whole.rows, whole.ids) == (4000, 128_000)
    assert found.without_row == pytest.approx(whole.without_row, abs=within * found.ids)
    assert found.sizes == whole.sizes
    for hits, of_whole in ((found.lru, whole.lru), (found.lfu, whole.lfu)):
        assert found.hit_rates(hits) == pytest.approx(whole.hit_rates(of_whole), abs=within + 0.01)


def test_nothing_was_asked_for(publish: Publish, root: Path) -> None:
    publish({"t": np.zeros((10, 4), np.float32)}, features={"f": {"table": "t"}})
    segment = attach_state(Model(root, "demo"), None, "header")
    with pytest.raises(ServingError, match="no worker was asked for rows of demo version 1"):
        plan_live(segment, [], 1.0, Goals())
