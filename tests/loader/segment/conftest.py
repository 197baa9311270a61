"""Fixtures of tests of segments."""

from pathlib import Path

import pytest
from block_files import File


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File.of(tmp_path / "rows", 1000, 80, 400)
