"""Workers on a GPU: placements, batching, versions, and a GPU that is not there. The kernels run in
Triton's interpreter, or on the GPU that --device names."""

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tables
from rounding import Expected, expect
from servers import TABLES, publish_demo
from support import run_tableside, until

from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, Precision, RowFormat, choose
from tableside.serving.client import Client, ClientError, Jagged

pytestmark = pytest.mark.gpu

Start = Callable[..., Any]


def on_gpu(workers: int = 1) -> tuple[object, ...]:
    return ("--workers", workers, "--devices", tables.serve_device(), "--gpu-from-ids", 0)


def expected(
    root: Path, features: dict[str, list[list[int]]], version: int | None = None
) -> dict[str, Expected]:
    """What the lookups must give, by feature."""
    segment = Model(root, "demo").attach(version)
    found = {}
    for f in segment.header.features:
        if f.name in features:
            pooling, precision = (
                Pooling.parse(f.pooling),
                Precision.FP16 if f.output == "fp16" else Precision.FP32,
            )
            ids, lengths = jagged(features[f.name])
            bags = None if pooling is Pooling.NONE else lengths
            found[f.name] = expect(segment.tables[f.table], ids, bags, pooling=pooling, precision=precision)
    return found


def on_the_cpu(root: Path, features: dict[str, list[list[int]]]) -> dict[str, np.ndarray]:
    """The vectors of the CPU's kernel, by feature."""
    segment = Model(root, "demo").attach()
    found = {}
    for f in segment.header.features:
        if f.name in features:
            pooling, (ids, lengths) = Pooling.parse(f.pooling), jagged(features[f.name])
            bags, table = None if pooling is Pooling.NONE else lengths, segment.tables[f.table]
            found[f.name] = choose("native").lookup(
                table, ids, bags, pooling=pooling, half=f.output == "fp16"
            )
    return found


def jagged(bags: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([i for bag in bags for i in bag], np.int64), np.array(
        [len(bag) for bag in bags], np.int32
    )


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, Expected]) -> None:
    """Each value within its own bound (tests/helpers/rounding.py), in the feature's precision."""
    assert set(found) == set(wanted)
    for name, expected_vectors in wanted.items():
        assert found[name].dtype == (
            np.float16 if expected_vectors.precision is Precision.FP16 else np.float32
        )
        expected_vectors.check(found[name])


REQUEST = {
    "user": [[1, 2, 3], [], [999]],
    "clicked": [[7] * 9, [0]],
    "liked": [[299], [1, 1]],
    "text": [[3, 49], [0]],
}


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize(
    "options",
    [
        ("hbm",),
        ("uvm",),
        ("host",),
        ("auto", "--hbm-budget", "12KiB"),
        ("uvm", "--threads", "2"),
        ("cached", "--hbm-budget", "1MiB"),
        ("hybrid", "--hbm-budget", "40KiB"),
        ("hybrid", "--hbm-budget", "1MiB"),
    ],
    ids=lambda o: "-".join(o),
)
def test_every_placement_gives_what_the_cpu_gives(start: Start, root: Path, options: tuple[str, ...]) -> None:
    """Few ids, and so many that rows are gathered by the CPU; pooled by sum and mean, weighted, and not
    pooled."""
    server = start(*on_gpu(), "--placement", *options)
    rng = np.random.default_rng(0)
    many = {"user": rng.integers(0, 1000, (3, 200)).tolist(), "text": rng.integers(0, 50, (2, 150)).tolist()}
    with Client(server.url) as client:
        for request in (REQUEST, many):
            assert_close(client.lookup("demo", request), expected(root, request))
        weights = rng.standard_normal(600).astype(np.float32)
        ids, lengths = np.array(many["user"]).reshape(-1), np.full(3, 200, np.int32)
        found = client.lookup("demo", {"user": Jagged(ids, lengths, weights)})["user"]
        table = Model(root, "demo").attach().tables["user"]
        assert_close(
            {"user": found}, {"user": expect(table, ids, lengths, pooling=Pooling.SUM, weights=weights)}
        )
    in_hbm = 3 if options == ("hybrid", "--hbm-budget", "1MiB") else {"hbm": 3, "auto": 2}.get(options[0], 0)
    found = [t["placement"] for t in server.get("/v1/models").json()["models"][0]["tables"]]
    assert found.count("hbm") == in_hbm
    assert options[0] != "hybrid" or in_hbm or found == ["hybrid"] * 3


