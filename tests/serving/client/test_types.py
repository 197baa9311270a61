"""The types that a type checker sees of the clients' answers, in a user's script."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from servers import Server

from tableside.serving.client import Client
from tableside.serving.client.types import FeatureInfo, ModelInfo, ModelMetadata, TableInfo, TensorInfo

TOP = Path(__file__).parents[3]
SCRIPTS = TOP / "tests/fixtures/typed_client"


@pytest.mark.drawn(0.2)
def test_a_users_script_passes_mypy_strict_and_runs(served: Server, tmp_path: Path) -> None:
    """With the rooms inside one package, as in a wheel; `make wheel` checks the script there."""
    package = tmp_path / "types/tableside"
    package.mkdir(parents=True)
    for part in (*(TOP / "tableside").glob("*.py"), *(TOP / room for room in ("quant", "loader", "serving"))):
        (package / part.name).symlink_to(part)
    strict = "--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={tmp_path}/cache"
    found = run("-m", "mypy", *strict, *SCRIPTS.glob("*.py"), MYPYPATH=str(package.parent))
    assert found.returncode == 0, found.stdout
    for name, printed in ("script.py", "user mean\n"), ("with_torch.py", "(2, 8)\n"):
        found = run(SCRIPTS / name, served.url, PYTHONPATH=str(TOP))
        assert (found.returncode, found.stdout) == (0, printed), found.stderr


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=False)


def test_what_is_described_has_the_keys_of_its_type(served: Server) -> None:
    with Client(served.url) as client:
        (model,) = client.models()
        metadata = client.metadata("ads")
    described: list[tuple[Any, Any]] = [(model, ModelInfo), (metadata, ModelMetadata)]
    described += [(table, TableInfo) for table in model["tables"]]
    described += [(feature, FeatureInfo) for feature in model["features"]]
    described += [(tensor, TensorInfo) for tensor in (*metadata["inputs"], *metadata["outputs"])]
    for one, kind in described:
        assert set(one) == set(get_type_hints(kind))
