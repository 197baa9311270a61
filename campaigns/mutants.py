"""`python -m campaigns.mutants`: changes one thing in the product, runs the nearest tests, lists what
survived.

A mutant is one changed operator, constant, condition, `raise`, `return`, call or lock. Each runs in a tree of
its own. The nearest tests have the file's name, or import it in the fewest steps, and take `--seconds`
together. A run that takes three times as long as its tests counts as noticed. Text, types and logs are left
alone.
"""

import argparse
import ast
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from campaigns.common import console

TOP = Path(__file__).parent.parent
ROOMS = ("quant", "loader", "serving")
OTHER: dict[Any, Any] = {
    **{
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    },
    **{
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.And: ast.Or,
        ast.Or: ast.And,
    },
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
}
LEFT_OUT = ("logger", "log", "warn", "print", "console", "TYPE_CHECKING", "annotation")


@dataclass(frozen=True)
class Mutant:
    """Bytes `start` to `end` of a file, and what stands there instead."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before.splitlines()[0][:70]}  ->  {self.after[:70]}"


def mutants_of(file: Path) -> list[Mutant]:
    """All mutants of one file, in order."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, after in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = source[begin:end].decode()
        text = f"({ast.unparse(after)})" if isinstance(after, ast.expr) else ast.unparse(after)
        found.append(Mutant(str(file.relative_to(TOP)), node.lineno, begin, end, before, text))
    return found


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """(node, what may stand in its place) of a tree."""
    if _is_left_out(node):
        return
    if isinstance(node, ast.Compare):
        yield node, ast.Compare(node.left, [_other(node.ops[0]), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(_other(node.op), node.values)
    elif (
        isinstance(node, ast.BinOp)
        and type(node.op) in OTHER
        and not isinstance(node.left, ast.Constant | ast.JoinedStr)
    ):
        yield node, ast.BinOp(node.left, _other(node.op), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield node, ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield node, ast.Return(ast.Constant(None))
    elif isinstance(node, ast.With) and "lock" in ast.unparse(node.items[0].context_expr).lower():
        yield (
            node.items[0].context_expr,
            ast.parse('__import__("contextlib").nullcontext()', mode="eval").body,
        )
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "op", "ops", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child)


def _other(operator: ast.AST) -> Any:
    return OTHER[type(operator)]()


def _is_left_out(node: ast.AST) -> bool:
    """Text, types, logs, imports: nothing that a test ought to notice."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr | ast.If):
        head = ast.unparse(node.test if isinstance(node, ast.If) else node.value)
        return head.startswith(LEFT_OUT)
    return isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__")


# ---- the nearest tests ----


class Nearest:
    """Test files by their distance to a file of the product. times: seconds of each, of a run before."""

    def __init__(self, times: dict[str, float]) -> None:
        self._times = times
        self._tests = sorted(str(f.relative_to(TOP)) for f in (TOP / "tests").rglob("test_*.py"))
        helpers = {
            f.stem: f for folder in ("tests/helpers", "campaigns") for f in (TOP / folder).glob("*.py")
        }
        self._files = {
            f"campaigns.{name}" if "campaigns" in str(f) else name: f for name, f in helpers.items()
        }
        for room in ROOMS:
            for file in (TOP / room).rglob("*.py"):
                parts = file.relative_to(TOP).with_suffix("").parts
                self._files["tableside." + ".".join(p for p in parts if p != "__init__")] = file

    @functools.cache  # noqa: B019  (one object a run)
    def imports(self, file: str) -> frozenset[str]:
        found = set()
        for node in ast.walk(ast.parse((TOP / file).read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            found |= {str(self._files[n].relative_to(TOP)) for n in names if n in self._files}
        return frozenset(found)

    @functools.cache  # noqa: B019
    def distances(self, test: str) -> dict[str, int]:
        """File -> how many imports lead from a test to it."""
        found, queue = {test: 0}, deque([test])
        while queue:
            file = queue.popleft()
            for other in self.imports(file) - found.keys():
                found[other] = found[file] + 1
                queue.append(other)
        return found

    @functools.cache  # noqa: B019
    def of(self, file: str, seconds: float) -> tuple[tuple[str, ...], float]:
        """The nearest test files, which take `seconds` or a little more, and what they take."""
        words = set(Path(file).stem.strip("_").split("_"))

        def rank(test: str) -> tuple[float, float]:
            named = len(words & set(Path(test).stem.removeprefix("test_").split("_"))) / len(words)
            beside = Path(file).parent.parts == Path(test).parent.parts[1:]
            return self.distances(test).get(file, 99) - 2 * named - beside, self._times.get(test, 10.0)

        chosen: list[str] = []
        total = 0.0
        for test in sorted(self._tests, key=rank):
            if chosen and (total >= seconds or file not in self.distances(test)):
                break
            if total + self._times.get(test, 10.0) <= 2 * seconds or not chosen:
                chosen.append(test)
                total += self._times.get(test, 10.0)
        return tuple(chosen), total


def read_times(file: Path) -> dict[str, float]:
    """Test file -> seconds, of the JUnit report that `make test` writes; empty where there is none."""
    found: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(file).iter("testcase") if file.exists() else ():
        parts = case.get("classname", "").split(".")
        found["/".join(parts) + ".py"] += float(case.get("time", 0))
    return dict(found)


# ---- running ----


def run(mutant: Mutant, tree: Path, tests: Sequence[str], limit_s: float, options: Sequence[str]) -> str:
    """What became of a mutant: `noticed`, `survived`, `late` (noticed: its tests did not end)."""
    target = tree / mutant.file
    source = target.read_bytes()
    target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *tests]
    paths = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            end_session(process.pid)
            target.write_bytes(source)
    return {0: "survived", -1: "late"}.get(code, "noticed")


def end_session(session: int) -> None:
    """Ends what a run of tests left: every process of its session."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                os.kill(int(folder.name), 9)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def copy_tree(into: Path) -> None:
    """What git knows of the checkout, and the built extensions."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=TOP, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    built = [str(f.relative_to(TOP)) for room in ROOMS for f in (TOP / room).rglob("*.so")]
    for name in filter(lambda n: (TOP / n).is_file(), [*names, *built]):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(TOP / name, into / name)


def touched(since: str) -> list[Path]:
    """The product's Python files that changed since a commit."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", since, "--", *ROOMS]
    names = subprocess.run(command, cwd=TOP, check=True, capture_output=True, text=True).stdout.splitlines()
    return [TOP / name for name in names if name.endswith(".py")]


def draw(files: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """count of all mutants of some files."""
    every = [mutant for file in sorted(files) for mutant in mutants_of(file)]
    return random.Random(seed).sample(every, min(count, len(every)))


def main() -> int:
    """Prints the mutants that survived and writes all of them; the exit code is 0, as a survivor may be
    the same program."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=40, help="mutants (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 30), help="decides which (default: any; printed)"
    )
    parser.add_argument("--since", help="of files that changed since this commit; else of every file")
    parser.add_argument(
        "--seconds", type=float, default=30, help="what the tests of one may take (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time (default: %(default)s)")
    parser.add_argument("--again", type=Path, help="the mutants of this file, those that survived there")
    parser.add_argument("--out", type=Path, help="a JSON file of all of them")
    parser.add_argument("options", nargs="*", help="what pytest is told beside, behind --")
    given = parser.parse_args()
    files = touched(given.since) if given.since else [f for room in ROOMS for f in (TOP / room).rglob("*.py")]
    mutants = draw(files, given.count, given.seed)
    if given.again:
        told = json.loads(given.again.read_text())
        mutants = [Mutant(**one["mutant"]) for one in told if one["end"] == "survived"]
    console.print(f"{len(mutants)} mutants, seed {given.seed}")
    ends = run_all(mutants, given)
    if given.out:
        given.out.write_text(json.dumps([{"mutant": asdict(m), "end": e} for m, e in ends], indent=1) + "\n")
    survived = [m for m, end in ends if end == "survived"]
    console.print(f"{len(survived)} of {len(mutants)} survived")
    return 0


def run_all(mutants: Sequence[Mutant], given: argparse.Namespace) -> list[tuple[Mutant, str]]:
    """Runs mutants, `given.jobs` at a time, each time in a tree that no other uses."""
    nearest = Nearest(read_times(TOP / "build" / "times.xml"))
    with tempfile.TemporaryDirectory(prefix="tableside-mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            tree = Path(folder) / str(number)
            copy_tree(tree)
            trees.put(tree)

        def one(mutant: Mutant) -> tuple[Mutant, str]:
            tests, takes = nearest.of(mutant.file, given.seconds)
            tree = trees.get()
            try:
                end = run(mutant, tree, tests, 60 + 3 * takes, given.options)
            finally:
                trees.put(tree)
            console.print(f"{end:9}{mutant}" + (f"  ({' '.join(tests)})" if end == "survived" else ""))
            return mutant, end

        with ThreadPoolExecutor(given.jobs) as threads:
            return list(threads.map(one, mutants))


if __name__ == "__main__":
    sys.exit(main())
