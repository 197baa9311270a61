"""Embedding weights out of a GPU's memory while a model's dense part needs the room, and back before they are used.

    restore = stash_embedding_weights(model.embeddings, stream)   # after their lookup: copies to page-locked memory, on `stream`
    pooled.register_hook(restore)                                 # back before their backward

For weights that change, as in a training step. Those that a worker serves do not: their host copy lies in the segment, and
`quant.fused.Fused.stash` needs none. After "Embedding Memory Stashing" (its section 7: when to free, when to come back).

Nothing waits on the CPU. Where memory is freed at once, the caching allocator is told that the copy reads it, and gives it to
others when the copy is done, as far as the host knows by then; a host that runs far ahead of its GPU takes other memory instead.
Freed at a later point (`free_at`), it is anybody's in the order of the stream, which waits there for what is left of the copy.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from serving.errors import ServingError


class StashError(ServingError):
    """Weights cannot be stashed, or cannot come back yet; none is lost."""


class _Weights:
    """The storage of some embedding weights, and the host's copy of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self.storage = tensor.untyped_storage()
        self.bytes = self.storage.nbytes()
        self.host: torch.Tensor | None = None
        self.is_freed = False

    def seen(self) -> torch.Tensor:
        """The storage as uint8 [bytes]: a tensor of its own, so that no version counter of autograd's moves."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage, 0, (self.bytes,), (1,))


_host_copies, _stashed = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()  # by weights: theirs; the `Restore` that has them


def stash_embedding_weights(
    modules: torch.nn.Module | Iterable[torch.nn.Module],
    stream: "torch.cuda.Stream | None" = None,
    *,
    most_bytes: int | None = None,
    frees: bool = True,
) -> "Restore":
    """Copies the embedding weights in `modules` to page-locked memory, after what is on the current stream, and frees theirs.

    modules: one or several; nn.EmbeddingBag, nn.Embedding and modules with `weights_dev` (FBGEMM's) are found in them. stream:
    copies; None: one of its own. most_bytes: the largest weights that are no more than this together. frees: False: the memory is
    freed by the result's `free` or at its `free_at`. Returns what brings them back: call it, or register it as a hook.

    A module whose weights are away brings them back by itself when it is called, saved or loaded. StashError: there are none,
    some are stashed already, or the host has no memory for them; then all are as before.
    """
    given = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
    found = _embedding_weights(given)
    if not found:
        names = ", ".join(type(m).__name__ for m in given) or "no module"
        raise StashError(f"{names}: no embedding weights; expected nn.EmbeddingBag, nn.Embedding or a module with weights_dev")
    if away := [owner for owner, tensor in found if tensor in _stashed]:
        raise StashError(f"weights of {len(away)} modules ({type(away[0]).__name__}) are stashed already; restore them first")
    chosen = _largest(found, most_bytes)
    return Restore(chosen, stream, frees)


def _embedding_weights(modules: Sequence[torch.nn.Module]) -> list[tuple[torch.nn.Module, torch.Tensor]]:
    """(module, tensor) of all embedding weights that take memory; of several that share theirs, the first."""
    found: dict[int, tuple[torch.nn.Module, torch.Tensor]] = {}
    for module in modules:
        for owner in module.modules():
            is_embedding = isinstance(owner, torch.nn.Embedding | torch.nn.EmbeddingBag)
            tensor = owner.weight if is_embedding else getattr(owner, "weights_dev", None)
            if isinstance(tensor, torch.Tensor) and (tensor in _stashed or tensor.untyped_storage().nbytes()):
                found.setdefault(tensor.untyped_storage()._cdata, (owner, tensor))
    return list(found.values())


def _largest(
    found: list[tuple[torch.nn.Module, torch.Tensor]], most_bytes: int | None
) -> list[tuple[torch.nn.Module, torch.Tensor]]:
    left = sum(t.untyped_storage().nbytes() for _, t in found) if most_bytes is None else most_bytes
    chosen = []
    for owner, tensor in sorted(found, key=lambda pair: pair[1].untyped_storage().nbytes(), reverse=True):
        if (size := tensor.untyped_storage().nbytes()) <= left:
            chosen.append((owner, tensor))
            left -= size
    return chosen


class Restore:
    """Stashed weights on their way out, away, or on their way back. Callable, as a hook too: `start`, then `wait`.

    bytes: of the weights that it has.
    """

    def __init__(
        self, found: list[tuple[torch.nn.Module, torch.Tensor]], stream: "torch.cuda.Stream | None", frees: bool
    ) -> None:
        self._tensors = [tensor for _, tensor in found]
        self._weights = [_Weights(tensor) for tensor in self._tensors]
        self.bytes = sum(w.bytes for w in self._weights)
        cuda = [w.device for w in self._weights if w.device.type == "cuda"]
        if len(set(cuda)) > 1:
            raise StashError(
                f"the weights lie on {', '.join(sorted({str(d) for d in cuda}))}; stash those of each GPU on their own"
            )
        self._device = cuda[0] if cuda else None
        self._stream = stream
        if stream is None and self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._copied: Any = None
        self._back: Any = None
        self._hooks: list[Any] = []
        self._owners = [owner for owner, _ in found]
        self._copy_out()
        if frees:
            self._free_now()

    # ---- out ----

    def _copy_out(self) -> None:
        for tensor, w in zip(self._tensors, self._weights, strict=True):
            w.host = _host_copy(tensor, w)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._on_stream():
            for w in self._weights:
                assert w.host is not None
                w.host.copy_(w.seen(), non_blocking=True)
            self._copied = self._mark()
        for owner, tensor in zip(self._owners, self._tensors, strict=True):
            _stashed[tensor] = self
            self._hooks += [
                owner.register_forward_pre_hook(lambda *_: self()),
                owner.register_state_dict_pre_hook(lambda *_: self()),  # type: ignore[no-untyped-call]
                owner.register_load_state_dict_pre_hook(lambda *_: self()),  # type: ignore[no-untyped-call]
            ]

    def _free_now(self) -> None:
        """Frees all, and tells the allocator what still reads it."""
        for w in self._weights:
            if self._stream is not None and w.device.type == "cuda":
                w.seen().record_stream(self._stream)
            w.storage.resize_(0)
            w.is_freed = True

    def free(self, *_: Any, share: float = 1.0) -> None:
        """Frees what is not yet free, or `share` of all, for what comes next on the current stream, which waits for the copy."""
        if self._copied is None or self._back is not None:
            return
        left = share * self.bytes - sum(w.bytes for w in self._weights if w.is_freed)
        for w in self._weights:
            if not w.is_freed and left > 0:
                self._wait_for(self._copied)
                w.storage.resize_(0)
                w.is_freed = True
                left -= w.bytes

    def free_at(self, *modules: torch.nn.Module) -> None:
        """Frees when `modules` are called, before they run: of n, each 1/n of the bytes."""
        for n, module in enumerate(modules):
            self._hooks.append(module.register_forward_pre_hook(partial(self.free, share=(n + 1) / len(modules))))

    # ---- back ----

    def start(self, *_: Any) -> None:
        """Begins to bring the weights back, after what is on the current stream; that does not wait.

        StashError: there is no room. What came is there, the rest is in the host's copies: make room, and call again.
        """
        if self._copied is None or self._back is not None:
            return
        away = [w for w in self._weights if w.is_freed]
        for w in away:
            try:
                w.storage.resize_(w.bytes)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                missing = sum(w.bytes for w in away if w.storage.nbytes() == 0)
                raise StashError(
                    f"{missing:,} bytes of embedding weights have no room on {w.device}; the host's copy is whole: make room, "
                    f"and restore again ({str(error).splitlines()[0]})"
                ) from error
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._on_stream():
            for w in away:
                assert w.host is not None
                w.seen().copy_(w.host, non_blocking=True)
                w.is_freed = False
            self._back = self._mark()

    def wait(self, *_: Any) -> None:
        """What comes next on the current stream finds the weights in their place; the CPU does not wait."""
        if self._copied is None:
            return
        self.start()
        self._wait_for(self._copied)  # who changes them next must not change what is being copied out
        self._wait_for(self._back)
        self._end()

    def __call__(self, *_: Any) -> None:
        """Brings the weights back: as `start` and `wait`. The arguments of hooks are not looked at. Again: nothing."""
        self.wait()

    def start_at(self, tensor: torch.Tensor) -> None:
        """Starts when the gradient of `tensor` is known: one of the dense part, as far behind the lookup as the copy takes."""
        tensor.register_hook(self.start)  # type: ignore[no-untyped-call]

    def wait_at(self, *outputs: torch.Tensor) -> None:
        """Waits when the gradient of a lookup's output is known, which is before the weights' backward."""
        for tensor in outputs:
            tensor.register_hook(self.wait)  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for tensor in self._tensors:
            _stashed.pop(tensor, None)  # type: ignore[no-untyped-call]
        self._copied = None

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._stream)  # of None: nothing

    def _mark(self) -> Any:
        if self._stream is None:
            return True
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _wait_for(self, event: Any) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def _host_copy(tensor: torch.Tensor, w: _Weights) -> torch.Tensor:
    """Page-locked memory for a tensor's storage, uint8 [bytes]: the same each time."""
    host: torch.Tensor | None = _host_copies.get(tensor)  # type: ignore[no-untyped-call]
    if host is None or host.numel() != w.bytes:
        try:
            host = torch.empty(w.bytes, dtype=torch.uint8, pin_memory=w.device.type == "cuda")
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise StashError(f"the host has no {w.bytes:,} bytes to page-lock for embedding weights ({reason})") from error
        _host_copies[tensor] = host
    return host


def points(forward_ms: Sequence[float], backward_ms: Sequence[float], copy_ms: float) -> tuple[int, int]:
    """Where a dense part of layers gives a copy of `copy_ms` its time: (the layer to free at, the layer to start at).

    forward_ms, backward_ms: of each layer, measured. The first is the earliest layer that begins when the copy out is done. The
    second is the earliest whose own backward and that of the layers before it last as long as the copy back. Where the dense part
    is too short: the last layer, both times.
    """
    last = len(forward_ms) - 1
    done = 0.0
    free_at = last
    for n, ms in enumerate(forward_ms):
        if done >= copy_ms:
            free_at = n
            break
        done += ms
    done = 0.0
    for n, ms in enumerate(backward_ms):
        done += ms
        if done >= copy_ms:
            return free_at, n
    return free_at, last
