"""Samples the ids that a worker is asked for, while `tableside plan --live` wants them
(`serving.service.uses`). Without that nothing is in the way of a request."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tableside.loader.errors import LoaderError
from tableside.serving.engine_process.link import EngineLink
from tableside.serving.executors.executors import CpuExecutor
from tableside.serving.executors.pending import Pending
from tableside.serving.model.request import Answer, Request
from tableside.serving.service.uses import LiveSample
from tableside.serving.shm.regions import PartlyOnDevice

logger = logging.getLogger("tableside")

Executor = CpuExecutor | EngineLink


class SamplingExecutor:
    """An executor that adds each request to a sample before it begins it. Belongs to one event loop."""

    def __init__(self, executor: Executor, root: Path, owner: str | None) -> None:
        self._executor, self._root, self._owner = executor, root, owner
        self._samples: dict[str, LiveSample] = {}

    def look(self, models: Iterable[str]) -> "Executor | SamplingExecutor":
        """Looks who asks; returns what begins requests from now on."""
        for name in models:
            sample = self._samples.get(name)
            if sample is None:
                try:
                    sample = LiveSample.wanted(self._root, name, self._owner)
                except LoaderError as error:
                    logger.debug("the ids of %s are not sampled: %s", name, error)
                if sample is not None:
                    self._samples[name] = sample
            elif not sample.is_wanted:
                self._samples.pop(name).close()
        return self if self._samples else self._executor

    def begin(self, request: Request, inputs: Any) -> Answer | Pending:
        """As of the executor. Ids that lie on a device are not sampled."""
        sample = self._samples.get(request.model)
        if sample is not None and sample.has_room and not isinstance(inputs, PartlyOnDevice):
            try:
                sample.add(request.features, request.places, inputs)
            except (OSError, LoaderError) as error:
                logger.warning("the ids of %s are not sampled: %s", request.model, error)
                sample.has_room = False
        return self._executor.begin(request, inputs)
