"""Errors cross process boundaries as they are: a pool of processes that meets one tells it, and goes on."""

import ast
import builtins
import importlib
import inspect
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import tableside
from tableside.quant.errors import BadIds, Problem
from tableside.serving.client import ClientError

TOP = Path(__file__).parent.parent
ROOMS = ("quant", "loader", "serving")


def errors() -> Iterator[type[BaseException]]:
    """Every exception class of the package. They are found by their bases' names, so that only their
    modules are imported."""
    bases: dict[tuple[str, str], list[str]] = {}  # (module, class) -> names of its bases
    for file in (f for room in ROOMS for f in (TOP / room).rglob("*.py")):
        module = "tableside." + str(file.relative_to(TOP).with_suffix("")).replace("/", ".").removesuffix(
            ".__init__"
        )
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases[module, node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    named = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    found: set[tuple[str, str]] = set()
    while more := {one for one, below in bases.items() if named & set(below)} - found:
        found |= more
        named |= {name for _, name in more}
    return (getattr(importlib.import_module(module), name) for module, name in sorted(found))


def sample(cls: type[BaseException]) -> BaseException:
    """An error with arguments that are all different."""
    if not inspect.isfunction(cls.__init__):  # it has none of its own
        return cls("what was expected, and what came")
    return cls(*(argument(p, n) for n, p in enumerate(inspect.signature(cls).parameters.values())))


def argument(parameter: inspect.Parameter, number: int) -> Any:
    kind = parameter.annotation
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        return list(kind)[number % len(list(kind))]  # type: ignore[call-overload]
    if kind is BadIds:
        return BadIds(Problem.ID, 1, 2, 3, 4)
    if kind is int:
        return 400 + number
    if kind in (str, str | None):
        return f"argument {number}"
    assert kind == tuple[tuple[bytes, bytes], ...], f"{parameter}: say here what such an argument may be"
    return ((b"allow", b"GET"),)


@pytest.mark.parametrize("cls", [*errors()], ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_an_error_is_the_same_behind_a_pickle(cls: type[BaseException]) -> None:
    """Its class, its text, and what it says beside."""
    error = sample(cls)
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is cls
    assert str(found) == str(error)
    told, expected = ({k: str(v) for k, v in vars(e).items()} for e in (found, error))
    assert told == expected


def _refuse(number: int) -> None:
    raise ClientError(404, f"model {number} is not served")


def test_a_pool_of_processes_tells_what_the_server_said() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        for number in range(2):
            with pytest.raises(ClientError, match=f"404: model {number} is not served") as caught:
                pool.submit(_refuse, number).result(60)
            assert caught.value.status == 404


@pytest.mark.drawn(0.5)
def test_all_rooms_were_looked_at() -> None:
    assert {cls.__module__.split(".")[1] for cls in errors()} == set(ROOMS)
    assert tableside.ClientError is ClientError
