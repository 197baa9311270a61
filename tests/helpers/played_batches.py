"""A GPU that is played, and requests for it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tableside.quant import BadIds
from tableside.serving.errors import ApiError
from tableside.serving.model.scorer import Scoring


class Device:
    """Stands for a GPU's backend: answers each batch with what it is told."""

    device = "cuda:9"
    description = "fused (nothing)"

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.answer: Callable[[list[Any]], Any] = lambda requests: [np.zeros(12, np.uint8) for _ in requests]
        self.lost = False

    @property
    def batches(self) -> Any:
        return self

    def begin(self, requests: list[Any], timed: bool, follower: Any = None) -> Any:
        self.sizes.append(len(requests))
        return requests

    def wait(self, requests: list[Any]) -> Any:
        return [
            found if isinstance(found, BadIds | tuple) else (found, None) for found in self.answer(requests)
        ], None

    def is_lost(self) -> bool:
        return self.lost


class Request:
    """Stands for a request that was laid out."""

    plan = SimpleNamespace(waits=False)
    model = "played"
    is_small = False
    ids = 1

    def __init__(self, staged_bytes: int = 100, scoring: Scoring | None = None) -> None:
        self.staged_bytes, self.scoring = staged_bytes, scoring

    def refusal(self, error: BadIds) -> ApiError:
        return ApiError(400, "bad_id", str(error.value))  # type: ignore[arg-type]
