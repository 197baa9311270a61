"""The version that tests of the reader in C read requests for."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from read_headers import FEATURES, attached
from served import Sum

from tableside.serving.model.version import ServedVersion


@pytest.fixture(scope="module")
def root_of_module() -> Iterator[Path]:
    """A folder of published models in shared memory, of the tests of one file."""
    root = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def version(root_of_module: Path, tmp_path_factory: pytest.TempPathFactory) -> ServedVersion:
    """A version whose scorer sums."""
    served = attached(root_of_module / "fixed", tmp_path_factory.mktemp("fixed"), FEATURES)
    served.scorer = Sum()
    return served
