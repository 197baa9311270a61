"""Guards for stashed weights against readers that do not call their module.
`copy.deepcopy` and pickling would read unmapped storage and crash, so they raise StashError. Methods that
read weights (`Module.to`, FBGEMM's `flush`, `prefetch` and views by table) restore them first."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tableside.quant.errors import QuantError
from tableside.quant.stash.find import tensors_of

if TYPE_CHECKING:
    from tableside.quant.stash.stash import Restore


class StashError(QuantError):
    """Weights cannot be stashed, or cannot come back yet; none is lost."""


COPIES = ("__deepcopy__", "__reduce_ex__")  # what copy.deepcopy and the picklers look up on an object itself
READERS = (
    "_apply",  # of nn.Module: to, cuda, half, share_memory
    "prefetch",
    "flush",
    "split_embedding_weights",
    "reset_cache_states",
    "init_embedding_weights_uniform",
)
_GUARDS = "_stash_guards"


class Guard:
    """Guards weights on their modules and tensors until `remove`; an object may have several guards.
    what: the weights in words. is_away: copies are refused; later a copy removes hooks and guards first."""

    def __init__(self, what: str, storage: int, users: list[torch.nn.Module], restore: "Restore") -> None:
        self.what, self.restore, self.is_away = what, restore, True
        self._guarded: list[Any] = []
        for user in users:
            for guarded in (user, *(t for t in tensors_of(user) if t.untyped_storage()._cdata == storage)):
                if not any(g is guarded for g in self._guarded):
                    self._stand_before(guarded)

    def _stand_before(self, guarded: Any) -> None:
        state = vars(guarded)
        self._guarded.append(guarded)
        guards = state.setdefault(_GUARDS, [])
        guards.append(self)
        if len(guards) > 1:
            return
        for name in COPIES:
            state[name] = _copied_without(guards, guarded, name)
        for name in READERS if isinstance(guarded, torch.nn.Module) else ():
            if name not in state and hasattr(guarded, name):
                state[name] = _back_first(guards, getattr(guarded, name))

    def remove(self) -> None:
        """Objects that no other guard stands before are as they were."""
        for guarded in self._guarded:
            state = vars(guarded)
            guards = state[_GUARDS]
            guards.remove(self)
            if not guards:
                ours = [name for name in READERS if getattr(state.get(name), _GUARDS, None) is guards]
                for name in (*COPIES, *ours, _GUARDS):
                    del state[name]
        self._guarded.clear()


def _copied_without(guards: list[Guard], guarded: Any, name: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        for guard in guards:
            if guard.is_away:
                raise StashError(
                    f"{guard.what} are stashed, and cannot be copied or pickled; call what "
                    "stash_embedding_weights returned first"
                )
        for guard in list(guards):
            guard.restore.remove_hooks()
        return copy.deepcopy(guarded, *args) if name == "__deepcopy__" else getattr(guarded, name)(*args)

    return run


def _back_first(guards: list[Guard], method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        for guard in list(guards):
            guard.restore()
        return method(*args, **kwargs)

    setattr(run, _GUARDS, guards)
    return run
