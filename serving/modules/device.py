"""Lookups of tensors that are on a GPU: enqueued on the current stream, and nobody waits for the device.

A call's ids, lengths and weights are brought together in one buffer there, by one `torch.cat`; its vectors are views of one
buffer. What the kernels need to know of its shapes is sent once and kept for `_SHAPES` shapes; only new shapes cost a copy that
is waited for. A call of shapes that came before can be captured as a CUDA graph; wrong ids of captured calls are not reported.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tableside.quant import LookupKind, Place, Pooling, Precision
from tableside.quant.cache.tickets import Ticket
from tableside.quant.gpu.backend import GpuBackend, GpuPlan
from tableside.quant.gpu.moves import Move
from tableside.quant.gpu.prepared import PreparedLookup
from tableside.serving.modules.errors import ModuleError
from tableside.serving.modules.inputs import Form, Given
from tableside.serving.modules.pending import Staged
from tableside.serving.modules.published import Attached
from tableside.serving.version import BoundFeature

_SHAPES = 64
_PRECISIONS = {torch.float32: Precision.FP32, torch.float16: Precision.FP16, torch.bfloat16: Precision.BF16}
_captured: list[object] = []  # what graphs read: a graph does not say when it goes


class _Shape(NamedTuple):
    """Lookups of these shapes. parts: which tensors the input buffer has, one after another, each with int32 zeros before it;
    out_at: where the vectors of each feature begin in the output buffer, bytes."""

    lookup: PreparedLookup
    parts: list[tuple[int, int]]
    out_at: list[int]


class _Ready(NamedTuple):
    """A call that is staged on the device. given, identity: its tensors, as they were then. ticket: of its rows in the cache,
    where they were prefetched."""

    given: Sequence[Given]
    identity: list[Any]
    staged: list[Staged]
    shape: _Shape
    lookup: PreparedLookup
    inputs: torch.Tensor
    ticket: Ticket | None


class DeviceLookup:
    """Lookups of some features of a version on its GPU."""

    def __init__(self, attached: Attached, names: Sequence[str], output: torch.dtype) -> None:
        backend = attached.served.backend
        assert isinstance(backend, GpuBackend), "the source is on a GPU"
        self._backend, self._output = backend, output
        self._served, self._pending = attached.served, attached.pending  # not what holds this: a version goes at once
        self._bound = [attached.served.features[name] for name in names]
        kinds = [LookupKind(b.table, b.pooling, _PRECISIONS[output]) for b in self._bound]
        self._planner = backend.planner(kinds)
        self._shapes: OrderedDict[Any, _Shape] = OrderedDict()
        self._ahead: _Ready | None = None

    def __call__(self, given: Sequence[Given]) -> list[torch.Tensor]:
        """A tensor for each feature, as `HostLookup`. BadFeatureIds: a call before this one had a wrong id or length."""
        captures = self._backend.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not captures:
            self._pending.raise_first()
        with self._backend.lock:
            ready = self._take_ahead(given) or self._ready(given, captures)
            staged, shape, lookup = ready.staged, ready.shape, ready.lookup
            outputs = self._bytes(max(1, lookup.out_bytes))
            lookup(ready.inputs, outputs, ready.ticket)
            if captures:
                _captured.append((self._served, lookup))
            else:
                self._pending.add(lookup.flags, staged, (self._served, lookup))
        return [self._vectors(outputs, at, one, g) for at, one, g in zip(shape.out_at, staged, given, strict=True)]

    def prefetch(self, given: Sequence[Given]) -> None:
        """Brings rows to the cache that a call with these tensors reads next. They are not to be changed until then."""
        with self._backend.lock:
            self._take_ahead(())
            ready = self._ready(given, captures=False)
            self._ahead = ready._replace(ticket=ready.lookup.prefetch(ready.inputs))

    def _ready(self, given: Sequence[Given], captures: bool) -> "_Ready":
        staged = [self._staged(b, one) for b, one in zip(self._bound, given, strict=True)]
        shape = self._shape(staged, captures)
        return _Ready(given, _identity(given), staged, shape, shape.lookup.on_new_buffers(), self._inputs(shape, staged), None)

    def _take_ahead(self, given: Sequence[Given]) -> "_Ready | None":
        """What `prefetch` made of these tensors; what it made of others is let go."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.identity == _identity(given):
            return ahead
        if ahead.ticket is not None:
            ahead.ticket.release()
        return None

    def _staged(self, bound: BoundFeature, one: Given) -> Staged:
        name, device = bound.feature.name, self._backend.device
        for tensor in (one.values, one.bags, one.weights):
            if tensor is not None and tensor.device != device:
                raise ModuleError(
                    f"feature {name!r}: a tensor is on {tensor.device}, the module's tables on {device}; send it there, or "
                    f"make a module with device={str(tensor.device)!r}"
                )
        ids = one.values.to(torch.int64).contiguous().view(-1)
        if one.form is Form.IDS:
            return Staged(name, bound.table, ids, None, 0, 0, None)
        weights = None if one.weights is None else one.weights.detach().to(torch.float32).contiguous().view(-1)
        if weights is not None and weights.numel() != ids.numel():
            raise ModuleError(f"feature {name!r}: there are {weights.numel()} weights for {ids.numel()} ids; expected one an id")
        if one.bags is None:
            return Staged(name, bound.table, ids, None, one.values.shape[1], one.values.shape[0], weights)
        lengths = one.bags
        if one.form is not Form.LENGTHS:
            ends = None if one.form is Form.ENDS else lengths.new_full((1,), ids.numel())
            lengths = torch.diff(lengths, append=ends)
        lengths = lengths.to(torch.int32).contiguous()
        return Staged(name, bound.table, ids, lengths, 0, lengths.numel(), weights)

    def _shape(self, staged: Sequence[Staged], captures: bool) -> _Shape:
        key = tuple((s.ids.numel(), s.bags, s.bag_length, s.lengths is None, s.weights is None) for s in staged)
        if (found := self._shapes.get(key)) is None:
            if captures:
                raise ModuleError("a call of new shapes cannot be captured; call the module once with these shapes before")
            found = self._shapes[key] = self._new_shape(staged)
            if len(self._shapes) > _SHAPES:
                self._shapes.popitem(last=False)
        self._shapes.move_to_end(key)
        return found

    def _new_shape(self, staged: Sequence[Staged]) -> _Shape:
        """Lays the lookups out over places that are apart from each other, so that each is found again in the layout's moves."""
        at, places, part_at = 0, [], {}
        for n, part in enumerate(_parts(staged)):
            part_at[n] = at
            at += part.numel() * 4 + 64
        number, out, out_places = iter(range(len(part_at))), 16, []
        for bound, s in zip(self._bound, staged, strict=True):
            ids_at = part_at[next(number)]
            lengths_at = -1 if s.lengths is None else part_at[next(number)]
            weights_at = -1 if s.weights is None else part_at[next(number)]
            places.append(Place(ids_at, s.ids.numel(), lengths_at, s.bag_length, s.bags, weights_at, out))
            out_places.append(out)
            vectors = s.ids.numel() if bound.pooling is Pooling.NONE else s.bags
            out += -(-vectors * bound.table.dim * 4 // 16) * 16 + 64
        plan = self._planner.plan(np.array(places, np.int64).tobytes())
        assert isinstance(plan, GpuPlan)
        moves_out = {m.target: m.source for m in _moves(plan.layout.moves_out)}
        return _Shape(
            self._backend.prepare(plan),
            _order(part_at, plan.layout.moves_in),
            [moves_out.get(o, 0 if moves_out else o) for o in out_places],
        )

    def _inputs(self, shape: _Shape, staged: Sequence[Staged]) -> torch.Tensor:
        parts, zeros = _parts(staged), torch.zeros(2, dtype=torch.int32, device=self._backend.device)
        found = [t for n, gap in shape.parts for t in ((zeros[:gap], parts[n]) if gap else (parts[n],))]
        packed = torch.cat(found) if found else zeros
        return packed.view(torch.uint8)

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._backend.device)

    def _vectors(self, outputs: torch.Tensor, at: int, one: Staged, given: Given) -> torch.Tensor:
        shape = (*given.values.shape, one.table.dim) if given.form is Form.IDS else (one.bags, one.table.dim)
        size = int(np.prod(shape)) * _PRECISIONS[self._output].bytes
        return outputs[at : at + size].view(self._output).view(shape) if size else outputs.new_empty(shape, dtype=self._output)


def _identity(given: Sequence[Given]) -> list[Any]:
    """Which tensors a call has, and how often they were changed."""
    tensors = [t for one in given for t in (one.values, one.bags, one.weights)]
    return [None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype, t._version) for t in tensors]


def _parts(staged: Sequence[Staged]) -> list[torch.Tensor]:
    """The tensors of a call as int32: ids, lengths and weights of each feature, where it has them."""
    return [t.view(torch.int32) for s in staged for t in (s.ids, s.lengths, s.weights) if t is not None]


def _moves(moves: bytes) -> list[Move]:
    return [Move(*row) for row in np.frombuffer(moves, np.int64).reshape(-1, len(Move._fields)).tolist()]


def _order(part_at: dict[int, int], moves_in: bytes) -> list[tuple[int, int]]:
    """(part, int32 zeros before it) in the order of the input buffer."""
    number, order, end = {at: n for n, at in part_at.items()}, [], 0
    for m in sorted(_moves(moves_in), key=lambda m: m.target):
        if m.bytes:
            order.append((number[m.source], (m.target - end) // 4))
            end = m.target + m.bytes
    return order
