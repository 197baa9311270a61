"""Stashes in every training step by hooks alone, at points found over the first steps.
    stashing = TrainingStash(model, layers=model.over.layers)  # then train as before; `remove` ends it
Copies weights out after each lookup and restores them before its backward. Lookups are embedding modules and,
in TorchRec's sharded collections, what `compute_and_output_dist` calls before it distributes the output. With
DistributedModelParallel or a pipeline weights leave right after the lookup; a hook on its output restores
them. The first steps free at once and restore on demand, while they are timed. Then `points` chooses the
layers of the dense part at which to free and to start restoring."""

import operator
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from tableside.quant.stash.find import lookups_in
from tableside.quant.stash.guard import StashError
from tableside.quant.stash.stash import Restore, embedding_weights, stash_embedding_weights

MARGIN = 1.1  # a restore begins this much earlier than one copy's duration, at least


class StashPoints(NamedTuple):
    """Indices of `layers`: weights go before `free_at` runs and return from the gradient of `start_at`'s
    output; None: they go at once and return on demand. out_ms, back_ms: longest copies of a watched step, all
    together. needed_by: what first needed weights in the last one. share: of the bytes whose copies end in
    time."""

    free_at: int | None
    start_at: int | None
    out_ms: float
    back_ms: float
    needed_by: str
    share: float


@dataclass
class _WatchedStep:
    """Times of a step: each layer's forward start and gradient, the weights' leaving and first need."""

    restores: list[Restore] = field(default_factory=list)
    left: Any = None
    forward: dict[int, Any] = field(default_factory=dict)
    backward: dict[int, Any] = field(default_factory=dict)
    needed: Any = None
    needed_by: str = ""


class TrainingStash:
    """Stashes the weights of all lookups of `model` in each step. `remove` restores them and ends it.
    layers: of the dense part, in order; none: free at once, restore on demand. stream: copies, such as a
    pipeline's memcpy stream; None: one a lookup. back_stream: copies back; None: that of the copies out.
    most_bytes: takes only the largest weights that fit; "auto": those whose copies end in time, once `points`
    are known. timeout_s: a slower copy is a StashError at the next lookup.
    Passes without gradients and ranks without shards stash nothing. StashError: no embeddings, or TorchRec's
    own stashing is on."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[torch.nn.Module] = (),
        *,
        stream: "torch.cuda.Stream | None" = None,
        back_stream: "torch.cuda.Stream | None" = None,
        most_bytes: int | Literal["auto"] | None = None,
        watch_steps: int = 3,
        timeout_s: float | None = None,
    ) -> None:
        if _torchrec_stashes():
            raise StashError(
                "TorchRec stashes these weights already (MemoryStashingManager); use its pipelines or this, "
                "not both"
            )
        self.points: StashPoints | None = None
        self._layers, self._timeout_s, self._watch_steps = list(layers), timeout_s, watch_steps
        self._streams, self._is_auto = (stream, back_stream), most_bytes == "auto"
        self._watched: list[_WatchedStep] = []
        self._step, self._before = _WatchedStep(), _WatchedStep()
        self._now = ""  # the hook that ran last
        self._device = torch.device("cpu")
        if self._is_auto and not self._layers:
            raise StashError('most_bytes="auto" needs `layers`: it takes what their time hides')
        lookups = lookups_in(model)
        if not lookups:
            raise StashError(
                f"{type(model).__name__} has no embeddings; expected embedding modules or TorchRec's sharded "
                "collections"
            )
        self.lookups = {name: lookup for name, lookup in lookups.items() if embedding_weights([lookup])}
        self._sizes = sorted(
            ((w.bytes, n) for n, lookup in self.lookups.items() for w in embedding_weights([lookup])),
            reverse=True,
        )
        self._total = sum(size for size, _ in self._sizes)
        limit = self._total if most_bytes is None or self._is_auto else _bytes_of(most_bytes)
        self._bytes = self._most_of_each(limit)
        if self.lookups and not any(self._bytes.values()):
            raise StashError(
                f"no weights of {limit:,} bytes or less; the smallest are {self._sizes[-1][0]:,}; raise "
                "most_bytes"
            )
        self._hooks: list[Any] = [
            lookup.register_forward_hook(lambda _m, _i, output, name=name: self._after(name, output))
            for name, lookup in self.lookups.items()
        ]
        for n, layer in enumerate(self._layers):
            self._hooks.append(layer.register_forward_pre_hook(lambda _m, _i, n=n: self._enters(n)))
            self._hooks.append(
                layer.register_forward_hook(lambda _m, _i, output, n=n: self._leaves(n, output))
            )

    def remove(self) -> None:
        """Brings all weights back, and removes the hooks. Not to be called from within a hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for restore in self._before.restores + self._step.restores:
            restore()
            restore.remove_hooks()

    # ---- hooks ----

    def _after(self, name: str, output: Any) -> None:
        """A lookup is done: its weights leave."""
        outputs = [o for o in _tensors(output) if o.requires_grad]
        if not outputs or not torch.is_grad_enabled():
            return
        if self._step.needed is not None:
            self._next_step()
        self._check_transfers()
        if not self._bytes[name]:
            return
        self._device = outputs[0].device
        free_at = None if self.points is None else self.points.free_at
        stream, back_stream = self._streams
        restore = stash_embedding_weights(
            self.lookups[name],
            stream,
            back_stream=back_stream,
            most_bytes=self._bytes[name],
            frees=free_at is None,
        )
        restore.on_start = self._is_needed
        if free_at is not None:
            restore.free_at(self._layers[free_at])
        self._step.restores.append(restore)
        self._step.left = self._mark()
        self._now = f"the forward of {name}"
        for tensor in outputs:
            tensor.register_hook(lambda _, name=name, restore=restore: self._is_back(name, restore))  # type: ignore[no-untyped-call]

    def _most_of_each(self, most_bytes: int) -> dict[str, int]:
        """Returns how many bytes each lookup may stash: the largest weights of all that fit together."""
        bytes_of = dict.fromkeys(self.lookups, 0)
        for size, name in self._sizes:
            if size <= most_bytes:
                bytes_of[name] += size
                most_bytes -= size
        return bytes_of

    def _is_back(self, name: str, restore: Restore) -> None:
        self._now = f"the gradient of {name}"
        restore.wait()

    def _is_needed(self) -> None:
        if self._step.needed is None:
            self._step.needed, self._step.needed_by = self._mark(), self._now or "a call"

    def _enters(self, layer: int) -> None:
        self._now = f"the forward of layer {layer}"
        self._step.forward.setdefault(layer, self._mark())

    def _leaves(self, layer: int, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._has_gradient(layer))  # type: ignore[no-untyped-call]

    def _has_gradient(self, layer: int) -> None:
        self._now = f"the gradient of layer {layer}"
        if self.points is not None and self.points.start_at == layer:
            for restore in self._step.restores:
                restore.start()
        self._step.backward.setdefault(layer, self._mark())

    def _check_transfers(self) -> None:
        if self._timeout_s is not None:
            for restore in self._before.restores + self._step.restores:
                for transfer in restore.transfers:
                    transfer.check(self._timeout_s)

    # ---- times ----

    def _mark(self) -> Any:
        """Returns an event of the current stream or the host's clock in ms; None once no step is watched."""
        if self.points is not None:
            return 0.0
        if self._device.type != "cuda":
            return 1000 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _next_step(self) -> None:
        if self.points is None and len(self._watched) < self._watch_steps:
            self._watched.append(self._step)
        if (
            self.points is None
            and len(self._watched) >= self._watch_steps
            and all(_is_over(step) for step in self._watched)
        ):
            self.points = _points_of([_times_of(step) for step in self._watched])
            self._watched.clear()
            if self._is_auto:
                self._bytes = self._most_of_each(int(self.points.share * self._total))
                for restore in self._step.restores:  # of lookups that stash no more, too
                    restore.let_go()
        self._step, self._before, self._now = _WatchedStep(), self._step, ""


