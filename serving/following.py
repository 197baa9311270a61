"""`tableside serve --all`: which models of the root are served, as models come and go.

Workers are started with the models that they serve. So when the root has others, every worker is replaced, one after another,
each when its successor is ready, and requests go on. New versions of a model are taken by the workers that run.
"""

import logging
import time
from collections.abc import Collection

from tableside.loader.errors import LoaderError
from tableside.loader.versions import Model, models
from tableside.serving.settings import RootSettings

logger = logging.getLogger("tableside")

LOOK_S = 1.0  # between two looks at the root
RETRY_S = 5.0  # before workers are replaced again, where their successors did not get ready


def published_models(settings: RootSettings, served: Collection[str] = ()) -> tuple[str, ...]:
    """The models of a root that have a live version which can be attached, by name.

    served: stay, whatever their versions are worth, as long as one is live. LoaderError: the root cannot be read.
    """
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
    """Looks from time to time which models the root has. served: those that workers are started with now."""

    def __init__(self, settings: RootSettings, served: tuple[str, ...]) -> None:
        self._settings, self.served = settings, served
        self._look_at = 0.0

    def look(self, running: Collection[tuple[str, ...]]) -> bool:
        """Whether workers are to be replaced; `served` says with which models. running: of the workers that there are.

        A worker whose successor failed still has the models of before: it is replaced again, RETRY_S later.
        """
        if (now := time.monotonic()) < self._look_at:
            return False
        self._look_at = now + LOOK_S
        try:
            found = published_models(self._settings, self.served)
        except (LoaderError, OSError) as error:
            logger.warning("cannot see which models are published: %s", error)
            return False
        if found != self.served:
            logger.info("models to serve from now on: %s", ", ".join(found) or "none")
            self.served = found
        if all(models == found for models in running):
            return False
        self._look_at = now + RETRY_S
        return True
