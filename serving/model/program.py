"""Scorers run by torch: exported programs, and on a device also two towers."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from tableside.loader.errors import ProgramError
from tableside.loader.program import Program
from tableside.loader.program.graph import Cost
from tableside.loader.segment.header import StoredScorer
from tableside.quant.contract import Precision
from tableside.serving.errors import ApiError, ErrorKind, ServingError, bad_request
from tableside.serving.model.scorer import NO_LIMITS, Floats, Scorer, ScorerLimits

try:
    import torch

    from tableside.loader.program.measure import Meter, TooLarge, check_shapes
    from tableside.loader.program.precision import DTYPES, check_range, rounded
    from tableside.loader.program.run import Runner, weight_tensors
    from tableside.serving.model.device_calls import DeviceCalls
except ImportError as error:
    raise ServingError(
        f"a scorer that is an exported program needs torch, which does not import ({error}); install "
        "tableside[torch]"
    ) from error

_UNLIMITED_BYTES = 1 << 62
_REFUSED = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ArithmeticError)
_MOST_ROWS = 1 << 40
_MEASURED_ROWS = 1 << 10  # batches up to which are measured before the first request


class ProgramScorer(Scorer):
    """A program on one device in one precision: weights and inputs are rounded to it, scores are fp32.
    `threads` of torch on the CPU, as workers share its cores."""

    kind = "program"

    def __init__(
        self,
        stored: StoredScorer,
        program: Program,
        device: str = "cpu",
        threads: int = 1,
        limits: ScorerLimits = NO_LIMITS,
        precision: Precision = Precision.FP32,
    ) -> None:
        """ServingError: the program does not run here or in this precision, or gives no scores."""
        self.inputs, self.limits, self._program = stored.inputs, limits, program
        self.runs_on = f"torch {torch.__version__} on {device}"
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._most_bytes = _UNLIMITED_BYTES if limits.bytes is None else limits.bytes
        try:
            # Again, where it is loaded: no wild reads for who can write to shared memory.
            check_shapes(program)
            weights = weight_tensors(program.weights, self._device)
            self._runner = self._made(weights)
            first, second = program.trial_rows()
            small, large = (self._trial(n) for n in (first, second))
        except (ProgramError, *_REFUSED) as error:
            raise ServingError(f"the scorer does not run on torch {torch.__version__}: {error}") from error
        if small.shape[0] != first or large.shape[0] != second or small.ndim > 2:
            what = f"the scorer gives {list(small.shape)} for a batch of {first}"
            raise ServingError(f"{what}; expected [batch], or [batch, n]")
        self.width = small.shape[1] if small.ndim == 2 else None
        self.is_row_wise = self._scores_rows_alone(first)
        if precision is not Precision.FP32:
            self._take(weights, precision)
        self._meter, self._costs = Meter(program, self._most_bytes, precision), dict[int, Cost | str]()
        for power in range(_MEASURED_ROWS.bit_length()):
            with suppress(ApiError):  # told to the requests of so many rows
                self._cost(1 << power)

    def _made(self, weights: Mapping[str, torch.Tensor]) -> Runner:
        return Runner(self._program, weights, self._device, self._most_bytes, DTYPES[self.precision])

    def _trial(self, rows: int) -> Floats:
        return self.run([np.zeros((rows, i.width), np.float32) for i in self.inputs])

    def _take(self, weights: Mapping[str, torch.Tensor], precision: Precision) -> None:
        """Switches to a precision. ServingError: the program does not run in it."""
        self.precision = precision
        # else sums that are added up in parts lose what a rounded product does not
        if self._device.type == "cuda":
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        try:
            found = rounded(weights, precision)
            check_range(weights, found, precision)
            self._runner = self._made(found)
            for rows in self._program.trial_rows():
                self._trial(rows)
        except (ProgramError, *_REFUSED) as error:
            why = f"the scorer does not run in {self.dtype} on torch {torch.__version__}"
            raise ServingError(f"{why}: {error} (--scorer-dtype)") from error

    def _scores_rows_alone(self, half: int) -> bool:
        if 2 * half > self._program.rows[1]:
            return False
        rng = np.random.default_rng(0)
        rows = [rng.standard_normal((2 * half, i.width)).astype(np.float32) for i in self.inputs]
        together = self.run(rows)
        alone = np.concatenate([self.run([a[n : n + half] for a in rows]) for n in (0, half)])
        return bool(np.allclose(together, alone, rtol=1e-3, atol=1e-5, equal_nan=True))

    def run(self, arrays: list[Floats]) -> Floats:
        with torch.inference_mode():
            given = [torch.from_numpy(a).to(self._device).to(DTYPES[self.precision]) for a in arrays]
            scores: Floats = self._runner(*given).to("cpu", torch.float32).numpy()
        return scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 1 else scores

    def on_device(self) -> DeviceCalls:
        """Returns its calls on rows on its device. They do not hold this object."""
        runner = self._runner
        return DeviceCalls(
            lambda inputs: runner(*inputs).float(),
            self.widths,
            self._device,
            rows=self._program.rows,
            is_row_wise=self.is_row_wise,
            name=self.name,
            precision=self.precision,
        )

    def admit(self, rows: int) -> int:
        return self._cost(rows).work

    def _cost(self, rows: int) -> Cost:
        """Returns a call's cost, measured for the next power of two and kept. ApiError: too much, or no such
        call."""
        rounded = min(1 << max(0, rows - 1).bit_length(), self._program.rows[1])
        found = self._costs.get(rounded) or self._measured(rounded, rows)
        if isinstance(found, str):
            what = f"{rows:,} rows are too many for the scorer: {found} (max_scorer_bytes)"
            raise ApiError(413, ErrorKind.TOO_LARGE, what)
        return found

    def _measured(self, rounded: int, rows: int) -> Cost | str:
        """Returns the cost of `rounded` rows or, if refused, of `rows`; a text if it is too much."""
        for n in (rounded, rows):
            try:
                found: Cost | str = self._meter.cost(n, self._most_bytes)
            except TooLarge as error:
                found = str(error)
            except _REFUSED as error:
                refusal = bad_request(
                    f"the scorer does not take {rows:,} rows: {str(error).strip().partition(chr(10))[0]}"
                )
                continue
            if n == rounded:
                self._costs[n] = found
            return found
        raise refusal


def two_towers(scorer: Scorer, device: str) -> DeviceCalls:
    """Returns the calls of a dot product or cosine on a device, in fp32."""

    def dot(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return (inputs[0] * inputs[1]).sum(1)

    def cosine(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        products = dot(inputs)
        lengths = torch.linalg.vector_norm(inputs[0], dim=1) * torch.linalg.vector_norm(inputs[1], dim=1)
        return torch.where(lengths > 0, products / lengths, products)

    run = dot if scorer.kind == "dot" else cosine
    return DeviceCalls(
        run, scorer.widths, torch.device(device), rows=(0, _MOST_ROWS), is_row_wise=True, name=scorer.name
    )
