"""Requests keep the order in which they came, however long they wait on a busy machine."""

import math

import pytest

from tableside.serving.executors import admission, batching


@pytest.fixture(autouse=True)
def _in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admission, batching):
        monkeypatch.setattr(module, "NEWEST_FIRST_AFTER_S", math.inf)
