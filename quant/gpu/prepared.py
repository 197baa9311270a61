"""Lookups of inputs that are on a GPU already: jobs are sent once, and launched on many buffers or captured as a CUDA graph."""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from tableside.quant.cache.cache import Cache
from tableside.quant.cache.tickets import Ticket
from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError
from tableside.quant.gpu.layout import Layout
from tableside.quant.gpu.merge import Launches, jobs_on_device
from tableside.quant.gpu.resolve import COUNTS


class Launcher(Protocol):
    """The backend of a device (`quant.gpu.backend.GpuBackend`), as far as prepared lookups use it.

    lock: is held while something is launched. stream: where the backend launches;
    """

    device: Device
    stream: Any
    cache: Cache | None
    lock: threading.RLock

    def resolve(
        self, launches: Launches, source: torch.Tensor, inputs: torch.Tensor, outputs: torch.Tensor, counts: torch.Tensor
    ) -> None: ...

    def prefetch(self, launches: Launches, inputs: torch.Tensor) -> Ticket | None: ...

    def launch(
        self,
        launches: Launches,
        flags: torch.Tensor,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        scratch: torch.Tensor,
        ticket: Ticket | None = None,
    ) -> None: ...

    def await_tables(self) -> None: ...

    def exclusive(self) -> AbstractContextManager[None]: ...


