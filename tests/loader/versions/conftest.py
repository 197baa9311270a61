"""A model whose tables have files of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from table_files import CHANGED, TABLES

from tableside.loader.load.load import Loaded
from tableside.loader.load.settings import LoadSettings
from tableside.loader.versions.versions import Model

Publish = Callable[..., Loaded]
SETTINGS = LoadSettings(threads=1)


@pytest.fixture
def model(every_table_is_large: None, publish: Publish, root: Path) -> Model:
    """Version 1 of three tables in fp32, each in a file of its own."""
    publish(TABLES, formats=dict.fromkeys(TABLES, "fp32"), settings=SETTINGS)
    return Model(root, "demo")


@pytest.fixture
def again(model: Model, publish: Publish) -> Callable[..., Loaded]:
    """again("a", "b") -> version in which these tables are those of CHANGED, and the others the live ones."""

    def run(*only: str) -> Loaded:
        settings = LoadSettings(threads=1, only=only)
        return publish(CHANGED, formats=dict.fromkeys(TABLES, "fp32"), settings=settings)

    return run