@pytest.mark.thorough
def test_ids_that_are_wrong_are_refused_as_on_the_cpu(start: Start) -> None:
    server = start(*on_gpu())
    with Client(server.url, retries=0) as client:
        with pytest.raises(
            ClientError,
            match=r"feature 'clicked': id 5000 at position 2 is outside the table's rows \[0, 300\)",
        ):
            client.lookup("demo", {"user": [[1]], "clicked": [[3], [4, 5000]]})
        with pytest.raises(ClientError, match=r"id -1 at position 0"):
            client.lookup("demo", {"text": [[-1]]})


@pytest.mark.thorough
def test_requests_that_arrive_together_go_to_the_gpu_together(start: Start, root: Path) -> None:
    """Twelve that came while the engine was stopped, two of them wrong, in fewer batches: each gets its
    own answer, and only those two are refused."""
    server = start(*on_gpu(), "--max-batch", 6)
    (engine,) = server.engines()
    refused, wrong = [], []

    def ask(n: int) -> None:
        request = {"user": [[n, n + 1]], "text": [[n]], "liked": [[n] * n]}
        if n in (3, 8):
            request["user"] = [[n, 1000 + n]]
        with Client(server.url, retries=0) as client:
            try:
                assert_close(client.lookup("demo", request), expected(root, request))
            except ClientError as error:
                refused.append((n, str(error)))
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
    os.kill(engine, signal.SIGSTOP)
    try:
        for t in threads:
            t.start()
        in_flight = re.compile(r"tableside_in_flight_requests 1[23]\.0")  # this look may be the thirteenth
        until(lambda: in_flight.search(server.get("/metrics").text), what="all requests to have come")
    finally:
        os.kill(engine, signal.SIGCONT)
    for t in threads:
        t.join()
    assert not wrong
    assert sorted(n for n, _ in refused) == [3, 8], refused
    assert all(f"id {1000 + n} at position 1" in text for n, text in refused)
    text = server.get("/metrics").text
    requests, batches = (
        float(text.split(f"tableside_gpu_batch_requests_{s}{{")[1].split()[1]) for s in ("sum", "count")
    )
    assert requests == 12
    assert batches <= 6
    assert re.search(r'tableside_gpu_seconds_count{device="\S+",stage="queue"} 12.0', text)
    assert re.search(r'tableside_gpu_seconds_count{device="\S+",stage="kernels"} 1.0', text)


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["hbm", "zero_copy"])
def test_a_gpu_worker_killed_under_load(start: Start, root: Path, placement: str) -> None:
    """The other one answers on, rightly, and the killed one is replaced. Their engine stays, with what it
    has placed."""
    server = start(*on_gpu(2), "--placement", placement)
    stop, wrong, answered = threading.Event(), [], []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with Client(server.url, retries=5) as client:
            while not stop.is_set():
                request = {"user": rng.integers(0, 1000, (2, 3)).tolist()}
                try:
                    assert_close(client.lookup("demo", request), expected(root, request))
                    answered.append(1)
                except (ClientError, AssertionError) as error:
                    wrong.append(error)

    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(3)]
    for t in threads:
        t.start()
    until(lambda: len(answered) > 10, what="load")
    before, engines = set(server.workers()), server.engines()
    os.kill(max(before), signal.SIGKILL)
    until(
        lambda: len(set(server.workers()) - before) == 1 and len(server.workers()) == 2, what="a replacement"
    )
    count = len(answered)
    until(lambda: len(answered) > count + 10, what="load after the replacement")
    stop.set()
    for t in threads:
        t.join()
    assert not wrong and server.engines() == engines and len(engines) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("options", [("hbm",), ("cached", "--hbm-budget", "1MiB")], ids=lambda o: o[0])
