"""Output of the commands (tables, JSON, progress bars), and the models they name by a path.

A table is cut to a terminal's width; in a pipe or a file it is not.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tableside.loader.errors import LoaderError
from tableside.loader.load.origin import is_live
from tableside.loader.load.settings import Progress as LoadProgress
from tableside.loader.model.first_model import first_model
from tableside.loader.model.model import NAME, read_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.model.text import write_model
from tableside.loader.versions.versions import Model, models
from tableside.quant import RowFormat
from tableside.serving.errors import ServingError
from tableside.serving.settings import ClusterSettings, RootSettings, ServerSettings, cluster_token, given

_FILES = (".toml", ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npy", ".npz", ".parquet", ".json")
_LINE_S = 10.0  # between two lines that say how far something is
_UNCUT = 1 << 16  # columns; a table takes no more of them than it needs


def make_console(stderr: bool = False) -> Console:
    """A console for lines and tables, of one of the two streams as it is now."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(highlight=False, soft_wrap=True, stderr=stderr, width=None if is_terminal else _UNCUT)


console, errors = make_console(), make_console(stderr=True)


def print_json(value: Any) -> None:
    """One line of JSON on stdout. A number that is not finite is null."""
    print(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode(), flush=True)


def table_of(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table without lines."""
    table = Table(*heads, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def mb(n: float) -> str:
    """A number of bytes as a person reads it: 12.3 MB, 4.56 GB."""
    return f"{n / 1e9:,.2f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} rows/s")


class _Lines:
    """Writes how far something is; any thread may call."""

    def __init__(self, label: str) -> None:
        self._label, self._began = label, time.monotonic()
        self._said = self._began

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said < _LINE_S or not done or not total:
            return
        self._said, rate = now, done / (now - self._began)
        left = timedelta(seconds=round((total - done) / rate))
        errors.print(f"{self._label}: {done / total:.0%}, {rate:,.0f} rows/s, {left} left")


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[LoadProgress]:
    """Shows rows/s and the time left on stderr, without a terminal as a line every _LINE_S seconds. Yields a
    function of (rows done, rows)."""
    if not sys.stderr.isatty():
        yield _Lines(label)
        return
    percentage = TextColumn("{task.percentage:>3.0f} %")
    columns = (TextColumn(label), BarColumn(), percentage, _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("load", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def root_settings(options: argparse.Namespace) -> RootSettings:
    """Returns the root and the trusted owner of a command's options."""
    return RootSettings(**given(options, RootSettings))


def token_of(options: argparse.Namespace) -> str | None:
    """Returns the cluster's token that a command names."""
    return cluster_token(ClusterSettings(**given(options, ClusterSettings)))


def published(options: argparse.Namespace) -> Model:
    """Returns the model that a command names. ServingError: the name is a path."""
    name: str = options.model
    check_no_path(name)
    settings = root_settings(options)
    return Model(settings.root, name, settings.owner)


def chosen(options: argparse.Namespace) -> list[Model]:
    """The model that is named, or all models. VersionError: the one that is named was never published."""
    if not options.model:
        settings = root_settings(options)
        return models(settings.root, settings.owner)
    model = published(options)
    model.check_known()
    return [model]


def is_path(text: str) -> bool:
    """Whether an argument is written as a path, or is an existing path and no model name."""
    return not NAME.fullmatch(text) and (
        text.endswith(_FILES) or "/" in text or ("\0" not in text and os.path.exists(text))
    )


def check_no_path(text: str) -> None:
    """ServingError: the name is a path, not a published model."""
    if not is_path(text) or not os.path.exists(text):
        return  # a name, or what `check_name` refuses
    try:
        name = read_model(Path(text)).name
    except LoaderError:
        raise ServingError(
            f"{text} is a file; expected the name of a published model, which `tableside list` shows"
        ) from None
    raise ServingError(f"{text} is a file; expected the name of the model that it describes: {name}")


def load_where_named(arguments: Sequence[str], settings: RootSettings) -> tuple[str, ...]:
    """Loads models that are named by a path, each in its own process; returns all names. A model that is live
    and unchanged is not loaded again. LoaderError, ServingError: a path names no model, or its load
    failed."""
    named = [_named(text, settings) for text in arguments]
    names = tuple(name for name, *_ in named)
    if twice := next((n for n in names if names.count(n) > 1 and any(spec for *_, spec in named)), None):
        raise ServingError(f"{', '.join(arguments)}: two of them are model {twice!r}; name each once")
    for name, path, spec in named:
        if path is None or spec is None:
            continue
        model = Model(settings.root, name, settings.owner)
        if is_live(spec, model):
            errors.print(f"{path} is published as {name} version {model.current()}", markup=False)
        else:
            _load(path, spec, settings)
    return names


def described(path: Path) -> tuple[Path, ModelSpec]:
    """Reads a model.toml (or its folder) or a checkpoint; returns its path and spec. LoaderError: it is
    neither."""
    if os.path.isfile(path / "model.toml"):
        path /= "model.toml"
    return path, read_model(path) if path.suffix == ".toml" else first_model(
        path, None, RowFormat.INT8, Path.cwd()
    ).spec


def _named(text: str, settings: RootSettings) -> tuple[str, Path | None, ModelSpec | None]:
    """A model to serve; None, None: it is published, or refused by `check_name`."""
    path = Path(text)
    if NAME.fullmatch(text) and (
        Model(settings.root, text, settings.owner).versions() or not os.path.exists(path)
    ):
        return text, None, None
    if not is_path(text) and not os.path.exists(path):
        return text, None, None
    path, spec = described(path)
    return spec.name, path, spec


def _load(path: Path, spec: ModelSpec, settings: RootSettings) -> None:
    """Runs `tableside load`. ServingError: it failed, and printed why."""
    with tempfile.TemporaryDirectory() as folder:
        toml = path
        if path.suffix != ".toml":
            toml = Path(folder) / "model.toml"
            toml.write_text(write_model(replace(spec, checkpoint=path.resolve()), []), encoding="utf-8")
            tables = ", ".join(t.name for t in spec.tables)
            errors.print(
                f"{path} has no model.toml, so each table that is found is int8 and a sum-pooled feature "
                f"({tables}); choose otherwise with: tableside init {path}",
                markup=False,
            )
        errors.print(f"loading {path} as {spec.name}", markup=False)
        command = [sys.executable, "-m", "tableside", "load", str(toml), "--root", str(settings.root)]
        command += [] if settings.owner is None else ["--owner", settings.owner]
        if isinstance(settings, ServerSettings) and settings.cluster_token_file is not None:
            command += ["--cluster-token-file", str(settings.cluster_token_file)]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise ServingError(f"{path} was not loaded, so nothing is served")
