"""The direction of the imports: quant <- loader <- serving, inside the rooms too, and fbgemm in as few files as possible."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
ROOMS = ("quant", "loader", "serving")
ALLOWED = {"quant": {"quant"}, "loader": {"quant", "loader"}, "serving": {"quant", "loader", "serving"}}


def imported(file: Path) -> Iterator[str]:
    """The modules that a file imports, at its top or anywhere else, without the `tableside.` of ours."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.removeprefix("tableside.") for name in names)


def imports(file: Path) -> set[str]:
    """Rooms and packages that a file imports."""
    return {name.partition(".")[0] for name in imported(file)}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_one_way(room: str) -> None:
    for file in (TOP / room).rglob("*.py"):
        assert imports(file) & set(ALLOWED) <= ALLOWED[room], file


def test_fbgemm_is_imported_in_two_files() -> None:
    """Its operators behind our contract, and its module for those who want one."""
    found = {str(f.relative_to(TOP)) for room in ALLOWED for f in (TOP / room).rglob("*.py") if "fbgemm_gpu" in imports(f)}
    assert found == {"quant/cpu/fbgemm.py", "loader/tbe.py"}


@pytest.mark.parametrize("room", ["quant", "loader"])
def test_lower_rooms_know_no_http_and_no_settings(room: str) -> None:
    for file in (TOP / room).rglob("*.py"):
        assert not imports(file) & {"fastapi", "uvicorn", "httpx", "prometheus_client", "pydantic", "argparse"}, file