def test_a_new_version_is_taken(start: Start, root: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """The new version's rows are the ones that the GPU reads, and the old one's memory is let go; what was
    hot is cached anew."""
    server = start(*on_gpu(), "--placement", *options)
    with Client(server.url) as client:
        first = client.lookup("demo", REQUEST)
        publish_demo(root, tmp_path, {name: -values for name, values in TABLES.items()})
        until(lambda: server.get("/v1/models").json()["models"][0]["version"] == 2, what="version 2")
        second = client.lookup("demo", REQUEST)
    assert_close(second, expected(root, REQUEST, 2))
    assert not np.allclose(first["user"], second["user"])
    text = server.get("/metrics").text
    assert "tableside_hbm_bytes" in text and ("tableside_cache_slots" in text) is (options[0] == "cached")


def cache_counts(server: Any, client: Client, table: str) -> dict[str, float]:
    """What /metrics says of a table's lookups through the cache so far: ids, hits, fetched_rows and so on.

    The counts follow every 16th batch, and once a second. Lookups of another table make up the batches until
    those before are counted.
    """
    for _ in range(33):
        client.lookup("demo", {"text": [[1]]})
    pattern = rf'tableside_cache_(\w+)_total{{table="demo/{table}"}} (\S+)'
    return {name: float(value) for name, value in re.findall(pattern, server.get("/metrics").text)}


@pytest.mark.thorough
def test_metrics_count_what_the_cache_did(start: Start) -> None:
    """Rows are fetched once and hit from then on, and slots are taken."""
    server = start(*on_gpu(), "--placement", "cached", "--hbm-budget", "1MiB")
    with Client(server.url) as client:
        before = cache_counts(server, client, "user")
        for _ in range(3):
            client.lookup("demo", {"user": [[5, 6, 7], [8, 9]]})
        after = cache_counts(server, client, "user")
    grown = {name: after[name] - before[name] for name in after}
    row_bytes = RowFormat.INT8.row_bytes(64)
    assert grown == {"ids": 15, "hits": 10, "fetched_rows": 5, "in_place_ids": 0, "bus_bytes": 5 * row_bytes}

    def of_device() -> dict[str, float]:
        text = server.get("/metrics").text
        return {n: float(v) for n, v in re.findall(r'tableside_cache_(\w+){device="\S+"} (\S+)', text)}

    assert of_device()["inserted_rows_total"] >= 5
    # The engine process says once a second how many it holds
    until(lambda: 5 <= of_device()["occupied_slots"] <= of_device()["slots"], what="the occupied slots")
    assert 0 < of_device()["bytes"] <= 2 << 20


@pytest.mark.thorough
def test_counts_of_the_cache_follow_on_a_quiet_server(start: Start) -> None:
    """Three lookups and none after them: what they did is told, though no batch comes that would bring the
    counts."""
    server = start(*on_gpu(), "--placement", "cached", "--hbm-budget", "1MiB")

    def ids() -> float:
        found = re.search(r'tableside_cache_ids_total{table="demo/user"} (\S+)', server.get("/metrics").text)
        return float(found[1]) if found else 0.0

    with Client(server.url) as client:
        before = cache_counts(server, client, "user")["ids"]
        for _ in range(3):
            client.lookup("demo", {"user": [[5, 6, 7], [8, 9]]})
    until(lambda: ids() == before + 15, what="the counts")


@pytest.mark.thorough
def test_a_version_that_is_taken_is_warm(start: Start, root: Path, tmp_path: Path) -> None:
    """Its first request finds the hotter half of what the cache held of the version before, and none of
    that one's rows."""
    server = start(*on_gpu(), "--placement", "cached", "--hbm-budget", "1MiB")
    hot, cool = [*range(100, 120)], [*range(200, 220)]
    with Client(server.url) as client:
        cold = cache_counts(
            server, client, "user"
        )  # of version 1's warm-up, which looks up its first and last rows
        client.lookup("demo", {"user": [cool]})
        for _ in range(3):
            client.lookup("demo", {"user": [hot]})
        before = cache_counts(server, client, "user")
        publish_demo(root, tmp_path, {name: -values for name, values in TABLES.items()})
        until(lambda: server.get("/v1/models").json()["models"][0]["version"] == 2, what="version 2")
        assert_close(client.lookup("demo", {"user": [hot]}), expected(root, {"user": [hot]}, 2))
        after = cache_counts(server, client, "user")
    # Of 42 rows 21 were brought: the first and the last, which the warm-ups use most, and 19 of the hot ones
    # or more.
    assert after["ids"] - before["ids"] == 21 + cold["ids"] + 20
    assert after["hits"] - before["hits"] >= cold["hits"] + 19


@pytest.mark.thorough
@pytest.mark.skipif("os.environ.get('TRITON_INTERPRET') != '1'", reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends, says why, and never takes a request."""
    monkeypatch.delenv("TRITON_INTERPRET")
    publish_demo(root, tmp_path)
    result = run_tableside("serve", "demo", "--port", 0, "--devices", "0", root=root)
    assert result.returncode == 1
    assert "device 'cuda:0' was asked for, and torch" in result.stderr
    assert (
        "finds no CUDA device here; check the driver" in result.stderr
        and "serve without --devices" in result.stderr
    )
    assert "tableside serves" not in result.stdout


@pytest.mark.thorough
def test_a_budget_that_is_too_small_for_hbm(root: Path, tmp_path: Path) -> None:
    publish_demo(root, tmp_path)
    options = [*map(str, on_gpu()), "--placement", "hbm", "--hbm-budget", "1KiB"]
    result = run_tableside("serve", "demo", "--port", 0, *options, root=root)
    assert result.returncode == 1
    assert (
        "placement hbm needs 91,200 bytes, the budget of this worker is 1,024; give it more, or choose "
        "placement auto (--hbm-budget" in result.stderr
    )


@pytest.mark.thorough
def test_small_requests_of_a_gpu_worker_are_the_cpus(start: Start, root: Path) -> None:
    """Fewer than gpu_from_ids ids: bit for bit the CPU's answer, and no batch; as many or more: a batch of
    the GPU. JSON too."""
    server = start("--devices", tables.serve_device(), "--gpu-from-ids", 6)
    small, large = {"user": [[1, 2], [3]], "text": [[4, 5]]}, {"user": [[1, 2], [3]], "text": [[4, 5, 6]]}

    def batches() -> float:
        text = server.get("/metrics").text
        return sum(
            float(line.split()[1])
            for line in text.splitlines()
            if line.startswith("tableside_gpu_batch_requests_count")
        )

    with Client(server.url, retries=0) as client:
        before = batches()
        wanted = on_the_cpu(root, small)
        for _ in range(4):  # by the slow path, then by a template
            found = client.lookup("demo", small)
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
        body = {"model": "demo", "features": small}
        json = httpx.post(server.url + "/v1/lookup", json=body).json()["vectors"]
        assert all(
            np.array_equal(np.array(json[name], np.float32), wanted[name].astype(np.float32))
            for name in wanted
        )
        with pytest.raises(
            ClientError,
            match=r"feature 'user': id 1000 at position 0 is outside the table's rows \[0, 1000\)",
        ):
            client.lookup("demo", {"user": [[1000]]})
        assert batches() == before
        assert_close(client.lookup("demo", large), expected(root, large))
        assert batches() == before + 1
