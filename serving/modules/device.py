"""Lookups of tensors on a GPU: enqueued on the current stream, without waiting for the device.

Kernels read ids, lengths and offsets in place (`quant.gpu.tensors.tensors`). The host sends tensors'
addresses; a packed call with as many bags as before sends nothing. Calls can be captured as CUDA graphs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from tableside.quant import LookupKind, QuantError
from tableside.quant.cpu.bags import device_places
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.tensors.calls import StagedLookup, TensorInput, places_of
from tableside.quant.gpu.tensors.tensors import TensorLookup
from tableside.serving.modules.inputs import (
    Bags,
    FeatureTensors,
    Form,
    ModuleError,
    PackedInput,
    as_bags,
    as_ids,
    as_integers,
    as_weights,
    offsets_of,
)
from tableside.serving.modules.lookups import BY_INPUT, EXCHANGE, OUTPUTS
from tableside.serving.modules.published import AttachedVersion

_Found = TypeVar("_Found")
_DLPACK_TYPES = {"cpu": 1, "cuda": 2}


class _Ahead(NamedTuple):
    """A prefetched call. identity: of its tensors; given: keeps them alive."""

    given: object
    identity: list[Any]
    staged: StagedLookup


class GatheredAhead:
    """Vectors that a stream beside the caller's writes."""

    def __init__(self, lookup: "DeviceLookup", ids: torch.Tensor, bounds: torch.Tensor | None) -> None:
        self._lookup = lookup
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None
        self._begun_on, self._side = lookup.current_stream(), lookup.side_stream()
        self._event = lookup.take_event()
        vectors = lookup.lookup.room(ids)
        self._event.record(self._begun_on)
        self._event.wait(self._side)
        self._held = ids, lookup.gathered(ids, bounds, vectors, self._side)
        self._event.record(self._side)

    def wait(self) -> torch.Tensor:
        """Returns the vectors; the current stream waits for them. Once."""
        assert self._held is not None, "the vectors were taken before"
        (ids, vectors), self._held = self._held, None
        current = self._lookup.current_stream()
        self._event.wait(current)
        self._lookup.events.append(self._event)
        if current is not self._begun_on and vectors.is_cuda:  # whose memory this was
            ids.record_stream(self._side)
            vectors.record_stream(current)
        return vectors

    def __del__(self) -> None:
        for tensor in self._held or ():
            if tensor.is_cuda:  # its memory is used until then
                tensor.record_stream(self._side)


