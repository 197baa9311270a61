"""Scorers: `dot` or `cosine` of two features, and exported programs. Dense layers run on the CPU by our own
kernel, here; other programs, and any on a GPU, by torch (`serving.model.program`), imported only if
needed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tableside.loader.errors import ProgramError
from tableside.loader.program import Program, ProgramInput, read_program
from tableside.loader.program.layers import (
    PackedLayers,
    kernel_name,
    runnable_layers,
)
from tableside.loader.program.recognize import Layer
from tableside.loader.segment.header import ScorerInput, StoredScorer
from tableside.loader.segment.segment import Segment
from tableside.quant.contract import Precision
from tableside.serving.errors import ApiError, ErrorKind, ServingError, bad_request
from tableside.serving.model.places import Buffer
from tableside.serving.model.scorer import NO_LIMITS, Floats, Scorer, ScorerLimits, Scoring

# what a scorer by torch imports; the second when it is measured
TORCH_MODULES = ("tableside.serving.model.program", "torch._dynamo")


class Similarity(Scorer):
    """The dot product or cosine of two vectors; the cosine with a zero vector is 0."""

    def __init__(self, stored: StoredScorer) -> None:
        self.kind, self.inputs = stored.kind, stored.inputs

    def run(self, arrays: list[Floats]) -> Floats:
        a, b = arrays
        scores: Floats = np.einsum("bd,bd->b", a, b, dtype=np.float32)
        if self.kind == "cosine":
            lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
            np.divide(scores, lengths, out=scores, where=lengths > 0)
        return scores


class LayersScorer(Scorer):
    """A program of dense layers on the CPU, without torch and row-wise."""

    kind = "program"
    is_in_place = True

    def __init__(
        self,
        stored: StoredScorer,
        program: Program,
        found: Sequence[Layer],
        threads: int = 1,
        limits: ScorerLimits = NO_LIMITS,
    ) -> None:
        """found: the program's layers. ServingError: its inputs differ from the published ones."""
        if [i.width for i in stored.inputs] != [i.width for i in program.inputs]:
            raise ServingError(
                f"the scorer's inputs are {_widths(stored.inputs)} wide where its program takes "
                f"{_widths(program.inputs)}; publish the model again"
            )
        self.inputs, self.limits = stored.inputs, limits
        self._layers, self._rows = PackedLayers(found, threads), program.rows
        self.width = self._layers.width if self._layers.width > 1 else None
        self.runs_on = f"dense layers ({kernel_name()})"

    def run_in_place(self, scoring: Scoring, inputs: Any, outputs: Buffer) -> int:
        return self._layers.run(scoring.sources, inputs, outputs, scoring.rows, scoring.output.at)

    def admit(self, rows: int) -> int:
        least, most = self._rows
        if not least <= rows <= most:
            raise bad_request(
                f"the scorer does not take {rows:,} rows: the program was exported for {least:,} to {most:,} "
                f"rows; found {rows:,}"
            )
        cost = self._layers.cost(rows)
        if self.limits.bytes is not None and cost.bytes > self.limits.bytes:
            raise ApiError(
                413,
                ErrorKind.TOO_LARGE,
                f"{rows:,} rows are too many for the scorer: a call takes {cost.bytes:,} bytes; the limit is "
                f"{self.limits.bytes:,} (max_scorer_bytes)",
            )
        return cost.work


def open_scorer(
    segment: Segment,
    device: str = "cpu",
    threads: int = 1,
    limits: ScorerLimits = NO_LIMITS,
    on_device: bool = False,
    precision: Precision = Precision.FP32,
) -> Scorer | None:
    """Opens a version's scorer, or None. device, threads, precision: a program's. on_device: it also takes
    rows on that device (`Scorer.calls`). Two towers score in fp32. LoaderError: its bytes are damaged.
    ServingError: it does not run, or gives no scores."""
    stored = segment.header.scorer
    if stored is None:
        return None
    scorer: Scorer = Similarity(stored)
    if stored.kind == "program":
        scorer = _open_program(stored, segment.program(), device, threads, limits, on_device, precision)
    scorer.model, scorer.version = segment.header.model, segment.header.version
    if on_device:
        from tableside.serving.model import program

        scorer.calls = (
            scorer.on_device()
            if isinstance(scorer, program.ProgramScorer)
            else program.two_towers(scorer, device)
        )
    return scorer


def _open_program(
    stored: StoredScorer,
    archive: bytes,
    device: str,
    threads: int,
    limits: ScorerLimits,
    by_torch: bool,
    precision: Precision,
) -> Scorer:
    try:
        # Again, where it is loaded: who can write to shared memory gets neither code nor wild reads into a
        # worker.
        program = read_program(archive)
    except ProgramError as error:
        raise ServingError(f"the scorer does not run: {error}") from error
    by_torch = by_torch or device != "cpu" or precision is not Precision.FP32
    if not by_torch and (found := runnable_layers(program)) is not None:
        return LayersScorer(stored, program, found, threads, limits)
    from tableside.serving.model.program import ProgramScorer

    return ProgramScorer(stored, program, device, threads, limits, precision)


def needs_torch(segment: Segment, device: str = "cpu") -> bool:
    """Returns whether a version's scorer needs torch. LoaderError: its bytes are damaged, or no program."""
    stored = segment.header.scorer
    if stored is None or stored.kind != "program":
        return False
    return device != "cpu" or runnable_layers(read_program(segment.program())) is None


def _widths(inputs: Sequence[ScorerInput | ProgramInput]) -> str:
    return ", ".join(str(i.width) for i in inputs)
