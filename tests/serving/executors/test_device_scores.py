"""Scores that are computed where a GPU's lookups wrote the vectors: they are the CPU's, whatever shares
the batch."""

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import tables
from batched import batcher_of, run_in
from scored import Asked, Both, check, engine_of, publish
from servers import Server
from support import rows_of

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.client import Client, ClientError
from tableside.serving.errors import ApiError
from tableside.serving.model.placement import Placer
from tableside.serving.model.request import Answer, Request
from tableside.serving.model.scorer import ScorerLimits
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.for_gpu


@pytest.fixture(autouse=True)
def metrics_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TABLESIDE_METRICS", raising=False)


@pytest.mark.thorough
def test_scores_of_a_mixed_batch_are_those_of_the_cpu(root: Path, tmp_path: Path) -> None:
    """Every kind of scorer, scores alone and with vectors, lookups beside them, ids that are wrong,
    several models."""
    names = ("ctr", "wide", "centred", "dot", "cosine")
    publish(root, tmp_path, *names)
    both = Both(root, *names)
    asked = [
        Asked(name, rows, seed, score=seed % 5 != 4, alone=seed % 2 == 0, bad_id=seed in (3, 12))
        for seed, (name, rows) in enumerate([(name, rows) for rows in (5, 1, 9, 3) for name in names])
    ]
    found = check(asked, both)
    assert [n for n, f in enumerate(found) if isinstance(f, ApiError)] == [3, 12]


@pytest.mark.drawn(0.5)
def test_scores_are_of_the_state_that_a_request_took(root: Path, tmp_path: Path) -> None:
    """Requests of two states in one batch, with one scorer."""
    publish(root, tmp_path, "ctr")
    both = Both(root)
    engines = [engine_of(root, "ctr", placer) for placer in (both.placer, Placer(ServerSettings(), choose()))]
    asked = [Asked("ctr", rows, rows, alone=rows % 2 == 0) for rows in (5, 8)]
    on_device: list[tuple[Request, bytes]] = []
    on_cpu: list[tuple[Request, bytes]] = []
    for state in range(2):
        if state:
            apply(
                Model(root, "ctr"),
                ChangeBatch([TableChanges("user", np.arange(0, 200, 2), rows_of(100, 8, 9))]),
            )
        for engine, requests in zip(engines, (on_device, on_cpu), strict=True):
            engine.swap(engine.attach(as_successor=True))
            requests += [a.of({"ctr": engine.served()}) for a in asked]
    scores = []
    for (request, _), answer, wanted in zip(
        on_device, both.on_device(on_device), both.on_cpu(on_cpu), strict=True
    ):
        assert isinstance(answer, Answer) and isinstance(wanted, Answer)
        (output,) = (o for o in request.outputs if o.feature == "score")
        scores.append(output.view(answer.buffer))
        np.testing.assert_allclose(scores[-1], output.view(wanted.buffer), rtol=1e-5, atol=1e-6)
    assert not np.allclose(scores[0], scores[2])


@pytest.mark.drawn(0.5)
def test_a_request_at_fault_is_refused_alone(root: Path, tmp_path: Path) -> None:
    """A dense tensor that is not finite: its own request gets the CPU's error, the others their scores."""
    publish(root, tmp_path, "ctr")
    both = Both(root, "ctr")
    asked = [Asked("ctr", rows, rows) for rows in (4, 3, 6)]
    asked[1].parts[-1][2, 1] = np.inf
    found = check(asked, both)
    assert (
        isinstance(found[1], ApiError) and "dense tensor 'context' is not finite in row 2" in found[1].message
    )


@pytest.mark.drawn(0.5)
def test_lengths_that_are_wrong_give_a_scorer_no_memory_of_others(root: Path, tmp_path: Path) -> None:
    """Where lengths are wrong no vector is written; the program would index by what lies there."""
    publish(root, tmp_path, "picked")
    both = Both(root, "picked")
    gpu: Any = both.placer.gpu
    asked = [Asked("picked", rows, rows) for rows in (6, 5, 7)]
    check(asked, both)
    gpu.batches._free[0].device_out.fill_(255)
    asked[1].parts[1][0] += 1
    calls: list[int] = []
    own = both.device["picked"].scorer.calls
    assert own is not None
    own._captures = False  # so that each call is seen
    run = own._run
    own._run = lambda inputs: calls.append(len(inputs[0])) or run(inputs)  # type: ignore[func-returns-value]
    found = check(asked, both)
    assert isinstance(found[1], ApiError)
    assert calls == [18], "the call for all failed"