class PreparedLookup:
    """A request's jobs on the device, to be launched on many pairs of buffers there. `GpuBackend.prepare` makes it.

    in_bytes, out_bytes: of the buffers, laid out as `layout.moves_in` and `layout.moves_out` say. unfound: int64 [2] on the
    device, to which each call adds its ids without a row, and those whose row came from an older version. QuantError: a part of
    the request begins on the CPU, or asks for a found mask.

    Where ids become row numbers first, these are written to buffers of this object; a call's inputs stay as they are.
    """

    def __init__(self, backend: Launcher, layout: Layout) -> None:
        self.backend, self.layout = backend, layout
        if self.layout.host is not None or self.layout.gathers:
            raise QuantError("a plan with lookups that begin on the CPU cannot be prepared; copy its tables to HBM (to_hbm)")
        if self.layout.all_found or any(lk.found_at is not None for lk in self.layout.lookups()):
            raise QuantError("a plan with found masks cannot be prepared; plan lookups without found_at, or run the plan")
        self.in_bytes, self.out_bytes = self.layout.in_bytes, self.layout.out_bytes
        self._jobs, self.launches = jobs_on_device(self.layout, backend.device, keeps_inputs=True)
        self._rows: WeakKeyDictionary[Ticket, torch.Tensor] = WeakKeyDictionary()  # with row numbers, of what was prefetched
        self._counts = torch.zeros((len(layout.resolved), COUNTS), dtype=torch.int64, device=backend.device.torch_device)
        self._own_rows = None if self.launches.resolve is None else self.room_for_rows()
        self.scratch = torch.empty(max(1, self.layout.scratch), dtype=torch.int32, device=backend.device.torch_device)
        self.flags = torch.zeros(self.layout.job_count, dtype=torch.int32, device=backend.device.torch_device)
        if backend.cache is not None:
            backend.cache.reserve(self.layout.cached_ids)
        backend.device.synchronize()

    @property
    def unfound(self) -> torch.Tensor:
        return self._counts.sum(0)

    def room_for_rows(self) -> torch.Tensor:
        """A buffer for the inputs of a call with row numbers in place of ids."""
        return torch.empty(self.in_bytes, dtype=torch.uint8, device=self.backend.device.torch_device)

    def resolve(self, inputs: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes the inputs with row numbers in place of ids to `rows`, on the current stream."""
        self.backend.resolve(self.launches, inputs, rows, rows, self._counts)

    def prefetch(self, inputs: torch.Tensor) -> Ticket | None:
        """Brings the rows that a call with these inputs reads through the cache; None: it reads none. Waits for nothing.

        inputs: as for the call, written on the current stream or before. They must stay as they are until the call.
        """
        with self._on_device():
            if self.backend.cache is not None:
                self.backend.cache.follow_current_stream()
            if self.launches.resolve is None or self.launches.probe is None:
                return self.backend.prefetch(self.launches, inputs)
            with self.backend.lock, self.backend.device.on(self.backend.stream):
                rows = self.room_for_rows()
                self.resolve(inputs, rows)
                ticket = self.backend.prefetch(self.launches, rows)
            assert ticket is not None, "there is something to probe"
            self._rows[ticket] = rows
            return ticket

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor, ticket: Ticket | None = None) -> None:
        """Launches on the device's current stream. It must be the same one always, because calls share `flags` and scratch.

        inputs uint8 [in_bytes], outputs uint8 [out_bytes], both on the device, 16-aligned. `flags` int32 [jobs], on the device,
        turn 1 where an id or a length is wrong; that row was not read. ticket: of these inputs; it is released. None: the call
        begins with `prefetch`.
        """
        with self.backend.lock, self._on_device():  # nobody stashes tables in between
            ticket = ticket or self.prefetch(inputs)
            rows = self._rows_of(inputs, ticket)
            self.backend.launch(self.launches, self.flags, rows, outputs, self.scratch, ticket)

    def _rows_of(self, inputs: torch.Tensor, ticket: Ticket | None) -> torch.Tensor:
        """The inputs with row numbers in place of ids."""
        if self._own_rows is None:
            return inputs
        if ticket is None:
            self.resolve(inputs, self._own_rows)
            return self._own_rows
        rows = self._rows.pop(ticket)
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))  # it was allocated on the cache's stream
        return rows

    def capture(self, inputs: torch.Tensor, outputs: torch.Tensor) -> "CapturedLookup":
        """This call as a graph over the same buffers each time, for batches whose launches take longer than their kernels."""
        return CapturedLookup(self, inputs, outputs)

    def _on_device(self) -> Any:
        return self.backend.device.switch() or nullcontext()


class CapturedLookup:
    """A prepared lookup as a CUDA graph, prefetch included. It has a staging buffer of the cache to itself, if one is free.

    QuantError: there is no GPU.
    """

    def __init__(self, lookup: PreparedLookup, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if not lookup.backend.device.compiles:
            raise QuantError("lookups are captured on a GPU alone; call the prepared lookup")
        self._backend, self._lookup, self._buffers = lookup.backend, lookup, (inputs, outputs)
        self._ticket: Ticket | None = None
        self._capture()

    def _capture(self) -> None:
        backend, lookup, (inputs, outputs) = self._backend, self._lookup, self._buffers
        self.close()
        backend.device.synchronize()
        with backend.exclusive(), backend.device.on(backend.stream):
            lookup(inputs, outputs)  # compiles what is not compiled, and makes room
            backend.device.synchronize()
            if backend.cache is not None:
                backend.cache.reserve(lookup.layout.cached_ids)  # for whichever batch the capture takes
            self._graph = torch.cuda.CUDAGraph()
            rows = inputs if lookup.launches.resolve is None else lookup.room_for_rows()
            self._rows = rows  # which the graph reads and writes
            with torch.cuda.graph(self._graph, stream=backend.stream):
                lookup.resolve(inputs, rows)
                self._ticket = backend.prefetch(lookup.launches, rows)
                backend.launch(lookup.launches, lookup.flags, rows, outputs, lookup.scratch, self._ticket)
                if backend.cache is not None:
                    backend.cache.join()
            self._generation = backend.cache.generation if backend.cache is not None else 0

    def __call__(self) -> None:
        """Looks up the ids that `inputs` holds now, on the backend's stream. The current stream waits for it."""
        backend = self._backend
        current = backend.device.current_stream()
        if current != backend.stream:
            backend.stream.wait_stream(current)
        with backend.exclusive(), backend.device.on(backend.stream):
            if backend.cache is not None:
                if backend.cache.generation != self._generation:
                    self._capture()
                backend.cache.follow_itself()
            backend.await_tables()
            self._graph.replay()
        if current != backend.stream:
            current.wait_stream(backend.stream)

    def close(self) -> None:
        """Gives back what it has of the cache, once no replay is under way."""
        if self._ticket is not None and self._backend.cache is not None:
            self._backend.device.synchronize()
            self._backend.cache.give_back(self._ticket)
            self._ticket = None