def _bytes_of(limit: Any) -> int:
    """StashError: it is no number of bytes."""
    try:
        return operator.index(int(limit) if isinstance(limit, float) else limit)
    except (TypeError, ValueError, OverflowError) as error:
        what = f'most_bytes is {limit!r}; expected a number of bytes, None or "auto"'
        raise StashError(what) from error


class StepTimes(NamedTuple):
    """One step in ms. forward: layer -> start, since the weights left. backward: layer -> time from its
    gradient to the weights' first need. out, back: all copies together."""

    forward: dict[int, float]
    backward: dict[int, float]
    out: float
    back: float
    needed_by: str


def _points_of(steps: Sequence[StepTimes]) -> StashPoints:
    """Returns the first layer that begins after the copies out, and the latest with time for those back, by
    the worst step; the closest layer if none fits."""
    out, back = max(s.out for s in steps), max(s.back for s in steps)
    begins = {
        n: min(s.forward[n] for s in steps) for n in steps[0].forward if all(n in s.forward for s in steps)
    }
    leads = {
        n: min(s.backward[n] for s in steps) for n in steps[0].backward if all(n in s.backward for s in steps)
    }
    in_time = [n for n in leads if leads[n] >= MARGIN * back]
    shares = (max(begins.values(), default=0.0), out), (max(leads.values(), default=0.0), MARGIN * back)
    return StashPoints(
        next(
            (n for n in sorted(begins, key=lambda n: begins[n]) if begins[n] >= out),
            max(begins, key=lambda n: begins[n], default=None),
        ),
        min(in_time, key=lambda n: leads[n]) if in_time else max(leads, key=lambda n: leads[n], default=None),
        out,
        back,
        steps[-1].needed_by,
        min([1.0, *(time / copy for time, copy in shares if copy)]),
    )


def _times_of(step: _WatchedStep) -> StepTimes:
    copies = [[t.copy_ms() or 0.0 for t in restore.transfers] for restore in step.restores]
    return StepTimes(
        {n: _ms(step.left, began) for n, began in step.forward.items()},
        {n: _ms(known, step.needed) for n, known in step.backward.items()},
        sum(c[0] for c in copies),
        sum(c[1] for c in copies if len(c) > 1),
        step.needed_by,
    )


def _ms(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else float(begin.elapsed_time(end))


def _is_over(step: _WatchedStep) -> bool:
    """All its events have happened. The host does not wait."""
    marks = (step.left, step.needed, *step.forward.values(), *step.backward.values())
    return all(isinstance(m, float) or m.query() for m in marks) and all(
        t.is_done() for r in step.restores for t in r.transfers
    )


def _torchrec_stashes() -> bool:
    """TorchRec's own stashing is turned on, as by its pipelines for it."""
    module = sys.modules.get("torchrec.distributed.memory_stashing")
    return module is not None and bool(module.MemoryStashingManager.is_enabled())


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors(part)
