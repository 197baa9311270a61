"""Ids without a row of their own, counted by feature: what `missing_ids` of a module answers.

The numbers are those of the server's `tableside_ids_without_row_total`, over all calls of this process that
read the same source: modules, swapped modules and programs, whichever version they read. Ids that are refused
raise, and are not counted. On a GPU the kernels count on the device, where a call adds and nobody waits.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tableside.quant.contract import Unfound

_FOLLOWED = 256  # counts on a device that are followed before those of lookups that are gone are added up


class _OnDevice(NamedTuple):
    """Counts of a lookup on a device. counts: int64 [names, 2]; lives: None once no call can add to them
    any more."""

    names: Sequence[str]
    counts: torch.Tensor
    lives: "weakref.ref[torch.Tensor]"


class Missing:
    """The counts of one source. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Unfound] = {}
        self._followed: list[_OnDevice] = []

    def add(self, names: Iterable[str], unfound: Iterable[Unfound]) -> None:
        """Counts a call. unfound: of each feature, as `Plan.run` returns it."""
        with self._lock:
            self._add(names, unfound)

    def follow(self, names: Sequence[str], counts: torch.Tensor) -> None:
        """Counts what a lookup on a device adds to `counts`, int64 [names, 2], for as long as somebody
        else holds that tensor."""
        if not names:
            return
        with self._lock:
            if len(self._followed) >= _FOLLOWED:
                self._fold()
            self._followed.append(_OnDevice(names, counts.detach(), weakref.ref(counts)))

    def of(self, names: Iterable[str]) -> dict[str, Unfound]:
        """The counts of these features. Waits for the device where one is followed."""
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
    return Unfound(*counts) if before is None else Unfound(*map(sum, zip(before, counts, strict=True)))
