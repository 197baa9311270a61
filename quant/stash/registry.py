"""A process's stashed embedding weights: their host copies and their holders."""

import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from tableside.quant.stash.guard import StashError
from tableside.quant.stash.transfers import StashCounts

if TYPE_CHECKING:
    from tableside.quant.stash.stash import Restore


class Weights:
    """The storage of some embedding weights, the host's copy of it, and the modules that use it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.device = tensor, tensor.device
        self.storage = tensor.untyped_storage()
        self.bytes = self.storage.nbytes()
        self.users: list[torch.nn.Module] = []
        self.host: torch.Tensor | None = None
        self.is_freed = False

    @property
    def description(self) -> str:
        return f"weights of {type(self.users[0]).__name__}, {self.bytes:,} bytes,"

    def seen(self) -> torch.Tensor:
        """Returns the storage as uint8 [bytes], a separate tensor so that autograd's version counters do not
        move."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(
            self.storage, 0, (self.bytes,), (1,)
        )


class StashRegistry:
    """Host copies and holders of weights, and counts. While it watches, an optimizer's step first restores
    its weights. Holders are weak references: a dropped `Restore` is forgotten. `close` ends the watch."""

    def __init__(self) -> None:
        self._host_copies = WeakTensorKeyDictionary()
        self._holders: dict[int, weakref.ref[Any]] = {}  # the last holder of each storage, while it lives
        self._watch: Any = None
        self.totals = StashCounts()  # without what is now

    def counts(self) -> StashCounts:
        """Returns totals so far and what is away now. `wait_s`: of finished waits."""
        self.totals.collect()
        holders = [holder for reference in self._holders.values() if (holder := reference()) is not None]
        away = sum(holder.bytes_away for holder in {id(h): h for h in holders}.values())
        held = sum(host.numel() for host in self._host_copies.values())  # type: ignore[no-untyped-call]
        return replace(self.totals, bytes_away=away, host_bytes=held)

    def holder(self, storage: torch.UntypedStorage) -> "Restore | None":
        """The last one that had a storage."""
        reference = self._holders.get(storage._cdata)
        return None if reference is None else reference()

    def hold(self, holder: "Restore", weights: Weights) -> None:
        """Notes who has these weights, and watches optimizers from now on."""
        storage = weights.storage._cdata
        self._holders[storage] = weakref.ref(holder, partial(self._forget, storage))
        if self._watch is None:
            self._watch = register_optimizer_step_pre_hook(self._before_step)

    def lend_host_copies(self, weights: list[Weights]) -> None:
        """Gives each of the weights its host copy. StashError: host memory is full; no new copy is kept."""
        new = [w for w in weights if w.tensor not in self._host_copies]
        try:
            for w in weights:
                w.host = self.host_copy(w)
        except StashError:
            self.drop_host_copies(new)
            raise

    def drop_host_copies(self, weights: list[Weights]) -> None:
        for w in weights:
            w.host = None
            self._host_copies.pop(w.tensor, None)  # type: ignore[no-untyped-call]

    def host_copy(self, weights: Weights) -> torch.Tensor:
        """Returns the page-locked copy of weights, uint8 [bytes], the same each time. StashError: no host
        memory."""
        host: torch.Tensor | None = self._host_copies.get(weights.tensor)  # type: ignore[no-untyped-call]
        if host is None or host.numel() != weights.bytes:
            is_cuda = weights.device.type == "cuda"
            try:
                with torch.inference_mode(False):
                    host = torch.empty(weights.bytes, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise StashError(
                    f"the host has no {weights.bytes:,} bytes to page-lock for embedding weights ({reason}); "
                    "stash less (most_bytes), or let other processes of this host lock less"
                ) from error
            self._host_copies[weights.tensor] = host
        return host

    def close(self) -> None:
        """Restores all weights, drops the host copies and ends the watch; stashing may begin anew.
        StashError: no room for some weights; they stay out, and the registry stays open."""
        for reference in list(self._holders.values()):
            if (holder := reference()) is not None:
                holder()
                holder.remove_hooks()
        self._holders.clear()
        self._host_copies = WeakTensorKeyDictionary()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _forget(self, storage: int, reference: "weakref.ref[Any]") -> None:
        if self._holders.get(storage) is reference:
            del self._holders[storage]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Brings back what an optimizer is about to change."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (holder := self.holder(parameter.untyped_storage())) is not None:
                    holder()