@pytest.mark.drawn(0.5)
def test_scores_alone_bring_no_vectors_to_the_host(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(root, tmp_path, "ctr")
    both = Both(root, "ctr")
    gpu: Any = both.placer.gpu
    sizes: list[int] = []
    pinned = gpu.device.pinned
    monkeypatch.setattr(gpu.device, "pinned", lambda size: sizes.append(size) or pinned(size))
    check([Asked("ctr", 5, 0), Asked("ctr", 6, 1)], both)
    assert sizes == [0]
    check([Asked("ctr", 5, 0), Asked("ctr", 6, 1, alone=False)], both)
    assert sizes[1] >= 6 * (8 * 4 + 4 * 2)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("placement", ["host", "zero_copy", "cached", "hybrid"])
def test_every_placement_is_scored(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """Also tables that the CPU looks up, whose vectors are not on the device. The time is told of each."""
    timed: list[str] = []
    told = SimpleNamespace(labels=lambda model: timed.append(model) or SimpleNamespace(observe=float))  # type: ignore[func-returns-value]
    monkeypatch.setattr("tableside.serving.executors.scoring.SCORE_SECONDS", told)
    publish(root, tmp_path, "ctr", "dot")
    both = Both(root, "ctr", "dot", placement=placement, hbm_budget=1 << 20)
    request, _ = Asked("ctr", 1, 0).of(both.device)
    assert request.plan.is_on_device is (placement != "host")
    asked = [Asked(name, rows, rows) for name, rows in (("ctr", 3), ("dot", 4), ("ctr", 5))]
    both.on_device([a.of(both.device) for a in asked])
    assert sorted(timed) == ["ctr", "dot"]
    check(asked, both)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.drawn(1)
def test_features_that_come_together_are_scored(root: Path, tmp_path: Path, alone: bool) -> None:
    """Their vectors lie side by side for the caller, and one feature after another on the device."""
    publish(root, tmp_path, "dot")
    check(
        [Asked("dot", rows, rows, together=rows != 5, alone=alone) for rows in (4, 5, 1, 17)],
        Both(root, "dot"),
    )


@pytest.mark.parametrize("hangs_in", ["call", "wait"])
def test_a_late_scorer_on_a_device_refuses_all_that_wait(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs_in: str
) -> None:
    """Its call is watched, the wait for its scores included; who is told of it refuses the batch and what
    comes later."""
    publish(root, tmp_path, "ctr")
    both = Both(root, "ctr")
    began, let_go, tells = threading.Event(), threading.Event(), {}

    def watch(self: Any, scorer: Any, tell: Any) -> Any:
        tells[threading.current_thread().name] = tell
        return nullcontext()

    monkeypatch.setattr("tableside.serving.executors.scoring.Deadline.watch", watch)
    scorer = both.device["ctr"].scorer
    assert scorer is not None and scorer.calls is not None
    held: Any = both.placer.gpu.batches if hangs_in == "wait" else scorer.calls
    name = "wait" if hangs_in == "wait" else "_run"
    own = getattr(held, name)
    monkeypatch.setattr(held, name, lambda given: began.set() or (let_go.wait(300) and own(given)))  # type: ignore[func-returns-value]
    scorer.limits = ScorerLimits(timeout_s=60.0)

    async def ask() -> None:
        batcher = batcher_of(both.placer.gpu, 1)
        waiting = [
            asyncio.ensure_future(run_in(batcher, *Asked("ctr", 3, n).of(both.device))) for n in range(2)
        ]
        while not began.is_set():
            await asyncio.sleep(0.001)
        tells["tableside-gpu-wait" if hangs_in == "wait" else "tableside-gpu-start"](scorer)
        for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20):
            assert isinstance(error, ApiError) and "ctr version 1 took longer than 60 s" in error.message
        let_go.set()
        batcher.close()

    asyncio.run(ask())


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.drawn(1)
def test_a_device_that_is_lost_to_a_scorer_fails_its_batch(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Whatever the scorer raised; where the device is well, requests for scores alone are refused."""
    signals: list[int] = []
    publish(root, tmp_path, "ctr")
    both = Both(root, "ctr")
    gpu, scorer = both.placer.gpu, both.device["ctr"].scorer
    assert gpu is not None and scorer is not None and scorer.calls is not None
    monkeypatch.setattr("os.kill", lambda pid, sig: signals.append(sig))
    monkeypatch.setattr(gpu, "is_lost", lambda: is_lost)

    def fail(inputs: Any) -> Any:
        raise TypeError("an illegal memory access was encountered")

    scorer.calls._run = fail
    found = both.on_device([Asked("ctr", 3, n, score=n > 0).of(both.device) for n in range(3)])
    if is_lost:
        assert all(
            isinstance(f, RuntimeError) and "the device was lost to the scorer of ctr version 1" in str(f)
            for f in found
        )
        assert signals == [signal.SIGTERM]
    else:
        assert (
            isinstance(found[0], Answer) and all(isinstance(f, TypeError) for f in found[1:]) and not signals
        )


Start = Callable[..., Server]
IDS = {"user": [[1, 2], [3], []], "clicked": [[4, 5], [], [99]]}
CONTEXT = np.array([[0.5, 1.0, -1.0], [0.0, 2.0, 0.25], [1.0, 1.0, 1.0]], np.float32)


def infer(server: Server, names: Sequence[str] | None, values: np.ndarray) -> dict[str, np.ndarray]:
    """Outputs by name of a V2 request with binary tensors; names None: it names none."""
    tensors: list[tuple[str, str, np.ndarray]] = [("context", "FP32", values)]
    for feature, bags in IDS.items():
        tensors.append((f"{feature}.values", "INT64", np.array([i for bag in bags for i in bag], np.int64)))
        tensors.append((f"{feature}.lengths", "INT32", np.array([len(bag) for bag in bags], np.int32)))
    inputs = [
        {"name": n, "datatype": kind, "shape": list(a.shape), "parameters": {"binary_data_size": a.nbytes}}
        for n, kind, a in tensors
    ]
    header: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if names is not None:
        header["outputs"] = [{"name": n} for n in names]
    head = orjson.dumps(header)
    body = head + b"".join(a.tobytes() for _, _, a in tensors)
    url, headers = f"{server.url}/v2/models/ctr/infer", {"Inference-Header-Content-Length": str(len(head))}
    reply = httpx.post(url, content=body, headers=headers, timeout=300)
    assert reply.status_code == 200, reply.text
    start = int(reply.headers["Inference-Header-Content-Length"])
    found = {}
    for output in orjson.loads(reply.content[:start])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        dtype = np.float16 if output["datatype"] == "FP16" else np.float32
        found[output["name"]] = np.frombuffer(reply.content[start : start + size], dtype).reshape(
            output["shape"]
        )
        start += size
    assert start == len(reply.content)
    return found


@pytest.mark.thorough
def test_answers_over_http_are_those_of_a_cpu_server(start: Start, root: Path, tmp_path: Path) -> None:
    """Binary and JSON; headers that are new, and those that templates know; scores with vectors, alone,
    and vectors alone."""
    publish(root, tmp_path, "ctr", "cosine")
    on_gpu = start("--devices", tables.serve_device(), "--gpu-from-ids", 0, models=("ctr", "cosine"))
    on_cpu = start(models=("ctr", "cosine"))
    for turn in range(4):
        for names in (["score"], ["clicked", "score"], None, ["user"]):
            values = CONTEXT + np.float32(turn)
            found, expected = (infer(server, names, values) for server in (on_gpu, on_cpu))
            assert list(found) == list(expected) == (names or ["user", "clicked", "score"])
            for name in found:
                np.testing.assert_allclose(
                    found[name], expected[name], rtol=1e-3 if name == "clicked" else 1e-5
                )
    near = {"user": IDS["user"], "near": [[7], [8, 9], [10]]}
    with Client(on_gpu.url, retries=0) as gpu, Client(on_cpu.url, retries=0) as cpu:
        for model, ids, dense in (("ctr", IDS, {"context": CONTEXT}), ("cosine", near, {})):
            np.testing.assert_allclose(
                gpu.score(model, ids, dense), cpu.score(model, ids, dense), rtol=1e-5, atol=1e-7
            )
        for turn in range(4):
            ids = {"user": [[1] * turn, [3], [5]], "near": [[7], [8] * turn, [10, 11]]}
            found, expected = (client.score("cosine", ids, compact=True) for client in (gpu, cpu))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
        body = {"model": "ctr", "features": IDS, "dense": {"context": CONTEXT.tolist()}}
        scores = [
            httpx.post(f"{s.url}/v1/score", json=body, timeout=300).json()["scores"] for s in (on_gpu, on_cpu)
        ]
        np.testing.assert_allclose(*scores, rtol=1e-5)
        for client in (gpu, cpu):
            with pytest.raises(ClientError, match=r"400.*feature 'clicked': id 100 at position 2"):
                client.score("ctr", {**IDS, "clicked": [[4, 5], [], [100]]}, {"context": CONTEXT})


@pytest.mark.drawn(0.5)
def test_a_scorer_goes_with_its_version(root: Path, tmp_path: Path) -> None:
    """With its memory on the device, at once: no reference of its own keeps it."""
    publish(root, tmp_path, "ctr", "dot")
    both = Both(root, "ctr", "dot")
    gc.disable()
    try:
        held = [weakref.ref(version.scorer.calls) for version in both.device.values()]  # type: ignore[union-attr]
        both.device.clear()
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
