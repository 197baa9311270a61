"""State of calls that may still run on a GPU: errors to report, versions to keep, and counts of ids without a
row. Nobody waits for the device: kernels report errors in host memory (`quant.gpu.reports`), and events keep
versions."""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tableside.quant.contract import Unfound
from tableside.serving.modules.inputs import BadFeatureIds, ModuleError

if TYPE_CHECKING:
    from tableside.quant.gpu.backend import GpuBackend
    from tableside.quant.gpu.reports import Reports, WrongInput


_FOLLOWED = 256  # counts on a device that are followed before those of lookups that are gone are added up


class PendingCalls:
    """State of one source's calls on a GPU. Any thread may call."""

    def __init__(self) -> None:
        self.reports: Reports | None = None
        self._retired: deque[tuple[list[Any], object]] = deque()
        self._lock = threading.Lock()

    def reports_of(self, backend: "GpuBackend") -> "Reports":
        """Returns the reports into which the source's kernels write errors."""
        from tableside.quant.gpu.reports import Reports

        with self._lock:
            if self.reports is None:
                self.reports = Reports(backend.launcher)
            return self.reports

    def retire(self, streams: list[Any], held: object) -> None:
        """Keeps memory read by kernels on these streams until they are done, or the process ends."""
        if streams and not sys.is_finalizing():
            self._retired.append(([stream.record_event() for stream in streams], held))

    def sweep(self) -> None:
        """Drops versions that no call reads any more."""
        with self._lock:
            while self._retired and all(event.query() for event in self._retired[0][0]):
                self._retired.popleft()

    def raise_first(self) -> None:
        """BadFeatureIds: a call that is done had a wrong id or length. ModuleError: or a wrong offset."""
        if self.reports is not None and self.reports.is_there and (wrong := self.reports.take()) is not None:
            raise _error(wrong)

    def check(self) -> None:
        """As `raise_first`, after waiting for all calls."""
        if self.reports is not None:
            self.reports.wait()
        self.raise_first()
        self.sweep()


def _error(wrong: "WrongInput") -> BadFeatureIds | ModuleError:
    if wrong.cause is not None:
        return BadFeatureIds(wrong.name, wrong.cause)
    number, value = wrong.offset
    expected = "expected 0, where the first bag begins" if number == 0 else "expected 0 or more"
    return ModuleError(f"feature {wrong.name!r}: the offset at position {number} is {value}; {expected}")


class _DeviceCounts(NamedTuple):
    """Counts of a lookup on a device. counts: int64 [names, 2]; lives: None once no call can add to them."""

    names: Sequence[str]
    counts: torch.Tensor
    lives: "weakref.ref[torch.Tensor]"


class Missing:
    """The counts of one source. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Unfound] = {}
        self._followed: list[_DeviceCounts] = []

    def add(self, names: Iterable[str], unfound: Iterable[Unfound]) -> None:
        """Counts a call. unfound: of each feature, as `Plan.run` returns it."""
        with self._lock:
            self._add(names, unfound)

    def follow(self, names: Sequence[str], counts: torch.Tensor) -> None:
        """Counts what a device's lookup adds to `counts`, int64 [names, 2], while another reference
        exists."""
        if not names:
            return
        with self._lock:
            if len(self._followed) >= _FOLLOWED:
                self._fold()
            self._followed.append(_DeviceCounts(names, counts.detach(), weakref.ref(counts)))

    def of(self, names: Iterable[str]) -> dict[str, Unfound]:
        """Returns the counts of these features. Waits for the device if one is counting."""
        with self._lock:
            self._fold()
            found = dict(self._counts)
            for one in self._followed:
                for name, counts in zip(one.names, one.counts.tolist(), strict=True):
                    found[name] = _sum(found.get(name), counts)
        return {name: found.get(name, Unfound(0, 0)) for name in names}

    def _fold(self) -> None:
        """Adds up the counts of lookups that are gone, and waits for the calls that were enqueued."""
        for device in {one.counts.device for one in self._followed if one.counts.is_cuda}:
            torch.cuda.synchronize(device)
        gone = [one for one in self._followed if one.lives() is None]
        self._followed = [one for one in self._followed if one.lives() is not None]
        for one in gone:
            self._add(one.names, one.counts.tolist())

    def _add(self, names: Iterable[str], unfound: Iterable[Sequence[int]]) -> None:
        for name, counts in zip(names, unfound, strict=True):
            self._counts[name] = _sum(self._counts.get(name), counts)


def _sum(before: Unfound | None, counts: Sequence[int]) -> Unfound:
    found = Unfound(*counts)
    return found if before is None else Unfound(*map(sum, zip(before, found, strict=True)))
