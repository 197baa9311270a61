"""A follower's /metrics and /health: of a process that applies, that is stuck, and that cannot listen."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from following import following
from prometheus_client.parser import text_string_to_metric_families
from support import run_tableside, until

from tableside.loader.deltas.apply import position_of
from tableside.loader.versions.versions import Model
from tableside.serving.errors import ServingError
from tableside.serving.follow import status
from tableside.serving.follow.status import Status


@pytest.fixture
def model(publish: Callable[..., Any], root: Path) -> Model:
    publish({"user": np.zeros((50, 2), np.float32)}, formats={"user": "fp32"})
    return Model(root, "demo")


def put(folder: Path, number: int, *vectors: list[float]) -> None:
    partial = folder / "x.partial"
    partial.write_text("".join(json.dumps({"id": n, "vector": v}) + "\n" for n, v in enumerate(vectors)))
    partial.rename(folder / f"{number}.jsonl")


def samples(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").raise_for_status().text)
    return {s.name: s.value for f in families for s in f.samples}


def test_what_a_follower_counts(model: Model, tmp_path: Path, root: Path) -> None:
    folder = tmp_path / "changes"
    folder.mkdir()
    put(folder, 1, [1, 1], [2, 2])
    options = "--every-s", 0.1, "--skip-bad", tmp_path / "bad.jsonl", "--metrics", "0"
    with following(root, str(folder), *options) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "/metrics" in line)
        url = f"http://127.0.0.1:{re.findall(r'on port ([0-9]+)', said)[0]}"
        assert httpx.get(f"{url}/health").text == "ok\n"
        until(lambda: position_of(model, f"folder:{folder}") == "1")
        put(folder, 2, [1, 1, 1])  # of another dim
        put(folder, 3, [5, 5])
        until(lambda: position_of(model, f"folder:{folder}") == "3")
        until(lambda: samples(url)["tableside_follower_rows_total"] == 3)
        until(lambda: samples(url)["tableside_follower_left_out_total"] == 1)
        found = samples(url)
        assert found["tableside_follower_batches_total"] == 2 and found["tableside_follower_lag_seconds"] > 0
        began, applied, alive = (
            found[name]
            for name in (
                "process_start_time_seconds",
                "tableside_follower_applied_timestamp_seconds",
                "tableside_follower_alive_timestamp_seconds",
            )
        )
        assert began < applied and began < alive
        assert httpx.get(f"{url}/other").status_code == 404


def test_a_follower_that_does_not_come_round_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Status("ads", "redis:k", "127.0.0.1", 0)
    try:
        assert httpx.get(f"http://127.0.0.1:{shown.port}/health").status_code == 200
        monkeypatch.setattr(status, "STUCK_S", 0.0)
        found = httpx.get(f"http://127.0.0.1:{shown.port}/health")
        assert (found.status_code, found.text) == (503, "stuck\n")
        labels = 'model="ads",source="redis:k"'
        text = httpx.get(f"http://127.0.0.1:{shown.port}/metrics").text
        assert f"tableside_follower_rows_total{{{labels}}} 0.0" in text
    finally:
        shown.close()


@pytest.mark.drawn(0.25)
def test_an_address_that_is_taken_or_none(model: Model, tmp_path: Path, root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=f"--metrics 127.0.0.1:{port}: Address already in use"):
            Status("ads", "folder", "127.0.0.1", port)
    for text in "http", "70000", "127.0.0.1:":
        found = run_tableside("follow", "demo", tmp_path, "--metrics", text, root=root)
        assert found.returncode == 2 and f"found '{text}'; expected a port from 0 to 65535" in found.stderr
