"""Lookups of inputs that are on a GPU already: jobs sent once, launched on many buffers, or captured as a graph."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tableside.quant.cache.tickets import Ticket
from tableside.quant.errors import QuantError
from tableside.quant.gpu.batch import jobs_on_device
from tableside.quant.gpu.layout import Layout

if TYPE_CHECKING:
    from tableside.quant.gpu.backend import Fused


class PreparedLookup:
    """A plan's jobs on the device, to be launched on many pairs of buffers there.

    in_bytes, out_bytes: what the buffers hold, as `layout.moves_in` and `layout.moves_out` place it.
    """

    def __init__(self, fused: "Fused", layout: Layout) -> None:
        self._fused, self.layout = fused, layout
        self.in_bytes, self.out_bytes = layout.in_bytes, layout.out_bytes
        self._jobs, self._launches = jobs_on_device(layout, fused.device, fused.is_interpreted)
        self._scratch = torch.empty(max(1, layout.scratch), dtype=torch.int32, device=fused.device)
        self.flags = torch.zeros(layout.jobs, dtype=torch.int32, device=fused.device)
        if fused.cache is not None:
            fused.cache.reserve(layout.cached_ids)
        if not fused.is_interpreted:
            torch.cuda.synchronize(fused.device)

    def prefetch(self, inputs: torch.Tensor) -> Ticket | None:
        """Brings the rows that a call with these inputs reads through the cache; None: it reads none. Nothing is waited for.

        inputs: as for the call, written on the current stream or before; they stay as they are until the call.
        """
        with self._on_device():
            if self._fused.cache is not None:
                self._fused.cache.follow_current_stream()
            return self._fused.prefetch(self._launches, inputs)

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor, ticket: Ticket | None = None) -> None:
        """Launches on the device's current stream; always the same one, since starts of bags and `flags` are shared by calls.

        inputs uint8 [in_bytes], outputs uint8 [out_bytes], both on the device, 16-aligned. `flags` int32 [jobs], on the device,
        turn 1 where an id or a length is wrong; that row was not read. ticket: of these inputs; it is released. None: the call
        begins with `prefetch`.
        """
        with self._fused._lock, self._on_device():  # nobody stashes tables in between
            ticket = ticket or self.prefetch(inputs)
            self._fused.launch(self._launches.groups, self.flags, inputs, outputs, self._scratch, ticket)

    def capture(self, inputs: torch.Tensor, outputs: torch.Tensor) -> "CapturedLookup":
        """This call as a graph over the same buffers each time: for batches whose launches take longer than their kernels."""
        return CapturedLookup(self._fused, self, inputs, outputs)

    def _on_device(self) -> Any:
        if self._fused.is_interpreted:
            return np.errstate(all="ignore")  # a GPU does not warn either
        return torch.cuda.device(self._fused.device)


class CapturedLookup:
    """A prepared lookup as a CUDA graph, prefetch and all. It has a pad of the cache's to itself, if there is one to spare.

    QuantError: there is no GPU.
    """

    def __init__(self, fused: "Fused", lookup: PreparedLookup, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if fused.is_interpreted:
            raise QuantError("lookups are captured on a GPU alone; call the prepared lookup")
        self._fused, self._lookup, self._buffers = fused, lookup, (inputs, outputs)
        self._ticket: Ticket | None = None
        self._capture()

    def _capture(self) -> None:
        fused, (inputs, outputs) = self._fused, self._buffers
        self.close()
        torch.cuda.synchronize(fused.device)
        with self._alone(), torch.cuda.device(fused.device), torch.cuda.stream(fused._stream):
            self._lookup(inputs, outputs)  # compiles what is not compiled, and makes room
            torch.cuda.synchronize(fused.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=fused._stream):
                self._ticket = fused.prefetch(self._lookup._launches, inputs)
                fused.launch(
                    self._lookup._launches.groups, self._lookup.flags, inputs, outputs, self._lookup._scratch, self._ticket
                )
                if fused.cache is not None:
                    fused.cache.join()
            self._generation = fused.cache.generation if fused.cache is not None else 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else launches on the backend's stream, or changes the cache, meanwhile."""
        with self._fused._lock, self._fused.cache.exclusive() if self._fused.cache is not None else nullcontext():
            yield

    def __call__(self) -> None:
        """Looks up what is in `inputs` now, on the backend's stream, after what is on the current one; which waits for it."""
        current = torch.cuda.current_stream(self._fused.device)
        stream = self._fused._stream
        assert stream is not None
        if current != stream:
            stream.wait_stream(current)
        cache = self._fused.cache
        with self._alone(), torch.cuda.device(self._fused.device), torch.cuda.stream(stream):
            if cache is not None and cache.generation != self._generation:
                self._capture()
            if cache is not None:
                cache.follow_itself()
            self._fused._await_tables()
            self._graph.replay()
        if current != stream:
            current.wait_stream(stream)

    def close(self) -> None:
        """Gives back what it has of the cache, once no replay is under way."""
        if self._ticket is not None and self._fused.cache is not None:
            torch.cuda.synchronize(self._fused.device)
            self._fused.cache.give_back(self._ticket)
            self._ticket = None
