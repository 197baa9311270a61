"""A scorer's calls on a device, on matrices that stay there; small calls are CUDA graphs.

A graph reads and writes fixed memory, so there is a *room*, matrices at fixed addresses, per power of two of
rows; rows behind the batch's are zeros or old. That suits scorers that see each row alone. Other scorers,
large calls, and scorers that cannot be captured (logged once) are called directly. Imports torch.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.loader.program.precision import DTYPES
from tableside.quant.contract import Precision
from tableside.serving.errors import ApiError

logger = logging.getLogger("tableside")

GRAPH_ROWS = 4096  # of the largest graph
WARM_ROWS = 1024  # up to which graphs are made before the first request

_BATCHES = 4  # more than have begun and are not read
# [rows, width] of each input -> fp32 [rows], or [rows, n]
Run = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class ScorerRoom:
    """A batch's matrices. inputs: [rows or more, width] each; addresses: of their first rows, int64."""

    inputs: tuple[torch.Tensor, ...]
    addresses: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return self.inputs[0].shape[0]


class _Graph:
    """A captured call. scores: that a replay writes, [rows], or [rows, n] for several a row."""

    def __init__(self, graph: Any, scores: torch.Tensor) -> None:
        self._graph, self._scores = graph, _a_row(scores)
        hosts = [_on_host(self._scores) for _ in range(_BATCHES)]
        self._hosts = cycle([(host, host.numpy()) for host in hosts])

    def replay(self) -> NDArray[np.float32]:
        """Begins the call, and to copy its scores to the host."""
        self._graph.replay()
        host, found = next(self._hosts)
        host.copy_(self._scores, non_blocking=True)
        return found


class DeviceCalls:
    """A scorer's calls on one device; one thread at a time, always on the same current stream. precision: of
    inputs. row_bytes: per input, int64. rows: the fewest and most it takes. is_row_wise: rows are
    independent."""

    def __init__(
        self,
        run: Run,
        widths: Sequence[int],
        device: torch.device,
        *,
        rows: tuple[int, int],
        is_row_wise: bool,
        name: str,
        precision: Precision = Precision.FP32,
    ) -> None:
        self._run, self._widths, self.device, self.rows, self._name = run, widths, device, rows, name
        self.precision = precision
        self.row_bytes = precision.bytes * np.array(widths, np.int64)
        self._captures = is_row_wise and device.type == "cuda"
        self._rooms: dict[int, ScorerRoom] = {}
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None
        # Torch records an event where such memory goes, which another thread must not do during a capture.
        self._sent: deque[torch.Tensor] = deque(maxlen=_BATCHES)

    def room(self, rows: int) -> ScorerRoom:
        """Returns room for `rows`; it overwrites an earlier batch's."""
        rounded = 1 << max(0, rows - 1).bit_length()
        if (found := self._rooms.get(rounded)) is None:
            for larger in [n for n in self._rooms if n > GRAPH_ROWS]:  # one of those at a time
                if rounded > GRAPH_ROWS:
                    del self._rooms[larger]
            dtype = DTYPES[self.precision]
            inputs = tuple(
                torch.zeros((rounded, width), dtype=dtype, device=self.device) for width in self._widths
            )
            found = self._rooms[rounded] = ScorerRoom(
                inputs, np.array([i.data_ptr() for i in inputs], np.int64)
            )
        return found

    def score(self, room: ScorerRoom, start: int, rows: int, is_all: bool) -> NDArray[np.float32]:
        """Begins to compute scores of a room's rows [start, start + rows), which are there once the current
        stream is done, and valid for the next _BATCHES - 1 calls. is_all: the room holds no others.
        RuntimeError, ValueError, ...: the scorer refuses the rows, or the device is lost."""
        with torch.inference_mode():
            graph = self._graph(room) if is_all and start == 0 else None
            if graph is None:
                return self._to_host(self._run([i[start : start + rows] for i in room.inputs]))
            return graph.replay()[:rows]

    def warm_up(self, admit: Callable[[int], object]) -> None:
        """Makes the small graphs that the scorer may take. admit: `Scorer.admit`."""
        rows = 1
        while rows <= WARM_ROWS and self._captures:
            if self.rows[0] <= rows <= self.rows[1]:
                try:
                    admit(rows)
                except ApiError:
                    return  # nor may it take more
                room = self.room(rows)
                with torch.inference_mode():
                    self._graph(room)
            rows *= 2

    def _graph(self, room: ScorerRoom) -> _Graph | None:
        """Returns the graph of a room, captured on first use; None: call the scorer directly."""
        if not self._captures or room.rows > GRAPH_ROWS or not self.rows[0] <= room.rows <= self.rows[1]:
            return None
        if (found := self._graphs.get(room.rows)) is None:
            self._run(room.inputs)  # libraries make room for themselves; an error is that of a call
            try:
                found = self._graphs[room.rows] = self._captured(room)
            except (RuntimeError, NotImplementedError) as error:
                self._captures = False
                self._graphs.clear()
                what = "the scorer of %s is not captured as a CUDA graph, and runs without: %s"
                logger.warning(what, self._name, error)
        return found

    def _to_host(self, scores: torch.Tensor) -> NDArray[np.float32]:
        """Begins to copy scores to the host: fp32 [rows], or [rows, n] for several a row."""
        scores = _a_row(scores)
        host = _on_host(scores)
        host.copy_(scores, non_blocking=True)
        self._sent.append(host)
        found: NDArray[np.float32] = host.numpy()
        return found

    def _captured(self, room: ScorerRoom) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream(self.device).synchronize()
        # thread_local: other threads may register memory or copy tables meanwhile.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            scores = self._run(room.inputs)
        except BaseException:
            with suppress(RuntimeError):  # it was invalidated
                graph.capture_end()
            raise
        graph.capture_end()
        # Graphs that share a pool may overwrite each other's intermediate values, but not the scores, which
        # are held here.
        self._pool = graph.pool()
        return _Graph(graph, scores)


def _a_row(scores: torch.Tensor) -> torch.Tensor:
    """[rows] of [rows, 1]."""
    return scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 1 else scores


def _on_host(scores: torch.Tensor) -> torch.Tensor:
    """Room for scores, fp32."""
    return torch.empty(scores.shape, dtype=torch.float32, pin_memory=scores.is_cuda)
