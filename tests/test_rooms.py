"""The direction of the imports: quant <- loader <- serving, inside the rooms too, and fbgemm in as few
files as possible."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tableside.quant.gpu.residence.registry import KINDS

pytestmark = pytest.mark.quick

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
    found = {
        str(f.relative_to(TOP))
        for room in ALLOWED
        for f in (TOP / room).rglob("*.py")
        if "fbgemm_gpu" in imports(f)
    }
    assert found == {"quant/cpu/fbgemm.py", "loader/tbe/tbe.py"}


def test_no_other_file_names_a_kind_of_residence() -> None:
    """A new kind is a file and a line of the registry, so no other may ask for one by its class or name.
    "host", "stored" and "cached" are words of other things, too."""
    home = TOP / "quant/gpu/residence"
    names = {name for name in KINDS if name not in ("host", "stored", "cached")} | {"ON_DISK", "UNPLACED"}
    classes = {kind.at.lstrip(".").partition(":")[0] for kind in KINDS.values()}
    for file in (file for room in ROOMS for file in (TOP / room).rglob("*.py") if home not in file.parents):
        found = {name.rpartition("residence.")[2].partition(".")[0] for name in imported(file)}
        assert not found & classes, file
        for node in ast.walk(ast.parse(file.read_text())):
            said = node.value if isinstance(node, ast.Constant) else getattr(node, "id", None)
            assert said not in names, (file, node.lineno)


@pytest.mark.parametrize("room", ["quant", "loader"])
def test_lower_rooms_know_no_http_and_no_settings(room: str) -> None:
    for file in (TOP / room).rglob("*.py"):
        assert not imports(file) & {
            "fastapi",
            "uvicorn",
            "httpx",
            "prometheus_client",
            "pydantic",
            "argparse",
        }, file


# ---- inside serving ----

# Each file or folder may import what stands before it, and a file of a folder the others of that folder.
SERVING = (
    *(
        "__init__",
        "errors",
        "sizes",
        "kept_memory",
        "settings",
        "with_ray",
        "client",
        "cluster",
        "logs",
        "stash_metrics",
    ),
    *("model", "shm", "metrics", "damage", "executors", "watch", "supervised", "engine_process", "service"),
    *("evaluation", "planning", "follow", "modules", "http", "workers", "cli"),
)


def run_time_imports(file: Path) -> Iterator[str]:
    """As `imported`, without what type checkers alone import."""
    return (name.removeprefix("tableside.") for name in imported_by(ast.parse(file.read_text())))


def imported_by(node: ast.AST) -> Iterator[str]:
    """The modules and names that a syntax tree imports, in functions as well, except below `if
    TYPE_CHECKING`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    is_for_types = (
        isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    for child in node.orelse if is_for_types else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from imported_by(child)


def import_graph(room: str) -> dict[str, set[str]]:
    """Module -> the modules of the same room that it imports."""
    files = {
        str(f.relative_to(TOP).with_suffix("")).replace("/", ".").removesuffix(".__init__"): f
        for f in (TOP / room).rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        names = set(run_time_imports(file))
        graph[module] = {n if n in files else n.rpartition(".")[0] for n in names} & set(files) - {module}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next one and the last one the first; empty where there are none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        found = next((c for n in sorted(graph[module]) if (c := walk(n, [*path, module]))), [])
        done.add(module)
        return found

    return next((c for module in sorted(graph) if (c := walk(module, []))), [])


def place_in_serving(module: str) -> int:
    return SERVING.index(f"{module}.__init__".split(".")[1])


def test_a_cycle_is_found_where_there_is_one() -> None:
    """An import in a function counts, one for type checkers does not."""
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    code = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    from c import d\n"
    assert list(imported_by(ast.parse(code))) == ["b", "c.d"]


def test_serving_has_no_import_cycles() -> None:
    """Neither at the top of files nor in their functions."""
    assert find_cycle(import_graph("serving")) == []


def test_imports_inside_serving_go_one_way() -> None:
    """From requests over versions, engines, executors and the service to HTTP, workers and the command
    line."""
    for module, used in import_graph("serving").items():
        for other in used:
            assert place_in_serving(other) <= place_in_serving(module), f"{module} imports {other}"


def test_the_client_knows_no_server_and_evaluations_no_http() -> None:
    """The client imports nothing else of the room. Evaluations are the command line's alone, and plans, which
    read data sets as they do."""
    graph = import_graph("serving")
    for module, used in graph.items():
        if module.startswith("serving.client"):
            assert all(other == "serving" or other.startswith("serving.client") for other in used), module
    for module, used in graph.items():
        if module.startswith(("serving.evaluation", "serving.planning")):
            assert not any(other.startswith("serving.http") for other in used), module
        elif not module.startswith("serving.cli"):
            assert not any(other.startswith(("serving.evaluation", "serving.planning")) for other in used), (
                module
            )


# ---- inside quant ----

# Each file or folder may import what stands before it, and a file of a folder the others of that folder.
QUANT = (
    *("errors", "row_format", "rows", "contract", "unchanged", "installed"),
    *("cpu", "backends", "device", "cache", "gpu", "stash", "__init__"),
)


def place_in_quant(module: str) -> int:
    return QUANT.index(f"{module}.__init__".split(".")[1])


def test_quant_has_no_import_cycles() -> None:
    """Neither at the top of files nor in their functions. `quant` itself names what users import, and is
    no part of it."""
    graph = {
        module: found - {"quant"} for module, found in import_graph("quant").items() if module != "quant"
    }
    assert find_cycle(graph) == []


def test_quant_imports_go_one_way() -> None:
    """contract <- cpu <- device <- cache <- gpu: a residence knows the cache, the cache knows no
    residence."""
    for module, found in import_graph("quant").items():
        for other in found - {"quant"}:
            assert place_in_quant(other) <= place_in_quant(module), f"{module} imports {other}"


def test_loader_has_no_import_cycles() -> None:
    """Neither at the top of files nor in their functions."""
    assert find_cycle(import_graph("loader")) == []
