"""What the commands print with: tables, lines and JSON on stdout, progress on stderr where that is a
terminal.

A table is as wide as a terminal. Elsewhere, in a pipe or a file, it is as wide as what it says, and nothing
is cut.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from tableside.loader.load.load import Progress as LoadProgress

_UNCUT = 1 << 16  # columns; a table takes no more of them than it needs


def make_console(stderr: bool = False) -> Console:
    """A console for lines and tables, of one of the two streams as it is now."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(highlight=False, soft_wrap=True, stderr=stderr, width=None if is_terminal else _UNCUT)


console, errors = make_console(), make_console(stderr=True)


def print_json(value: Any) -> None:
    """One line of JSON on stdout. A number that is not finite is null."""
    print(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode(), flush=True)


def mb(n: float) -> str:
    """A number of bytes as a person reads it: 12.3 MB, 4.56 GB."""
    return f"{n / 1e9:,.2f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} rows/s")


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[LoadProgress | None]:
    """A bar with rows/s and the time left on stderr; None where that is no terminal. What it gives takes
    (rows done, rows)."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn(label),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("load", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
