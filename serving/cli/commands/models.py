"""The models that a command names: published ones by their names, others by the path of a model.toml or of
a checkpoint."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tableside.loader.errors import LoaderError
from tableside.loader.load.origin import is_live
from tableside.loader.model.first_model import first_model
from tableside.loader.model.model import NAME, ModelSpec, read_model
from tableside.loader.model.text import write_model
from tableside.loader.versions.versions import Model, models
from tableside.quant import RowFormat
from tableside.serving.cli.output import errors
from tableside.serving.errors import ServingError
from tableside.serving.settings import RootSettings, given


def root_settings(options: argparse.Namespace) -> RootSettings:
    """The root, and whose models are trusted, as a command was given them."""
    return RootSettings(**given(options, RootSettings))


def published(options: argparse.Namespace) -> Model:
    """The model that a command names. ServingError: the name is a path, with what to name instead."""
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
    """Whether an argument cannot be a model's name and there is a file or a folder of that name, or it is
    written as a path."""
    return not NAME.fullmatch(text) and (
        text.endswith(".toml") or "/" in text or ("\0" not in text and os.path.exists(text))
    )


def check_no_path(text: str) -> None:
    """ServingError: a path stands where the name of a published model is expected."""
    if not is_path(text) or not os.path.exists(text):
        return  # a name, or what `check_name` refuses
    try:
        name = read_model(Path(text)).name
    except LoaderError:
        raise ServingError(
            f"{text} is a file; expected the name of a published model, which `tableside list` shows"
        ) from None
    raise ServingError(f"{text} is a file; expected the name of the model that it describes: {name}")


class _NamedModel(NamedTuple):
    """A model to serve. path: what names it; spec: what its load would publish; None: it is a published
    model's name."""

    name: str
    path: Path | None = None
    spec: ModelSpec | None = None


def load_where_named(arguments: Sequence[str], settings: RootSettings) -> tuple[str, ...]:
    """The names of the models to serve, once what is named by a path is loaded; stderr says what is loaded,
    and what is not.

    A model.toml or a checkpoint whose model is live as it is now is not loaded again. A load is a process of
    its own, so that the server keeps nothing of it. LoaderError, ServingError: a path names no model, or its
    load failed.
    """
    named = [_named(text, settings) for text in arguments]
    names = tuple(n.name for n in named)
    if twice := next((name for name in names if names.count(name) > 1 and any(n.spec for n in named)), None):
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
    """The model.toml or the checkpoint at a path, and what its load would publish. A folder may hold the
    model.toml.

    LoaderError: it is neither, or cannot be read.
    """
    if os.path.isfile(path / "model.toml"):
        path /= "model.toml"
    return path, read_model(path) if path.suffix == ".toml" else first_model(
        path, None, RowFormat.INT8, Path.cwd()
    ).spec


def _named(text: str, settings: RootSettings) -> _NamedModel:
    path = Path(text)
    if NAME.fullmatch(text) and (
        Model(settings.root, text, settings.owner).versions() or not os.path.exists(path)
    ):
        return _NamedModel(text)
    if not is_path(text) and not os.path.exists(path):
        return _NamedModel(text)  # which `check_name` refuses
    path, spec = described(path)
    return _NamedModel(spec.name, path, spec)


def _load(path: Path, spec: ModelSpec, settings: RootSettings) -> None:
    """Loads a model in a process of its own, as `tableside load` does. ServingError: it failed, and has
    said why."""
    with tempfile.TemporaryDirectory() as folder:
        toml = path
        if path.suffix != ".toml":
            toml = Path(folder) / "model.toml"
            toml.write_text(write_model(replace(spec, checkpoint=path.resolve()), []), encoding="utf-8")
            tables = ", ".join(t.name for t in spec.tables)
            errors.print(
                f"{path} has no model.toml, so each table that is found is int8 and a sum-pooled feature "
                f"({tables}); "
                f"choose otherwise with: tableside init {path}",
                markup=False,
            )
        errors.print(f"loading {path} as {spec.name}", markup=False)
        command = [sys.executable, "-m", "tableside", "load", str(toml), "--root", str(settings.root)]
        command += [] if settings.owner is None else ["--owner", settings.owner]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise ServingError(f"{path} was not loaded, so nothing is served")
