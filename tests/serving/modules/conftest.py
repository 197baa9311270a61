"""A published model with one table for each case that modules know, in fp32 rows, so that results are
exact."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from module_tables import FEATURES, tables_of

from tableside.loader.load.load import Loaded
from tableside.serving.modules import lookups, published


@pytest.fixture
def tables() -> dict[str, np.ndarray]:
    """What the live version holds: fp32 [rows, dim] by table."""
    return tables_of()


@pytest.fixture
def publish_again(publish: Callable[..., Loaded]) -> Callable[[dict[str, np.ndarray]], Loaded]:
    """Publishes a next version of the model `ads`, live at once."""

    def run(values: dict[str, np.ndarray], features: dict[str, dict[str, str]] | None = None) -> Loaded:
        return publish(values, "ads", dict.fromkeys(values, "fp32"), features or FEATURES)

    return run


@pytest.fixture
def model(root: Path, publish_again: Callable[..., Loaded], tables: dict[str, np.ndarray]) -> str:
    """The folder in which the model `ads` is published."""
    publish_again(tables)
    return str(root)


@pytest.fixture
def by_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """New versions are taken by `refresh` alone: the thread that looks finds nothing to look at."""
    monkeypatch.setattr(published, "_known", list)


@pytest.fixture(params=["by their table", "by their attributes"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How tensors on the CPU are read: by DLPack's table, and as without it."""
    if request.param != "by their table":
        monkeypatch.setattr(lookups, "EXCHANGE", None)
        monkeypatch.setattr(lookups, "EXCHANGE", None)
