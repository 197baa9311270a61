"""A version on a disk, and a process that serves it with hot rows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hot_reading import Reading, publish

from tableside.loader.hot.hot import clear_hot
from tableside.loader.versions.versions import Model


@pytest.fixture
def model(disk: Path, tmp_path: Path) -> Iterator[Model]:
    model = publish(disk, tmp_path)
    yield model
    clear_hot(disk, "m", tuple)


@pytest.fixture
def reading(model: Model) -> Reading:
    return Reading(model)