class DeviceLookup:
    """Lookups of some features of a version on its GPU. ModuleError: the CPU looks up one of its tables."""

    def __init__(self, attached: AttachedVersion, names: Sequence[str], output: torch.dtype) -> None:
        backend = attached.served.backend
        assert isinstance(backend, GpuBackend), "the source is on a GPU"
        if backend.device.is_capturing():
            raise ModuleError("a first call of a module cannot be captured; call it once like this before")
        self._backend, self._pending, self._streams = backend, attached.pending, attached.streams
        bound = [attached.served.features[name] for name in names]
        self._names, self._dims = names, [b.table.dim for b in bound]
        self._is_even = len(set(self._dims)) == 1
        kinds = [LookupKind(b.table, b.pooling, OUTPUTS[output]) for b in bound]
        try:
            self.lookup = TensorLookup(backend, names, kinds, attached.pending.reports_of(backend))
        except QuantError as error:
            raise ModuleError(f"model {attached.served.header.model!r}: {error}") from error
        attached.missing.follow(names, self.lookup.unfound)
        self._ahead: _Ahead | None = None
        self._device, self._all, self._every = (
            backend.device.torch_device,
            tuple(range(len(names))),
            ", ".join(names),
        )
        self.gathers = self.lookup.gatherer is not None
        # Of calls ahead: a stream, made by the first, and events, which take longer to make than to use
        self._side: Any = None
        self.events: list[Any] = []
        self._where = _DLPACK_TYPES[self._device.type], self._device.index or 0

    # ---- tensors of each feature ----

    def __call__(self, given: Sequence[FeatureTensors]) -> list[torch.Tensor]:
        """Returns a tensor per feature, as `HostLookup`. BadFeatureIds: an earlier call had a wrong id or
        length."""
        if self.gathers:
            return [self.gather(given[0].values)]
        shapes = [one.values.shape for one in given] if given[0].form is Form.IDS else None
        if (staged := self._begin(given)) is not None:
            return self._cut(self._run(self.lookup, staged), staged.parts, shapes)
        return self._look_up(*self._placed(given), shapes)

    def plain(self, values: Sequence[Any], form: int) -> list[torch.Tensor] | None:
        """The same of what a caller's dict has, as `device_places` takes it. None: it must be converted, or a
        call was prefetched."""
        if self.gathers:
            return [self.gather(values[0])]
        if self._ahead is not None or (
            (placed := device_places(EXCHANGE, values, *self._where, form, Bags)) is None
        ):
            return None
        self._begin(())
        return self._look_up(*placed, values, [ids.shape for ids in values] if form == Form.IDS else None)

    def gather(self, ids: torch.Tensor, bounds: torch.Tensor | None = None) -> torch.Tensor:
        """The same for one feature whose rows are read by their numbers (`gathers`): [*shape of ids, dim].
        bounds: as of `RowGatherer`."""
        return self.gathered(self._integers(ids), bounds, None, None)

    def gather_ahead(self, ids: torch.Tensor, bounds: torch.Tensor | None) -> "GatheredAhead":
        """Begins a `gather` beside the current stream. Do not change the ids until it was waited for."""
        return GatheredAhead(self, self._integers(ids), bounds)

    def gathered(
        self, ids: torch.Tensor, bounds: torch.Tensor | None, out: torch.Tensor | None, beside: Any
    ) -> torch.Tensor:
        """As `gather`, to `out` and on the stream `beside`, where they are given."""
        try:
            found, stream = self.lookup.gather(ids, bounds, out, beside)
        except QuantError as error:
            raise ModuleError(str(error)) from error
        if stream not in self._streams:
            self._streams[stream] = self._backend.device.current_stream() if beside is None else beside
        return found

    def current_stream(self) -> Any:
        """The device's current stream; torch takes longer to make an object of it than to find it."""
        handle = self._backend.device.current_handle()
        if (found := self._streams.get(handle)) is None:
            found = self._streams[handle] = self._backend.device.current_stream()
        return found

    def side_stream(self) -> Any:
        if self._side is None:
            self._side = self._backend.device.stream()
        return self._side

    def take_event(self) -> Any:
        """An event that nobody else uses; give it back to `events`."""
        try:
            return self.events.pop()
        except IndexError:
            return self._backend.device.event()

    def _integers(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids as kernels read them. BadFeatureIds: as a call."""
        if not self._backend.device.is_capturing():
            self._pending.raise_first()
        if type(ids) is torch.Tensor and ids.dtype is torch.int64 and ids.device == self._device:
            return ids.contiguous()
        return as_integers(self._device, self._names[0], ids)

    def _look_up(
        self, places: bytes, shapes: bytes, ids: int, held: object, of_ids: Sequence[torch.Size] | None
    ) -> list[torch.Tensor]:
        vectors, parts = self._run(self.lookup.of_places, places, shapes, ids, held)
        return self._cut(vectors, parts, of_ids)

    def prefetch(self, given: Sequence[FeatureTensors]) -> None:
        """Brings the rows of the next call with these tensors to the cache. Do not change them until then."""
        if self.gathers:
            return  # they are read where they lie
        self._look_ahead(given, self.lookup.stage_placed(*self._placed(given)))

    def _placed(self, given: Sequence[FeatureTensors]) -> tuple[bytes, bytes, int, object]:
        """Places and shapes of tensors, the ids of all, and what holds them."""
        if (placed := device_places(EXCHANGE, given, *self._where, BY_INPUT, Bags)) is not None:
            return *placed, given
        inputs = list(map(self._input, self._names, given))
        return *places_of(inputs), inputs

    # ---- all ids in one tensor ----

    def packed(self, packed: PackedInput) -> torch.Tensor:
        """[bags, sum of dims]. Prefetched rows are taken for the same tensors."""
        staged = self._begin(packed[2:])
        return self._run(self.lookup, self._staged(packed) if staged is None else staged)

    def prefetch_packed(self, packed: PackedInput) -> None:
        """As `prefetch`, for a call of `packed`."""
        self._look_ahead(packed[2:], self._staged(packed))

    def _staged(self, packed: PackedInput) -> StagedLookup:
        order, features, values, form, bags, weights = packed
        ids = as_ids(self._device, self._every, values)
        offsets = as_bags(self._device, self._every, bags)
        if form is Form.LENGTHS:
            offsets = offsets_of(offsets)
        count = offsets.numel()
        if not features or (count - 1) % features:
            raise ModuleError(
                f"there are {offsets.dtype} offsets {list(offsets.shape)} for {features} features "
                f"({self._every}); expected [features * bags + 1], or as many lengths for each feature"
            )
        if count == 1 and ids.numel():
            raise ModuleError(
                f"there are no bags of {self._every}, but {ids.numel()} ids; send no ids, or their offsets"
            )
        weights = None if weights is None else as_weights(self._device, self._every, weights, ids.numel())
        return self.lookup.stage_packed(ids, offsets, features, tuple(order) or self._all, weights)

    # ---- calls ----

    def _begin(self, given: Sequence[Any]) -> StagedLookup | None:
        """Takes the prefetched call of these tensors; drops those of others."""
        if not self._backend.device.is_capturing():
            self._pending.raise_first()
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.identity == _identity(given):
            return None if ahead is None else ahead.staged
        if ahead.staged.ticket is not None:
            with self.lookup.on_device:
                ahead.staged.ticket.release()
        return None

    def _look_ahead(self, given: Sequence[Any], staged: StagedLookup) -> None:
        self._begin(())
        self._ahead = _Ahead(given, _identity(given), self.lookup.prefetch(staged))

    def _run(self, look_up: Callable[..., _Found], *arguments: Any) -> _Found:
        try:
            found = look_up(*arguments)
        except QuantError as error:
            raise ModuleError(str(error)) from error
        self.current_stream()  # is among those that are waited for before memory goes
        return found

    def _cut(
        self, vectors: torch.Tensor, parts: Sequence[int], shapes: Sequence[torch.Size] | None
    ) -> list[torch.Tensor]:
        """The vectors of each feature, from those of all. shapes: of ids that are not pooled."""
        found = list(torch.unsafe_split_with_sizes(vectors, parts))  # a third of the time that views take
        if shapes is not None:
            return [
                part.view(*shape, dim) for part, shape, dim in zip(found, shapes, self._dims, strict=True)
            ]
        if self._is_even:
            return found
        return [part.view(part.numel() // dim, dim) for part, dim in zip(found, self._dims, strict=True)]

    # ---- tensors ----

    def _input(self, name: str, one: FeatureTensors) -> TensorInput:
        form, values, bags, weights = one
        ids = as_ids(self._device, name, values)
        count = ids.numel()
        if form is Form.IDS:
            return TensorInput(ids, None, 0, 0, None)
        if weights is not None:
            weights = as_weights(self._device, name, weights, count)
        if bags is None:
            return TensorInput(ids, None, values.shape[1], values.shape[0], weights)
        bags = as_bags(self._device, name, bags)
        number = bags.numel() - (form is Form.ENDS)
        if number < 1 and (count or number < 0):
            raise ModuleError(
                f"feature {name!r}: {bags.numel()} lengths or offsets for {count} ids; expected one for each "
                "bag"
            )
        offsets = offsets_of(bags) if form is Form.LENGTHS else bags
        return TensorInput(ids, offsets, 0, number, weights)


def _identity(given: Sequence[Any]) -> list[Any]:
    """Which tensors a call has, and how often they were changed."""
    tensors = [t for one in given for t in (one[1:] if isinstance(one, FeatureTensors) else (one,))]
    return [
        (t.data_ptr(), t.shape, t.stride(), t.dtype, t._version) if isinstance(t, torch.Tensor) else t
        for t in tensors
    ]
