"""The entries: what one claim is, how the files of claims are read, and what can be wrong with them without running anything."""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

TOP = Path(__file__).parent.parent.parent
FOLDER = Path(__file__).parent
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


class BadEntry(Exception):
    """An entry that cannot be understood; the message names its file, its claim and what was expected."""


@dataclass(frozen=True)
class Cut:
    """A text that is taken out of a file, and what is put in its place. file: relative to the top of the tree."""

    file: str
    delete: str
    instead: str = ""

    def applied_to(self, text: str) -> str:
        """The file's text without what is taken out; ValueError unless that occurs exactly once."""
        if (found := text.count(self.delete)) != 1:
            raise ValueError(f"{self.file} has {found} times, expected once:\n{self.delete}")
        return text.replace(self.delete, self.instead)


@dataclass(frozen=True)
class Claim:
    """One sentence of the documents, its tests (pytest's node ids), and the cuts without which it is not true."""

    area: str
    claim: str
    said_in: str
    tests: tuple[str, ...]
    cuts: tuple[Cut, ...]
    quote: str = ""
    build: bool = False
    gpu: bool = False
    error: str = ""


def read_claims(folder: Path = FOLDER) -> list[Claim]:
    """All claims of the files of a folder, areas by name. BadEntry: an entry lacks a key or has one that is not known."""
    return [_claim(file, raw) for file in sorted(folder.glob("*.toml")) for raw in tomllib.loads(file.read_text())["claim"]]


def _claim(file: Path, raw: dict[str, Any]) -> Claim:
    raw = dict(raw)
    where = f"{file.name}: {raw.get('claim', 'an entry without `claim`')}"
    try:
        tests = raw.pop("test")
        cuts = ({key: raw.pop(key) for key in ("file", "delete", "instead") if key in raw}, *raw.pop("also", ()))
        return Claim(
            area=file.stem,
            tests=(tests,) if isinstance(tests, str) else tuple(tests),
            cuts=tuple(Cut(**cut) for cut in cuts),
            **raw,
        )
    except (KeyError, TypeError) as error:
        of_cuts = [field.name for field in fields(Cut)]
        of_claims = [field.name for field in fields(Claim) if field.name not in ("area", "tests", "cuts")]
        known = ["test", "also", *of_cuts, *of_claims]
        raise BadEntry(f"{where}: {error}; known keys: {', '.join(known)}") from error


def problems(claim: Claim, top: Path = TOP) -> Iterator[str]:
    """What is wrong with an entry, as far as it can be told without running a test: a line for each."""
    document = top / claim.said_in
    if not document.is_file():
        yield f"{claim.said_in} does not exist"
    elif _words(claim.quote) not in _words(document.read_text()):
        yield f"{claim.said_in} does not say: {_words(claim.quote)}"
    for cut in claim.cuts:
        yield from _cut_problems(cut, top)
    for test in claim.tests:
        path, _, name = test.partition("::")
        if not (top / path).is_file() or name.partition("[")[0] not in _test_names(top / path):
            yield f"there is no test {test}"
    builds = [cut.file for cut in claim.cuts if cut.file.endswith((".c", ".h"))]
    if bool(builds) != claim.build:
        yield f"build = {str(bool(builds)).lower()} is expected: {', '.join(builds) or 'no C file is changed'}"


def _cut_problems(cut: Cut, top: Path) -> Iterator[str]:
    if not cut.delete.strip() or cut.delete == cut.instead:
        yield f"nothing is taken out of {cut.file}"
    try:
        left = cut.applied_to((top / cut.file).read_text())
        if cut.file.endswith(".py"):
            compile(left, cut.file, "exec", dont_inherit=True)
    except (OSError, ValueError, SyntaxError) as error:
        yield str(error)


@cache
def _test_names(file: Path) -> frozenset[str]:
    """Names of the functions of a file that pytest takes for tests."""
    tree = ast.parse(file.read_text())
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test"))


def _words(text: str) -> str:
    """A text without comments, with single spaces, so that it does not matter where lines are broken."""
    return " ".join(_COMMENT.sub("", text).split())
