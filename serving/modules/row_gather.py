"""`RowGather`: rows of one table by number, for layers that compute their ids: n-gram memories and per-layer
embeddings of language models."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Literal, Protocol, Unpack

import torch

from tableside.quant import BadIds, Pooling
from tableside.quant.errors import Problem
from tableside.quant.gpu.residence.registry import is_by_cpu
from tableside.serving.modules.dispatch import lookup_of, traced
from tableside.serving.modules.embeddings import PublishedModule, SourceOptions
from tableside.serving.modules.inputs import (
    BadFeatureIds,
    FeatureTensors,
    Form,
    ModuleError,
    NotInMemory,
    check_tensor,
    is_traced,
    outside_graphs,
)
from tableside.serving.modules.published import ModuleSource


class Ahead(Protocol):
    """Vectors that are on their way."""

    def wait(self) -> torch.Tensor:
        """Returns them, as a call of the module does. On a GPU the current stream waits, not the host. To be
        called once; on the CPU it raises what the call would have raised."""


class RowGather(PublishedModule):
    """Vectors of a table's rows, whose numbers a layer computes.

    table: one of the model that has a feature of pooling none, or that feature. heads: (first row, rows) of
    each head that ids have, in their last dim: an id of head n is the number of a row among the head's, and
    the vectors of the heads lie side by side. So each rank of a tensor-parallel engine names its own.
    output: dtype of the vectors. follow, options: as of `Embeddings`; device="cuda:0" with placement="hbm",
    "zero_copy" or "cached" say where the GPU reads rows; with "host", and with "stored" on a disk, the CPU
    reads them and sends the vectors. Under torch.compile a call is one operator, unless the CPU sends them. A
    call with rows that the GPU reads in HBM or in host memory may be captured in a CUDA graph, once such a
    call was made.
    ModuleError: the table or a head is not there.
    """

    _poolings = (Pooling.NONE,)

    def __init__(
        self,
        model: str,
        table: str,
        *,
        heads: Sequence[tuple[int, int]] | None = None,
        output: torch.dtype = torch.bfloat16,
        follow: Literal["live"] | None = "live",
        **options: Unpack[SourceOptions],
    ) -> None:
        self._sends_to: torch.device | None = None
        if is_by_cpu(options.get("placement", "auto")):
            self._sends_to = _gpu_of(ModuleSource(model, **options).device)
            options.pop("device", None), options.pop("hbm_budget", None)
        super().__init__(model, [table], output=output, follow=follow, **options)
        self.dim = self.dims[0]
        self.heads = None if heads is None else tuple((int(first), int(rows)) for first, rows in heads)
        rows = self._published.now().served.features[self.features[0]].table.rows
        self._bounds: torch.Tensor | None = None
        if self.heads is not None:
            self._published.require_numbers(self.features[0])
            for head, (first, count) in enumerate(self.heads):
                if first < 0 or count < 1 or first + count > rows:
                    raise ModuleError(
                        f"head {head} has rows {first:,} to {first + count:,}; table {table!r} of model "
                        f"{model!r} has {rows:,}"
                    )
            firsts = [first for first, _ in self.heads]
            ends = [first + count for first, count in self.heads]
            here = self._published.source.device
            device = "cpu" if here == "interpreter" else here
            self._bounds = torch.tensor([firsts, ends], dtype=torch.int64, device=device)

    @property
    def _where(self) -> str:
        return super()._where if self._sends_to is None else str(self._sends_to)

    def _choose(self, wanted: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
        assert wanted is not None
        features, (name,) = self._published.now().served.features, wanted
        here = [n for n, b in features.items() if b.pooling is Pooling.NONE and name in (n, b.feature.table)]
        return super()._choose([name] if name in here or not here else here[:1])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns vectors [*shape of the ids, dim], with heads [*shape without the last, heads * dim]. ids:
        int64 or int32, on the module's device. BadFeatureIds: an id is no row's; on a GPU it is reported by a
        later call or `check`, and its vector is zeros; at once where the CPU reads."""
        if self._sends_to is not None:
            return self._sent(ids, self._sends_to)
        if self.heads is not None or not isinstance(ids, torch.Tensor):
            self._check(ids)
        if is_traced():
            return self._side_by_side(self._traced(ids))
        attached = self._published.now()
        lookup: Any = lookup_of(attached, self._call)
        try:
            if attached.on_gpu and lookup.gathers:
                return self._side_by_side(lookup.gather(ids, self._bounds))
            if not attached.on_gpu:
                return self._on_host(lookup, ids)
            return self._side_by_side(lookup(self._given_rows(ids))[0])
        except NotInMemory:
            return self._side_by_side(self._traced(ids))

    @outside_graphs
    def prefetch(self, ids: torch.Tensor) -> Ahead:
        """Begins a call: beside the current stream of a GPU, or on a thread beside the caller's. Do not
        change the ids until it was waited for. Wait in the same graph where one is captured."""
        self._check(ids)
        attached = self._published.now()
        lookup: Any = lookup_of(attached, self._call)
        if (device := self._sends_to) is not None:
            ready = _stream_of(device, ids).record_event()
            return _Sent(_thread().submit(self._send, lookup, ids, device, ready))
        if not attached.on_gpu:
            return _OnThread(_thread().submit(self._on_host, lookup, ids))
        if lookup.gathers:
            return _OnDevice(self, lookup.gather_ahead(ids, self._bounds).wait)
        given = self._given_rows(ids)
        lookup.prefetch(given)
        return _OnDevice(self, lambda: lookup(given)[0])

    @outside_graphs
    def _sent(self, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A call on the CPU of ids of a GPU, which the host waits for."""
        self._check(ids)
        _stream_of(device, ids)
        return self._on_host(lookup_of(self._published.now(), self._call), ids.cpu()).to(device)

    def _send(
        self, lookup: Any, ids: torch.Tensor, device: torch.device, ready: torch.cuda.Event
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The same on another thread and stream; returns the vectors, and when they are there."""
        side = _side_of(device)
        with torch.cuda.stream(side):
            side.wait_event(ready)
            vectors = self._on_host(lookup, ids.cpu()).pin_memory()
            return vectors.to(device, non_blocking=True), side.record_event()

    def _on_host(self, lookup: Any, ids: torch.Tensor) -> torch.Tensor:
        """A call on the CPU. BadFeatureIds: names the id as it was given."""
        given = self._given_rows(ids)
        try:
            return self._side_by_side(lookup(given)[0])
        except BadFeatureIds as error:
            at = error.position
            if self._bounds is None or given[0].values.reshape(-1)[at] != -1:
                raise
            asked = int(ids.reshape(-1)[at])
            rows = self._bounds[1, at % len(self._bounds[0])] - self._bounds[0, at % len(self._bounds[0])]
            wrong = BadIds(Problem.ID, 0, at, asked, int(rows))
            raise BadFeatureIds(self.features[0], wrong) from None

    def _check(self, ids: torch.Tensor) -> None:
        check_tensor(self.features[0], ids)
        if self.heads is not None and (not ids.dim() or ids.shape[-1] != len(self.heads)):
            raise ModuleError(
                f"feature {self.features[0]!r}: ids are {list(ids.shape)}; "
                f"expected [..., {len(self.heads)}], one of each head"
            )

    def _given_rows(self, ids: torch.Tensor) -> list[FeatureTensors]:
        """Row numbers of ids; -1, which is refused, where a head has no such row."""
        if self._bounds is not None:
            first, end = self._bounds
            is_row = (ids >= 0) & (ids < end - first)
            ids = torch.where(is_row, ids + first, -1)
        return [FeatureTensors(Form.IDS, ids, None, None)]

    def _traced(self, ids: torch.Tensor) -> torch.Tensor:
        return traced(self._call, self.features, self._given_rows(ids))[0]

    def _side_by_side(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors if self.heads is None else vectors.flatten(-2)

    def extra_repr(self) -> str:
        heads = "" if self.heads is None else f", {len(self.heads)} heads"
        return f"{super().extra_repr()}{heads}"


class _OnThread:
    def __init__(self, future: "Future[Any]") -> None:
        self._future, self._process = future, os.getpid()

    def wait(self) -> Any:
        if self._process != os.getpid():
            raise ModuleError("the call began in the process that forked this one; begin it here")
        return self._future.result()


class _Sent(_OnThread):
    """Vectors of the CPU that a stream of their own brings to a GPU."""

    def wait(self) -> torch.Tensor:
        vectors: torch.Tensor
        vectors, are_there = super().wait()
        current = torch.cuda.current_stream(vectors.device)
        are_there.wait(current)
        vectors.record_stream(current)
        return vectors


class _OnDevice:
    """wait: of the vectors of all ids."""

    def __init__(self, module: RowGather, wait: Callable[[], torch.Tensor]) -> None:
        self._module, self._wait = module, wait

    def wait(self) -> torch.Tensor:
        return self._module._side_by_side(self._wait())


_threads: list[ThreadPoolExecutor] = []


def _thread() -> ThreadPoolExecutor:
    """The thread of this process that runs calls of the CPU ahead."""
    if not _threads:
        _threads.append(ThreadPoolExecutor(1, "tableside-ahead"))
    return _threads[0]


def _gpu_of(device: str) -> torch.device | None:
    """ModuleError: this process does not see that GPU."""
    if not device.startswith("cuda"):
        return None
    if (torch.device(device).index or 0) >= (seen := torch.cuda.device_count()):
        raise ModuleError(f"device is {device!r}; this process sees {seen} GPUs")
    return torch.device(device)


@cache
def _side_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process by which vectors go to a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _stream_of(device: torch.device, ids: torch.Tensor) -> torch.cuda.Stream:
    """The current stream of ids on a GPU. ModuleError: they lie elsewhere, or a graph is captured."""
    if ids.device != device:
        raise ModuleError(
            f"ids are on {ids.device}; the module sends vectors to {device}, expected them there"
        )
    if torch.cuda.is_current_stream_capturing():
        raise ModuleError("a call whose rows the CPU reads cannot be captured; call it before the replay")
    return torch.cuda.current_stream(device)


os.register_at_fork(after_in_child=_threads.clear)
