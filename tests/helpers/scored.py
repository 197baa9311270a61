"""Models with scorers of every kind, and requests of them that a device and the CPU score in this process."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tables
import torch
from batched import batcher_of, run_in
from scorers import Ctr, exported
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant import Precision, choose
from tableside.serving.errors import ApiError
from tableside.serving.executors.executors import CpuExecutor
from tableside.serving.executors.pending import Readers, answer_of
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.places import DenseInput
from tableside.serving.model.request import Answer, FeatureInput, Request
from tableside.serving.model.version import ServedVersion
from tableside.serving.settings import ServerSettings

TABLES = {"user": rows_of(200, 8), "item": rows_of(100, 4, 1), "near": rows_of(150, 8, 2)}
FEATURES = {
    "user": {"table": "user"},
    "clicked": {"table": "item", "pooling": "mean", "output": "fp16"},
    "near": {"table": "near"},
}


class Centred(Ctr):
    """Scores around their mean over the rows of the call."""

    def forward(self, user: torch.Tensor, clicked: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        scores = super().forward(user, clicked, context)
        return scores - scores.mean(0)


class Picked(Ctr):
    """Reads a weight at an index that it computes of its numbers: not a number would be an index out of
    range."""

    def __init__(self) -> None:
        super().__init__(8, 4, 3)
        self.register_buffer("values", torch.tensor([0.25, 0.5, 0.75]))

    def forward(self, user: torch.Tensor, clicked: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        numbers = torch.clamp(user.sum(1) * 1e-9, 0, 2).to(torch.int64)
        return torch.index_select(self.values, 0, numbers).unsqueeze(1) * super().forward(
            user, clicked, context
        )


MODELS: dict[str, Any] = {
    "ctr": Ctr(8, 4, 3),
    "wide": Ctr(8, 4, 3, scores=3),
    "centred": Centred(8, 4, 3),
    "picked": Picked(),
    "dot": {"kind": "dot", "features": ["user", "near"]},
    "cosine": {"kind": "cosine", "features": ["user", "near"]},
}


def publish(root: Path, folder: Path, *names: str) -> None:
    np.savez(folder / "c.npz", **TABLES)
    for name in names:
        scorer = MODELS[name]
        if isinstance(scorer, torch.nn.Module):
            (folder / f"{name}.pt2").write_bytes(exported(scorer, user=8, clicked=4, context=3))
            scorer = {"program": f"{name}.pt2"}
        raw = {
            "name": name,
            "checkpoint": "c.npz",
            "tables": {t: {"key": t} for t in TABLES},
            "features": FEATURES,
            "scorer": scorer,
        }
        load(parse_model(raw, folder), root)


def engine_of(root: Path, name: str, placer: Placer, precision: Precision = Precision.FP32) -> Engine:
    settings = ServerSettings().model_copy(update={"scorer_dtype": precision.name.lower()})  # also on the CPU
    return Engine(Model(root, name), settings, placer)


class Both:
    """The same models on a device, their scorers in a precision, and on the CPU, in this process."""

    def __init__(
        self, root: Path, *names: str, precision: Precision = Precision.FP32, **settings: Any
    ) -> None:
        self.placer = Placer(ServerSettings(devices=(tables.serve_device(),), **settings), choose())
        on_cpu = Placer(ServerSettings(), choose())
        self.placer.open()

        self.device = {name: engine_of(root, name, self.placer, precision).attach() for name in names}
        self.cpu = {name: engine_of(root, name, on_cpu).attach() for name in names}

    def on_device(self, requests: Sequence[tuple[Request, bytes]]) -> list[Answer | BaseException]:
        """What each gets, all in one batch."""

        async def run() -> list[Answer | BaseException]:
            batcher = batcher_of(self.placer.gpu, len(requests))
            found = await asyncio.gather(*(run_in(batcher, *r) for r in requests), return_exceptions=True)
            batcher.close()
            return found

        return asyncio.run(run())

    def on_cpu(self, requests: Sequence[tuple[Request, bytes]]) -> list[Answer | BaseException]:
        """What each gets, one after another."""

        async def run() -> list[Answer | BaseException]:
            with ThreadPoolExecutor(1) as beside:
                executor = CpuExecutor(beside, Readers())

                async def one(request: Request, inputs: bytes) -> Answer:
                    return await answer_of(executor.begin(request, inputs))

                return await asyncio.gather(*(one(*r) for r in requests), return_exceptions=True)

        return asyncio.run(run())


class Asked:
    """A request of one model: bags of ids of each feature that its scorer takes, as jagged tensors, and
    dense rows."""

    def __init__(
        self,
        model: str,
        rows: int,
        seed: int,
        *,
        score: bool = True,
        alone: bool = True,
        bad_id: bool = False,
        together: bool = False,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.model, self.rows, self.score, self.alone, self.together = model, rows, score, alone, together
        self.parts: list[np.ndarray] = []
        self.features: list[FeatureInput] = []
        at = 0
        names = ("user", "clicked") if isinstance(MODELS[model], torch.nn.Module) else ("user", "near")
        for n, name in enumerate(names):
            lengths = rng.integers(0, 4, rows, dtype=np.int32)
            ids = rng.integers(0, 100, int(lengths.sum()))
            if bad_id and n and ids.size:
                ids[-1] = 10**6
            self.features.append(FeatureInput(name, at, ids.size, rows, lengths_at=at + ids.nbytes))
            self.parts += [ids, lengths]
            at += ids.nbytes + lengths.nbytes
        self.dense: list[DenseInput] = []
        if "clicked" in names:
            self.dense = [DenseInput("context", at, rows, 3)]
            self.parts.append(rng.standard_normal((rows, 3)).astype(np.float32))

    def of(self, versions: dict[str, ServedVersion]) -> tuple[Request, bytes]:
        dense = self.dense if self.score else []
        request = versions[self.model].lay_out(
            self.features, dense, self.score, self.together, scores_alone=self.alone
        )
        return request, b"".join(part.tobytes() for part in self.parts)


def check(asked: Sequence[Asked], both: Both) -> list[Answer | BaseException]:
    """Every request of one batch gets what the CPU gives it alone; returns what it got on the device."""
    on_device, on_cpu = [a.of(both.device) for a in asked], [a.of(both.cpu) for a in asked]
    found, expected = both.on_device(on_device), both.on_cpu(on_cpu)
    for a, (request, _), answer, wanted in zip(asked, on_device, found, expected, strict=True):
        if isinstance(wanted, BaseException):
            assert isinstance(wanted, ApiError) and isinstance(answer, ApiError), answer
            assert (answer.status, answer.message) == (wanted.status, wanted.message)
            continue
        assert isinstance(answer, Answer), answer
        for output in request.outputs:
            if output.feature == "score" or not (a.score and a.alone):
                rtol = 1e-3 if output.half else 1e-5
                np.testing.assert_allclose(
                    output.view(answer.buffer), output.view(wanted.buffer), rtol=rtol, atol=1e-6
                )
    return found
