"""The direction of the imports: quant <- loader <- serving, and fbgemm in as few files as possible."""

import ast
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
ALLOWED = {"quant": {"quant"}, "loader": {"quant", "loader"}, "serving": {"quant", "loader", "serving"}}


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_one_way(room: str) -> None:
    for file in (TOP / room).rglob("*.py"):
        assert imports(file) & set(ALLOWED) <= ALLOWED[room], file


def test_fbgemm_is_imported_in_two_files() -> None:
    """Its operators behind our contract, and its module for those who want one."""
    found = {str(f.relative_to(TOP)) for room in ALLOWED for f in (TOP / room).rglob("*.py") if "fbgemm_gpu" in imports(f)}
    assert found == {"quant/fbgemm.py", "loader/tbe.py"}


@pytest.mark.parametrize("room", ["quant", "loader"])
def test_lower_rooms_know_no_http_and_no_settings(room: str) -> None:
    for file in (TOP / room).rglob("*.py"):
        assert not imports(file) & {"fastapi", "uvicorn", "httpx", "prometheus_client", "pydantic", "argparse"}, file
