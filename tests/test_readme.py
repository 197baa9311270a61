"""The README's code blocks are executed, and they work as they are written."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.numpy import save_file
from scorers import exported
from servers import Server, start_server
from support import end, rows_of, run_tableside

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model

TOP = Path(__file__).parent.parent
TEXT = (TOP / "README.md").read_text()
COMMANDS = (TOP / "docs/commands.md").read_text()
URL = "http://127.0.0.1:8000"


def blocks(language: str, text: str = TEXT) -> list[str]:
    """Returns the README's fenced blocks of one language, or those of another text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Returns the words of each shell line, without its comment."""
    lines = (line.split("   #")[0].strip() for block in blocks("sh") for line in block.splitlines())
    return [shlex.split(line) for line in lines if line]


def test_the_demo_is_named_before_line_30() -> None:
    assert "make demo" in "\n".join(TEXT.splitlines()[:30])


def test_make_targets_exist() -> None:
    """Of README and of the page that lists all; and that page lists every target of `make help`."""
    text = TEXT + COMMANDS
    for command in [c for c in commands() if c[0] == "make"] + [
        ["make", t] for t in re.findall(r"`make ([\w-]+)`", text)
    ]:
        subprocess.run([*command, "-n"], cwd=TOP, check=True, capture_output=True)
    named = set(re.findall(r"\bmake ([a-z-]+)\b", text))
    assert set(re.findall(r"^([a-z-]+):.*##", (TOP / "Makefile").read_text(), re.MULTILINE)) <= named | {
        "help",
        "clean",
        "quick",
    }


def test_pages_that_are_named_exist() -> None:
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (TOP / path).exists(), path


@pytest.mark.drawn(0.5)
def test_commands_of_the_page_exist() -> None:
    """docs/commands.md has a row for each command, and its model.toml parses."""
    rows = "".join(line.split("|")[1] for line in COMMANDS.splitlines() if line.startswith("| `tableside"))
    shown = run_tableside("--help").stdout.split("\ncommands:\n")[-1]
    names = set(re.findall(r"^  ([a-z]+)\b", shown, re.MULTILINE))
    assert len(names) > 15 and all(re.search(rf"\b{name}\b", rows) for name in names)
    (text,) = blocks("toml", COMMANDS)
    spec = parse_model(tomllib.loads(text), Path())
    assert (spec.tables[0].name, spec.features[0].pooling) == ("user", "mean")


def test_the_tree_is_that_of_the_folders() -> None:
    """docs/architecture.md lists every folder, and all files of the product's folders."""
    tree = (TOP / "docs/architecture.md").read_text().split("## The files")[1].split("##")[0]
    entries = re.findall(r"^    (\S+)/(.*\n(?:      .*\n)*)", tree, re.MULTILINE)
    assert all((TOP / folder).is_dir() for folder, _ in entries)
    named = {f"{folder}/{name}" for folder, text in entries for name in re.findall(r"([\w.]+): ", text)}
    rooms = ("tableside", "quant", "loader", "serving")
    there = {str(p.relative_to(TOP)) for room in rooms for p in (TOP / room).rglob("*.*") if p.is_file()}
    there = {n for n in there if n.endswith(KINDS) and (n.startswith("tableside/") or "/__init__." not in n)}
    assert {n for n in named if n.startswith(rooms) and n.endswith(KINDS)} == there


KINDS = (".py", ".pyi", ".c", ".h", ".js", ".css", ".html", ".svg")


class Towers(torch.nn.Module):
    """The dense part that README's `scorer.pt2` stands for."""

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid((user * item).sum(1))


@pytest.mark.thorough
def test_a_server_and_an_evaluation(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """init, load, serve and eval work exactly as written, on a checkpoint with the names that TorchRec
    gives."""
    monkeypatch.chdir(tmp_path)
    weights = {
        f"embedding_bags.{t}.weight": rows_of(100, 64, seed) for seed, t in enumerate(("user", "item"))
    }
    save_file(weights, tmp_path / "checkpoint.safetensors")
    typed = [c for c in commands() if c[0] == "tableside"]
    assert [c[1] for c in typed] == ["init", "load", "serve", "eval"]
    for command in typed[:2]:
        found = run_tableside(*command[1:], root=root)
        assert found.returncode == 0, found.stderr
    serve = ["checkpoint" if word == "NAME" else word for word in typed[2][1:]]
    with subprocess.Popen(
        [sys.executable, "-m", "tableside", *serve, "--port", "0", "--root", str(root)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    ) as server:
        assert server.stdout is not None
        assert "4 workers" in server.stdout.readline()
        assert end(server) == 0
    (addition,) = blocks("toml")
    with open("model.toml", "a", encoding="utf-8") as file:
        file.write(addition)
    Path("scorer.pt2").write_bytes(exported(Towers(), user=64, item=64))
    rng = np.random.default_rng(0)
    columns = {
        "user_id": rng.integers(0, 100, 500),
        "item_id": rng.integers(0, 100, 500),
        "clicked": rng.integers(0, 2, 500),
    }
    parquet.write_table(pyarrow.table(columns), "clicks.parquet")
    found = run_tableside(*typed[3][1:], root=root)
    assert found.returncode == 0, found.stderr
    assert json.loads(Path("runs/1/report.json").read_text())["rows"] == 500


@pytest.mark.drawn(0.5)
def test_python_and_curl(server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client, module and curl work as written against a server of the demo's features, on another port,
    and over its tables."""
    monkeypatch.setenv("TABLESIDE_ROOT", str(root))
    for code, expected in zip(blocks("python"), ("(2, 64)\n", "torch.Size([2, 64])\n"), strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code.replace(URL, server.url), "README.md", "exec"), {})
        assert printed.getvalue() == expected
    curls = [c for c in commands() if c[0] == "curl"]
    assert len(curls) == 1
    for _, _, url, _, body in curls:
        answer = httpx.post(url.replace(URL, server.url), content=body, timeout=300)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["vectors"]["user"]) == 2


@pytest.fixture
def server(root: Path, tmp_path: Path) -> Iterator[Server]:
    """Runs a server of a model that has the demo's features."""
    np.savez(tmp_path / "d.npz", user=rows_of(50, 64), query=rows_of(20, 16))
    tables = {t: {"key": t} for t in ("user", "query")}
    features = {"user": {"table": "user"}, "query_tokens": {"table": "query", "pooling": "none"}}
    load(
        parse_model(
            {"name": "demo", "checkpoint": "d.npz", "tables": tables, "features": features}, tmp_path
        ),
        root,
    )
    server = start_server(root, "--workers", 1)
    yield server
    end(server.process)


def test_where_to_find_names_what_exists() -> None:
    """Every function and class that docs/architecture.md gives as the place of something is in the file
    that it names."""
    section = (TOP / "docs/architecture.md").read_text().split("## Where to find")[1].split("\n## ")[0]
    places = re.findall(r"`([\w/.]+\.(?:py|c|h)): ([\w.]+)`", section)
    assert len(places) > 8
    for file, name in places:
        text = (TOP / file).read_text()
        for part in name.split("."):
            assert re.search(rf"(?:def|class) {part}\b|\b{part}\(", text), f"{file} has no {name}"
