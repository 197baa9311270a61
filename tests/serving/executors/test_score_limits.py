"""Bounds of scorers: their time, their memory, what is no score, and programs that were put into shared
memory past the load."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from scorers import exported, publish_scored
from servers import Server
from support import until

from tableside.loader.program import Program, read_program, write_program
from tableside.loader.versions.versions import Model
from tableside.quant.contract import MatrixPlace
from tableside.serving.client import Client, ClientError
from tableside.serving.errors import ApiError, ServingError
from tableside.serving.model.places import Output
from tableside.serving.model.scorer import ScorerLimits, Scoring, ToScore, score_together
from tableside.serving.model.scorers import open_scorer
from tableside.serving.settings import ServerSettings

Start = Callable[..., Server]


class Squares(torch.nn.Module):
    """Every row against every other, `times` times over: bytes and work grow with the batch's square and
    cube."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, user: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = user @ user.t()
        for _ in range(self.times):
            x = (x @ x) * 1e-9
        return x.sum(1) + context.sum(1)


class Logarithm(torch.nn.Module):
    def forward(self, user: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return user.sum(1) * 0 + torch.log(context).sum(1)


class Norm(torch.nn.Module):
    """A batch norm over 64 channels, as core ATen has it."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "var"):
            self.register_buffer(name, torch.ones(64))

    def forward(self, user: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.pad(user, (0, 56))
        found: torch.Tensor = torch.ops.aten._native_batch_norm_legit_no_training(
            wide, None, None, self.mean, self.var, 0.1, 1e-5
        )[0]
        return found.sum(1) + context.sum(1)


def request(rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"user": np.zeros((rows, 1), np.int64)}, {"context": np.ones((rows, 2), np.float32)}


@pytest.mark.thorough
def test_scores_that_are_not_finite_are_an_error(start: Start, root: Path, tmp_path: Path) -> None:
    """500 that names the row and the version, counted as its own kind: the scorer's fault. 400 where the
    request brought it."""
    publish_scored(root, tmp_path, exported(Logarithm(), user=8, context=2))
    server = start()
    body = {
        "model": "demo",
        "features": {"user": [[1], [2], [3]]},
        "dense": {"context": [[1, 1], [1, 0], [2, 2]]},
    }
    answer = httpx.post(f"{server.url}/v1/score", json=body, timeout=300)
    assert answer.status_code == 500
    assert (
        answer.json()["error"] == "the score of row 1 is -inf, from demo version 1; expected a finite number"
    )
    body["dense"] = {"context": [[-1, 1], [1, 1], [2, 2]]}
    assert (
        "the score of row 0 is nan"
        in httpx.post(f"{server.url}/v1/score", json=body, timeout=300).json()["error"]
    )
    with Client(server.url) as client:
        features, dense = request(3)
        dense["context"][2, 1] = np.inf
        with pytest.raises(ClientError, match=r"400.*dense tensor 'context' is not finite in row 2"):
            client.score("demo", features, dense)
        assert client.score("demo", *request(3)).tolist() == [0, 0, 0]
        assert 'tableside_errors_total{kind="scorer",model="demo"} 2.0' in client.metrics()


@pytest.mark.thorough
def test_a_call_that_takes_too_much_memory_is_refused(start: Start, root: Path, tmp_path: Path) -> None:
    """Before anything is allocated, with the rows, the bytes and the limit; fewer rows are scored."""
    publish_scored(root, tmp_path, exported(Squares(1), user=8, context=2))
    server = start("--max-scorer-bytes", "4MiB")
    with Client(server.url) as client:
        assert client.score("demo", *request(64)).shape == (64,)
        with pytest.raises(
            ClientError, match=r"413.*4,096 rows are too many.*bytes or more; the limit is 4,194,304"
        ):
            client.score("demo", *request(4096))
        assert 'tableside_errors_total{kind="too_large",model="demo"} 1.0' in client.metrics()
        assert client.score("demo", *request(64)).shape == (64,)


@pytest.mark.thorough
def test_a_call_that_takes_too_long_costs_its_worker(start: Start, root: Path, tmp_path: Path) -> None:
    """It is answered 503 and counted; the worker whose thread is stuck is replaced, lookups go on, small
    calls work after."""
    publish_scored(root, tmp_path, exported(Squares(20), user=8, context=2))
    server = start("--workers", 1, "--scorer-timeout-s", 1, "--shutdown-timeout-s", 1)
    (before,) = server.workers()
    with Client(server.url, timeout_s=300, retries=0) as client:
        with pytest.raises(ClientError, match=r"503.*demo version 1 took longer than 1 s"):
            client.score("demo", *request(8192))
        until(lambda: server.workers() and before not in server.workers(), what="a replacement")
        until(
            lambda: httpx.get(f"{server.url}/v2/health/ready", timeout=300).status_code == 200,
            what="readiness",
        )
        assert client.score("demo", *request(3)).shape == (3,)
        assert 'tableside_errors_total{kind="scorer_timeout",model="demo"} 1.0' in client.metrics()


STUCK = """
import time
from tableside.serving.executors.scoring import Deadline
from tableside.serving.model.scorer import ScorerLimits
from tableside.serving.model.scorers import Similarity

class Scorer(Similarity):
    def __init__(self):
        self.limits, self.model, self.version = ScorerLimits(timeout_s={timeout_s}, ending_s=0), "demo", 3

with Deadline().watch(Scorer(), None):
    time.sleep({takes_s})
print("done")
"""


@pytest.mark.parametrize(("timeout_s", "takes_s", "status"), [(0.2, 60, 70), (60, 0, 0)])
@pytest.mark.drawn(1)
def test_a_call_that_blocks_the_event_loop_ends_the_worker(
    timeout_s: float, takes_s: float, status: int, tmp_path: Path
) -> None:
    """Nobody could be answered: the process ends at once, to be replaced. One in time goes on."""
    code = STUCK.format(timeout_s=timeout_s, takes_s=takes_s)
    environment = {**os.environ, "TABLESIDE_METRICS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert ("done" in done.stdout) == (status == 0)
    assert ("the scorer of demo version 3 runs for more than 0.2 s" in done.stderr) == (status != 0)


def test_a_program_that_came_past_the_load_is_checked_where_it_is_attached(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 values for 64 channels, written to shared memory by somebody: no worker reads beyond them."""

    def smaller(data: bytes) -> Program:
        found = read_program(data)
        weights = tuple(
            replace(w, sizes=(2,), content=w.content[:8]) if w.sizes == (64,) else w for w in found.weights
        )
        return replace(found, weights=weights)

    publish_scored(root, tmp_path, exported(Norm(), user=8, context=2))
    with monkeypatch.context() as patch:
        patch.setattr("tableside.loader.program.measure.check_shapes", lambda program: None)
        patch.setattr("tableside.loader.load.scorer.read_program", smaller)
        publish_scored(root, tmp_path, exported(Norm(), user=8, context=2))
    assert open_scorer(Model(root, "demo").attach(1)) is not None
    with pytest.raises(ServingError, match="has 2 values for 64 channels"):
        open_scorer(Model(root, "demo").attach(2))


def test_an_operator_that_came_past_the_load_is_refused_where_it_is_attached(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who can write to shared memory gets no operator into a worker that is not of the list."""

    def with_another(program: Program) -> bytes:
        first, *others = program.nodes
        return write_program(
            replace(program, nodes=(replace(first, target="torch.ops.aten.from_file.default"), *others))
        )

    monkeypatch.setattr("tableside.loader.load.scorer.write_program", with_another)
    publish_scored(root, tmp_path, exported(Norm(), user=8, context=2))
    with pytest.raises(
        ServingError, match=r"its graph calls 'torch\.ops\.aten\.from_file\.default'; expected ATen operators"
    ):
        open_scorer(Model(root, "demo").attach())


class Large(torch.nn.Module):
    """A gigabyte and a bit of ones, whatever the batch."""

    def forward(self, user: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return user.sum(1) + context.sum(1) + torch.full((270 << 20,), 1.0)[0]


def test_shapes_are_propagated_where_a_program_is_attached(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no single check refuses is found there as at the load: here, more memory than any program gets
    for two rows."""
    with monkeypatch.context() as patch:
        patch.setattr("tableside.loader.program.measure.check_shapes", lambda program: None)
        publish_scored(root, tmp_path, exported(Large(), user=8, context=2))
    with pytest.raises(ServingError, match="the limit is 1,073,741,824"):
        open_scorer(Model(root, "demo").attach())


def test_requests_that_are_scored_together_count_together(root: Path, tmp_path: Path) -> None:
    """The memory of a GPU's batch is that of all its rows; each request alone fits."""
    publish_scored(root, tmp_path, exported(Squares(1), user=8, context=2))
    scorer = open_scorer(Model(root, "demo").attach(), limits=ScorerLimits(bytes=4 << 20))
    assert scorer is not None
    dense = np.array([MatrixPlace(0, 0, 32, 0, 8), MatrixPlace(0, 512 * 32, 8, 0, 2)], np.int64)
    scoring, inputs = (
        Scoring(scorer, dense.tobytes(), Output("score", 0, 2048, (512,), False)),
        bytes(512 * 40),
    )
    scoring.run(inputs, np.zeros(2048, np.uint8))
    with pytest.raises(ApiError, match=r"1,024 rows are too many for the scorer.*the limit is 4,194,304"):
        score_together([ToScore(scoring, inputs, np.zeros(2048, np.uint8))] * 2)


def test_a_scorer_may_take_as_much_as_it_wants_where_nothing_is_said(root: Path, tmp_path: Path) -> None:
    """Evaluations have no limits; servers have, of a size that a batch of scores fits into."""
    publish_scored(root, tmp_path, exported(Squares(1), user=8, context=2))
    scorer = open_scorer(Model(root, "demo").attach())
    assert scorer is not None and scorer.limits == ScorerLimits(None, None) and scorer.admit(100_000) > 1e10
    assert ServerSettings().max_scorer_bytes == 2 << 30 and ServerSettings().scorer_timeout_s == 10
