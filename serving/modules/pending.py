"""Calls on a GPU whose ids were not yet found right: nobody waits for the device, so a wrong id is said later.

Each call leaves its flags here, with an event behind its kernels. The next call of the same source looks at those that are done,
and raises for the first one that was wrong; `check` waits for all. A call's tables stay until it is done.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tableside.quant import BadIds
from tableside.quant.contract import RowSource, rows_of
from tableside.serving.modules.errors import BadFeatureIds

_MOST = 256  # calls that are looked at later; beyond, the oldest is waited for


class Staged(NamedTuple):
    """One feature's inputs on the device. lengths None: bags of `bag_length` ids, or an id each."""

    name: str
    table: RowSource
    ids: torch.Tensor
    lengths: torch.Tensor | None
    bag_length: int
    bags: int
    weights: torch.Tensor | None


class _Call(NamedTuple):
    flags: torch.Tensor  # on the host, once the event is done
    event: Any  # None: it is done
    staged: Sequence[Staged]
    held: object  # what its kernels read


class Pending:
    """The calls of one source, oldest first. Any thread may call."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._error: BadFeatureIds | None = None

    def add(self, flags: torch.Tensor, staged: Sequence[Staged], held: object) -> None:
        """Takes a call that was just launched on the current stream. flags: int32 [jobs], on its device."""
        event = None
        if flags.is_cuda:
            on_host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            flags = on_host.copy_(flags, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        with self._lock:
            self._calls.append(_Call(flags, event, staged, held))
        if len(self._calls) > _MOST:
            self.sweep(least=len(self._calls) - _MOST)

    def sweep(self, least: int = 0) -> None:
        """Looks at the calls that are done, and waits for the `least` oldest ones. What is wrong is kept for `raise_first`."""
        while self._calls:
            with self._lock:
                if not self._calls or not (least > 0 or self._calls[0].event is None or self._calls[0].event.query()):
                    return
                call = self._calls.popleft()
            least -= 1
            if call.event is not None:
                call.event.synchronize()
            if self._error is None and bool(call.flags.any()):
                self._error = _problem(call.staged)

    def raise_first(self) -> None:
        """BadFeatureIds: a call that is done had a wrong id or length."""
        if self._calls:
            self.sweep()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def check(self) -> None:
        """As `raise_first`, after waiting for all calls."""
        self.sweep(least=len(self._calls))
        self.raise_first()


def _problem(staged: Sequence[Staged]) -> BadFeatureIds:
    """The first id or length that is wrong, named."""
    for one in staged:
        lengths = None if one.lengths is None else one.lengths.cpu().numpy()
        try:
            rows_of(one.table, one.ids.cpu().numpy(), lengths)
        except BadIds as error:
            return BadFeatureIds(one.name, error)
    raise RuntimeError("the device refused ids that are right; the driver, the device or the kernel is at fault")
