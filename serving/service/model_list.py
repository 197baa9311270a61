"""The shared list of models that a server's workers should serve, and those that each one serves.

One entry holds the wanted models; one per worker holds its own. Operators (load, unload) and `--all` change
the list, which raises `serial`. Workers follow and write their serial, so a load or an unload is answered
once all have. With `--all` the models of the root are written into it as they come and go.
"""

import logging
import os
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tableside.loader.errors import LoaderError
from tableside.loader.versions.versions import Model, models
from tableside.serving.settings import RootSettings
from tableside.serving.shm.shared_list import SharedList, lives, process_of


class ModelEntry(NamedTuple):
    """The wanted models (`worker` is "") or a worker's. serial: of the wanted list. reasons: (model, why a
    worker could not take it)."""

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
        made = cls()
        made.change(lambda _: [ModelEntry("", 1, list(models))])
        return made

    def wanted(self) -> ModelEntry:
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
        """Replaces the list. Workers retry models that failed."""
        self.change(lambda entries: _with(entries, models))

    def tell(self, serial: int, models: Iterable[str], reasons: Iterable[tuple[str, str]] = ()) -> None:
        """Writes this worker's models; drops the entries of ended workers."""
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
    return [ModelEntry("", entries[0].serial + 1, models), *entries[1:]]


LOOK_S = 1.0  # between two looks at the root
RETRY_S = 5.0  # before workers try again what they could not take
logger = logging.getLogger("tableside")


def published_models(settings: RootSettings, served: Collection[str] = ()) -> tuple[str, ...]:
    """Returns the names of models with a live version that can be attached. served: stay as long as one is
    live. LoaderError: the root is unreadable."""
    return tuple(m.name for m in models(settings.root, settings.owner) if _is_live(m, m.name in served))


def _is_live(model: Model, is_served: bool) -> bool:
    try:
        if not model.record().current:
            return False
        if not is_served:
            model.attach(model.good(), "header")
    except (LoaderError, OSError) as error:
        if not is_served:
            logger.warning("model %s is not served: %s", model.name, error)
        return is_served
    return True


class Following:
    """Writes which models the root has into the list that workers follow."""

    def __init__(self, settings: RootSettings, models: ModelList) -> None:
        self._settings, self._models = settings, models
        self._look_at = self._again_at = 0.0

    def look(self) -> None:
        """Reads the root, at most every LOOK_S seconds."""
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at, wanted = now + LOOK_S, self._models.wanted().models
        try:
            found = published_models(self._settings, wanted)
        except (LoaderError, OSError) as error:
            logger.warning("cannot see which models are published: %s", error)
            return
        # in each worker's order
        models = [*(m for m in wanted if m in found), *(m for m in found if m not in wanted)]
        if models != wanted:
            logger.info("models to serve from now on: %s", ", ".join(models) or "none")
        elif now < self._again_at or not self._models.reasons():
            return
        self._again_at = now + RETRY_S
        self._models.want_these(models)
