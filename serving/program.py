"""Scorers that are exported programs: the one file of this room that runs torch."""

import io
import threading
import warnings

import numpy as np
import torch

from loader.header import StoredScorer
from loader.program import vet_program
from serving.errors import ServingError
from serving.scorer import Floats, Scorer

_LOADING = threading.Lock()  # torch deserializes one program at a time


class ProgramScorer(Scorer):
    """A program on one device; `threads` of torch where that is the CPU (several workers' threads would fight for its cores)."""

    kind = "program"

    def __init__(self, stored: StoredScorer, archive: bytes, device: str, threads: int) -> None:
        self.inputs = stored.inputs
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        # Again, where it is loaded: who can write to shared memory should still not get code into a worker.
        program = vet_program(archive)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's own deprecations, while it loads
                with _LOADING:
                    self._module = torch.export.load(io.BytesIO(program.archive)).module().to(self._device)
            small, large = (self.run([np.zeros((n, i.width), np.float32) for i in self.inputs]) for n in (2, 3))
        except (RuntimeError, ValueError, TypeError, AssertionError, KeyError, AttributeError, IndexError) as error:
            raise ServingError(f"the scorer does not run on torch {torch.__version__}: {error}") from error
        if small.shape[0] != 2 or large.shape[0] != 3 or small.ndim > 2:
            raise ServingError(f"the scorer gives {list(small.shape)} for a batch of 2; expected [batch], or [batch, n]")
        self.width = small.shape[1] if small.ndim == 2 else None
        self.is_row_wise = self._scores_rows_alone()

    def _scores_rows_alone(self) -> bool:
        """Whether rows get the same scores beside others."""
        rng = np.random.default_rng(0)
        rows = [rng.standard_normal((4, i.width)).astype(np.float32) for i in self.inputs]
        together = self.run(rows)
        alone = np.concatenate([self.run([a[n : n + 2] for a in rows]) for n in (0, 2)])
        return bool(np.allclose(together, alone, rtol=1e-3, atol=1e-5, equal_nan=True))

    def run(self, arrays: list[Floats]) -> Floats:
        with torch.inference_mode():
            tensors = [torch.from_numpy(a).to(self._device) for a in arrays]
            scores: Floats = self._module(*tensors).to("cpu", torch.float32).numpy()
        return scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 1 else scores
