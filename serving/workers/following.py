"""`--all`: the models of the root, as they come and go."""

import logging
import time
from collections.abc import Collection

from tableside.loader.errors import LoaderError
from tableside.loader.versions.versions import Model, models
from tableside.serving.service.model_list import ModelList
from tableside.serving.settings import RootSettings

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
