"""Which models a server's workers are to serve, and which of them each worker serves. Operators change the
list by loading and unloading, and `--all` by what the root has (`serving.workers.following`).

The list has one entry of what is wanted, and one of each worker with what it has taken of that. A change
raises `serial`. A worker follows the list as it watches versions, and tells the serial that it has come to.
So the worker that was asked knows when all have: a load or an unload is answered then.
"""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tableside.serving.shm.shared_list import SharedList, lives, process_of


class ModelEntry(NamedTuple):
    """What is wanted, where `worker` is "", or what a worker has taken.

    serial: of the wanted list that this is. reasons: (model, why it could not be taken) by a worker.
    """

    worker: str
    serial: int
    models: Sequence[str]
    reasons: Sequence[tuple[str, str]] = ()


class ModelList(SharedList[ModelEntry]):
    """The models that all workers of a server are to serve."""

    entry = ModelEntry
    what = "served models"

    @classmethod
    def of(cls, models: Iterable[str]) -> "ModelList":
        """A new list of these models."""
        made = cls()
        made.change(lambda _: [ModelEntry("", 1, list(models))])
        return made

    def wanted(self) -> ModelEntry:
        """What is wanted now."""
        return self.read()[1][0]

    def want(self, model: str, is_wanted: bool) -> int:
        """Adds a model or takes it from the list; returns the serial that workers have to come to."""

        def change(entries: list[ModelEntry]) -> list[ModelEntry]:
            before = entries[0]
            if (model in before.models) == is_wanted:
                return entries
            return _with(entries, [m for m in before.models if m != model] + [model] * is_wanted)

        return self.change(change)[0].serial

    def want_these(self, models: list[str]) -> None:
        """Replaces the list. Workers try again to take what they could not."""
        self.change(lambda entries: _with(entries, models))

    def tell(self, serial: int, models: Iterable[str], reasons: Iterable[tuple[str, str]] = ()) -> None:
        """Says what this worker has taken. Entries of workers that ended go."""
        mine = ModelEntry(process_of(os.getpid()), serial, list(models), list(reasons))
        self.change(
            lambda entries: [
                entries[0],
                *(e for e in entries[1:] if e.worker != mine.worker and lives(e.worker)),
                mine,
            ]
        )

    def late(self, serial: int) -> list[ModelEntry]:
        """The workers that have not come to `serial` yet."""
        return [e for e in self.read()[1][1:] if e.serial < serial and lives(e.worker)]

    def reasons(self) -> dict[str, str]:
        """Models that a worker could not take, and why."""
        return {name: why for e in self.read()[1][1:] for name, why in e.reasons if lives(e.worker)}


def _with(entries: list[ModelEntry], models: list[str]) -> list[ModelEntry]:
    """The list where these models are wanted."""
    return [ModelEntry("", entries[0].serial + 1, models), *entries[1:]]
