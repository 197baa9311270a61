"""Moves embedding weights out of GPU memory while a model's dense part needs the room, and back before use.
    restore = stash_embedding_weights(model.embeddings, stream)  # after the lookup
    pooled.register_hook(restore)                                # back before their backward
For weights that change, as in training. Tables that a worker serves use `GpuBackend.stash` instead: their
host copy lies in the segment. After "Embedding Memory Stashing" (section 7: when to free, when to come back).
The CPU never waits. Weights freed at once may still be read by the copy; the caching allocator reuses their
memory when the host sees the copy done, so a host far ahead of its GPU takes other memory. Weights freed
later (`free_at`) are free in stream order: that stream waits for the rest of the copy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from tableside.quant.stash.find import modules_of, more_weights, tensors_of
from tableside.quant.stash.guard import Guard, StashError
from tableside.quant.stash.registry import StashRegistry, Weights
from tableside.quant.stash.transfers import Transfer

__all__ = ["Restore", "StashError", "points", "registry", "stash_embedding_weights"]

registry = (
    StashRegistry()
)  # of this process; `registry.close()` brings everything back and ends its watch over optimizers


def stash_embedding_weights(
    modules: torch.nn.Module | Iterable[torch.nn.Module],
    stream: "torch.cuda.Stream | None" = None,
    *,
    back_stream: "torch.cuda.Stream | None" = None,
    most_bytes: int | None = None,
    frees: bool = True,
) -> "Restore":
    """Copies the embedding weights in `modules` to page-locked memory, after the current stream's work, and
    frees them. Finds nn.EmbeddingBag, nn.Embedding and modules with `weights_dev` (FBGEMM's). stream: copies;
    None: a new one. back_stream: copies them back; None: that of the copies out. most_bytes: takes only the
    largest weights that fit. frees False: the result's `free` or `free_at` frees them. Call the result, or
    register it as a hook, to restore the weights. They also return when one of `modules` that uses them is
    called, on state_dict and load_state_dict, and before a step of their optimizer. Nothing else may touch
    them while away: other modules that share them, copy.deepcopy and pickling find no memory. StashError: no
    such weights, already stashed, cannot be freed, or no host memory; nothing has changed then."""
    given = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
    names = ", ".join(type(m).__name__ for m in given) or "no module"
    found = embedding_weights(given)
    if not found:
        raise StashError(
            f"{names}: no embedding weights; expected nn.EmbeddingBag, nn.Embedding or a module with "
            "weights_dev"
        )
    for w in found:
        if (before := registry.holder(w.storage)) is not None and before.is_out:
            raise StashError(
                f"weights of {type(w.users[0]).__name__} are stashed already; restore them first"
            )
    chosen = _largest(found, most_bytes)
    if not chosen:
        smallest = min(w.bytes for w in found)
        raise StashError(
            f"{names}: no weights of {most_bytes:,} bytes or less; the smallest are {smallest:,}; raise "
            "most_bytes"
        )
    for w in chosen:
        if w.bytes != w.tensor.numel() * w.tensor.element_size():
            raise StashError(
                f"{w.description} are a part of a larger storage, which others use; give them memory of "
                "their own"
            )
        if not w.storage.resizable():
            raise StashError(
                f"{w.description} lie in memory that torch did not allocate (numpy's, shared); it cannot be "
                "freed"
            )
    return Restore(chosen, stream, back_stream, frees)


def embedding_weights(modules: Sequence[torch.nn.Module]) -> list[Weights]:
    """Returns all embedding weights that take memory, each with its modules. Weights that share memory are
    one."""
    found: dict[int, Weights] = {}
    searched = list(modules_of(modules))
    for module in searched:
        is_embedding = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        tensor = module.weight if is_embedding else getattr(module, "weights_dev", None)
        for w in (tensor, *more_weights(module)):
            if isinstance(w, torch.Tensor) and (
                w.untyped_storage().nbytes() or registry.holder(w.untyped_storage())
            ):
                found.setdefault(w.untyped_storage()._cdata, Weights(w))
    for module in searched:
        for storage in {t.untyped_storage()._cdata for t in tensors_of(module)} & found.keys():
            found[storage].users.append(module)
    return list(found.values())


def _largest(found: list[Weights], most_bytes: int | None) -> list[Weights]:
    left = sum(w.bytes for w in found) if most_bytes is None else most_bytes
    chosen = []
    for w in sorted(found, key=lambda w: w.bytes, reverse=True):
        if w.bytes <= left:
            chosen.append(w)
            left -= w.bytes
    return chosen


class Restore:
    """Stashed weights going out, away, or coming back. Calling it, also as a hook, is `start` then `wait`.
    is_out: not on their way back yet."""

    def __init__(
        self,
        weights: list[Weights],
        stream: "torch.cuda.Stream | None",
        back_stream: "torch.cuda.Stream | None",
        frees: bool,
    ) -> None:
        self._weights = weights
        self.bytes = sum(w.bytes for w in weights)
        devices = {w.device for w in weights if w.device.type == "cuda"}
        given = {s.device for s in (stream, back_stream) if s is not None}
        if len(devices) > 1 or (devices and given - devices):
            named = ", ".join(sorted(str(d) for d in devices))
            raise StashError(
                f"the weights lie on {named}; stash those of each GPU on their own, with a stream of that GPU"
            )
        self._device = next(iter(devices), None)
        self._stream = stream if devices else None
        if self._stream is None and self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._back_stream = back_stream if devices and back_stream is not None else self._stream
        self._copied: Transfer | None = None
        self._back: Transfer | None = None
        self.is_out = False
        self.on_start: Callable[[], None] | None = None  # called when the weights begin to come back
        self._hooks: list[Any] = []
        self._guards: list[Guard] = []
        registry.lend_host_copies(weights)
        for w in weights:
            if (before := registry.holder(w.storage)) is not None:
                before()  # which was on its way back
                before.remove_hooks()
        try:
            self._copy_out()
            if frees:
                self._free_now()
        except RuntimeError as error:
            self()
            raise StashError(
                f"{self.bytes:,} bytes of weights could not be stashed, and are in their place: {error}"
            ) from error

    # ---- out ----

    def _copy_out(self) -> None:
        with self._copying("out", self.bytes, self._stream) as self._copied:
            for w in self._weights:
                assert w.host is not None
                w.host.copy_(w.seen(), non_blocking=True)
        self.is_out = True
        for w in self._weights:
            registry.hold(self, w)
            self._guards.append(Guard(w.description, w.storage._cdata, w.users, self))
            for user in w.users:
                self._hooks += [
                    user.register_forward_pre_hook(lambda *_: self()),
                    user.register_state_dict_pre_hook(lambda *_: self()),  # type: ignore[no-untyped-call]
                    user.register_load_state_dict_pre_hook(lambda *_: self()),  # type: ignore[no-untyped-call]
                ]

    def _free_now(self) -> None:
        """Frees all weights, and tells the allocator that the copy still reads them."""
        for w in self._weights:
            if self._stream is not None:
                w.seen().record_stream(self._stream)
            w.storage.resize_(0)
            w.is_freed = True

    def free(self, *_: Any, fraction: float = 1.0) -> None:
        """Frees this fraction of the bytes for later work on the current stream, which waits for the copy
        out."""
        left = fraction * self.bytes - sum(w.bytes for w in self._weights if w.is_freed)
        for w in self._weights:
            if self.is_out and not w.is_freed and left > 0:
                assert self._copied is not None
                self._copied.wait()
                if self._device is not None:  # it may have been allocated for another stream
                    w.seen().record_stream(torch.cuda.current_stream(self._device))
                w.storage.resize_(0)
                w.is_freed = True
                left -= w.bytes

    def free_at(self, *modules: torch.nn.Module) -> None:
        """Frees when `modules` are called, before they run; each of n modules frees 1/n of the bytes."""
        for n, module in enumerate(modules):
            self._hooks.append(
                module.register_forward_pre_hook(partial(self.free, fraction=(n + 1) / len(modules)))
            )

    # ---- back ----

    def start(self, *_: Any) -> None:
        """Begins to restore the weights after the current stream's work; the stream does not wait.
        StashError: no room; weights that were away still are; make room and call again."""
        if not self.is_out:
            return
        if self.on_start is not None:
            self.on_start()
        away = [w for w in self._weights if w.is_freed]
        grown: list[Weights] = []
        for w in away:
            try:
                w.storage.resize_(w.bytes)
                grown.append(w)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                for back in grown:
                    back.storage.resize_(0)
                raise StashError(
                    f"{sum(w.bytes for w in away):,} bytes of embedding weights have no room on {w.device}; "
                    "the host's copy is "
                    f"whole: make room, and restore again ({str(error).splitlines()[0]})"
                ) from error
        assert self._copied is not None
        with torch.cuda.stream(self._back_stream):
            self._copied.wait()
        with self._copying("back", sum(w.bytes for w in away), self._back_stream) as self._back:
            for w in away:
                assert w.host is not None
                w.seen().copy_(w.host, non_blocking=True)
                w.is_freed = False
        self.is_out = False

    def wait(self, *_: Any) -> None:
        """Makes the current stream wait for the weights; the CPU does not. Every stream that uses them must
        call this."""
        self.start()
        for transfer in self.transfers:  # who changes them next must not change what is being copied out
            transfer.wait()
        for guard in self._guards:
            guard.is_away = False
        for w in self._weights:  # they may have been stashed again meanwhile
            if (holder := registry.holder(w.storage)) is not None and holder is not self and holder.is_out:
                holder.wait()

    def __call__(self, *_: Any) -> None:
        """Calls `start`, then `wait`; ignores hook arguments. A second call does nothing."""
        self.wait()

    @property
    def transfers(self) -> list[Transfer]:
        """The copy out and the last copy back, as far as they began."""
        return [t for t in (self._copied, self._back) if t is not None]

    @property
    def bytes_away(self) -> int:
        """Bytes of these weights that have no memory now."""
        return sum(w.bytes for w in self._weights if w.is_freed)

    def finish(self, timeout_s: float) -> None:
        """The host waits for the copies that are under way. StashError: one takes longer than `timeout_s`."""
        for transfer in self.transfers:
            transfer.finish(timeout_s)

    def start_at(self, tensor: torch.Tensor) -> None:
        """Starts when the gradient of `tensor` is known. Choose an activation whose backward runs at least
        one copy duration before the embedding's (`points`)."""
        tensor.register_hook(self.start)  # type: ignore[no-untyped-call]

    def wait_at(self, *outputs: torch.Tensor) -> None:
        """Waits when the gradient of a lookup's output is known, just before the weights' backward."""
        for tensor in outputs:
            tensor.register_hook(self.wait)  # type: ignore[no-untyped-call]

    def remove_hooks(self) -> None:
        """Removes module hooks and guards. Not from within a hook: torch is iterating over them."""
        for hook in self._hooks:
            hook.remove()
        for guard in self._guards:
            guard.remove()
        self._hooks.clear()
        self._guards.clear()

    def let_go(self) -> None:
        """Brings the weights back, and drops their hooks, guards and host copies. As `remove_hooks`."""
        self()
        self.remove_hooks()
        registry.drop_host_copies(self._weights)

    @contextmanager
    def _copying(self, direction: str, nbytes: int, stream: "torch.cuda.Stream | None") -> Iterator[Transfer]:
        """Copies on a stream, after the current stream's work. A stream of None: on the host."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
            transfer = Transfer(direction, nbytes, stream, registry.totals)
            yield transfer
            transfer.enqueued()


def points(forward_ms: Sequence[float], backward_ms: Sequence[float], copy_ms: float) -> tuple[int, int]:
    """Returns (free at, start at), the layers of a dense part for a copy of `copy_ms`. forward_ms,
    backward_ms: of each layer. Free at the first layer that begins after the copy out. Start at the first
    layer whose backward, with that of all layers before it, lasts as long as the copy back. Too short a dense
    part gives the last layer for both."""
    last = len(forward_ms) - 1
    free_at = next((n for n, done in enumerate(accumulate(forward_ms, initial=0.0)) if done >= copy_ms), last)
    start_at = next((n for n, done in enumerate(accumulate(backward_ms)) if done >= copy_ms), last)
    return min(free_at, last), start_at
