"""What the commands print with: tables and lines for people on stdout, progress on stderr where that is a terminal."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from tableside.loader.load import Progress as LoadProgress

console = Console(highlight=False, soft_wrap=True)
errors = Console(highlight=False, soft_wrap=True, stderr=True)


def mb(n: float) -> str:
    """A number of bytes as a person reads it: 12.3 MB, 4.56 GB."""
    return f"{n / 1e9:,.2f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} rows/s")


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[LoadProgress | None]:
    """A bar with rows/s and the time left on stderr; None where that is no terminal. What it gives takes (rows done, rows)."""
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
